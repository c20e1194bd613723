"""Found by Spark at first use: makes ``format("rocketmq")`` known without registering it."""

from turbopump.spark.source import DefaultSource

__all__ = ["DefaultSource"]
