"""The data pipeline on Spark: source, sink, consumer and ready-made pipelines.

Nothing of Spark is imported before it is used, so that what runs on executors starts quickly and
a missing PySpark is told by whoever needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turbopump.spark.consumer import ConsumerRun, SparkConsumer
    from turbopump.spark.consuming.outcomes import GiveUp, RetryLater
    from turbopump.spark.consuming.progress import ConsumerReport
    from turbopump.spark.session_builder import session
    from turbopump.spark.source import register
    from turbopump.spark.writing.deduplication import without_duplicates
else:
    _HOMES = {
        "ConsumerReport": "turbopump.spark.consuming.progress",
        "ConsumerRun": "turbopump.spark.consumer",
        "GiveUp": "turbopump.spark.consuming.outcomes",
        "RetryLater": "turbopump.spark.consuming.outcomes",
        "SparkConsumer": "turbopump.spark.consumer",
        "register": "turbopump.spark.source",
        "session": "turbopump.spark.session_builder",
        "without_duplicates": "turbopump.spark.writing.deduplication",
    }

    def __getattr__(name):
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(home), name)


__all__ = [
    "ConsumerReport",
    "ConsumerRun",
    "GiveUp",
    "RetryLater",
    "SparkConsumer",
    "register",
    "session",
    "without_duplicates",
]
