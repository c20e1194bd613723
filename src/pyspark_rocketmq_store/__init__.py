"""Found by Spark at first use: makes ``format("rocketmq-store")`` known without registering it."""

from turbopump.spark.offline.source import DefaultSource

__all__ = ["DefaultSource"]
