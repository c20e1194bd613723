"""Turbopump: a RocketMQ-compatible messaging system in Python, with a data pipeline on Spark."""

from turbopump.errors import TurbopumpError
from turbopump.message import MessageQueue
from turbopump.version import __version__

__all__ = ["MessageQueue", "TurbopumpError", "__version__"]
