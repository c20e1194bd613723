"""Found by Spark at first use: makes ``format("rocketmq")`` known without registering it.

Spark imports every module of such a name to look for sources, and finds none at all if one of them
fails. So errors of the installation are raised only when the source is used.
"""

from typing import Any

from pyspark.sql.datasource import DataSource

__all__ = ["DefaultSource"]

DefaultSource: type[DataSource]

try:
    from turbopump.spark.source import DefaultSource
except Exception as error:  # noqa: BLE001 - whatever it is
    _WHY = f"{type(error).__name__}: {error}"

    class _Unusable(DataSource):
        @classmethod
        def name(cls) -> str:
            return "rocketmq"

        def _refuse(self, *_: Any, **__: Any) -> Any:
            raise ImportError(
                f'format("rocketmq") cannot be used here: {_WHY}; PySpark 4.2 or newer and '
                "turbopump with its extra spark, in a checkout: pip install '.[spark]', are needed "
                "where drivers and executors run"
            )

        schema = reader = writer = _refuse
        streamReader = streamWriter = _refuse  # noqa: N815 - Spark's names

    DefaultSource = _Unusable
