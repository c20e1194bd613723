"""Turbopump: a RocketMQ-compatible messaging system in Python, with a data pipeline on Spark.

The clients here block, as most programs want it; `turbopump.aio` has the same names for programs
with an event loop.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from turbopump.errors import TurbopumpError
from turbopump.message import Message, MessageQueue
from turbopump.version import __version__

if TYPE_CHECKING:
    from turbopump.client.blocking import Producer
    from turbopump.client.calls import SendStatus
    from turbopump.client.config import ClientConfig
    from turbopump.client.outgoing import MessageRules, split_batch
    from turbopump.client.producer import ProducerConfig, SendReceipt
    from turbopump.client.selectors import by_chance, by_hash
else:
    # Not before it is used: servers and tools start faster without the clients.
    _HOMES = {
        "ClientConfig": "turbopump.client.config",
        "MessageRules": "turbopump.client.outgoing",
        "Producer": "turbopump.client.blocking",
        "ProducerConfig": "turbopump.client.producer",
        "SendReceipt": "turbopump.client.producer",
        "SendStatus": "turbopump.client.calls",
        "by_chance": "turbopump.client.selectors",
        "by_hash": "turbopump.client.selectors",
        "split_batch": "turbopump.client.outgoing",
    }

    def __getattr__(name):
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(home), name)


__all__ = [
    "ClientConfig",
    "Message",
    "MessageQueue",
    "MessageRules",
    "Producer",
    "ProducerConfig",
    "SendReceipt",
    "SendStatus",
    "TurbopumpError",
    "__version__",
    "by_chance",
    "by_hash",
    "split_batch",
]
