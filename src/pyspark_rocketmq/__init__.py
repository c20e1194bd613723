"""Found by Spark at first use: makes ``format("rocketmq")`` known without registering it.

Spark imports every module of such a name to look for sources, and finds none at all if one of them
fails. So errors of the installation are raised only when the source is used.
"""

from typing import Any

from pyspark.sql.datasource import DataSource

__all__ = ["DefaultSource"]

DefaultSource: type[DataSource]


class Unusable(DataSource):
    """Stands for a source that could not be imported."""

    format_name: str
    why: str

    @classmethod
    def name(cls) -> str:
        return cls.format_name

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ImportError(
            f'format("{self.format_name}") cannot be used here: {self.why}; PySpark 4.2 or newer '
            "and turbopump with its extra spark, in a checkout: pip install '.[spark]', are needed "
            "where drivers and executors run"
        )

    schema = reader = writer = _refuse
    streamReader = streamWriter = _refuse  # noqa: N815 - Spark's names


try:
    from turbopump.spark.source import DefaultSource
except Exception as error:  # noqa: BLE001 - whatever it is

    class _UnusableSource(Unusable):
        format_name = "rocketmq"
        why = f"{type(error).__name__}: {error}"

    DefaultSource = _UnusableSource
