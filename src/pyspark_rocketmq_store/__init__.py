"""Found by Spark at first use: makes ``format("rocketmq-store")`` known without registering it.

Errors of the installation are raised only when the source is used, as in `pyspark_rocketmq`.
"""

from pyspark.sql.datasource import DataSource

from pyspark_rocketmq import Unusable

__all__ = ["DefaultSource"]

DefaultSource: type[DataSource]

try:
    from turbopump.spark.offline.source import DefaultSource
except Exception as error:  # noqa: BLE001 - whatever it is

    class _UnusableSource(Unusable):
        format_name = "rocketmq-store"
        why = f"{type(error).__name__}: {error}"

    DefaultSource = _UnusableSource
