"""The data pipeline on Spark: source, sink, consumer and ready-made pipelines.

Spark is imported only on use, so that code on executors starts quickly and a missing PySpark is
reported only where it is needed.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from turbopump.spark.worker_exit import end_quietly

if TYPE_CHECKING:
    from turbopump.spark.consumer import ConsumerRun, SparkConsumer
    from turbopump.spark.consuming.outcomes import GiveUp, RetryLater
    from turbopump.spark.consuming.progress import ConsumerReport
    from turbopump.spark.lag_listeners import LagListener, PrometheusListener
    from turbopump.spark.query_lag import SourceLag, lag
    from turbopump.spark.session_builder import session
    from turbopump.spark.source import register
    from turbopump.spark.stream_counts import counted_stream
    from turbopump.spark.writing.deduplication import without_duplicates
else:
    _HOMES = {
        "ConsumerReport": "turbopump.spark.consuming.progress",
        "ConsumerRun": "turbopump.spark.consumer",
        "GiveUp": "turbopump.spark.consuming.outcomes",
        "LagListener": "turbopump.spark.lag_listeners",
        "PrometheusListener": "turbopump.spark.lag_listeners",
        "RetryLater": "turbopump.spark.consuming.outcomes",
        "SourceLag": "turbopump.spark.query_lag",
        "SparkConsumer": "turbopump.spark.consumer",
        "counted_stream": "turbopump.spark.stream_counts",
        "lag": "turbopump.spark.query_lag",
        "register": "turbopump.spark.source",
        "session": "turbopump.spark.session_builder",
        "without_duplicates": "turbopump.spark.writing.deduplication",
    }

    def __getattr__(name):
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(home), name)


# Every worker that reads, writes or handles messages imports this package.
end_quietly()

__all__ = [
    "ConsumerReport",
    "ConsumerRun",
    "GiveUp",
    "LagListener",
    "PrometheusListener",
    "RetryLater",
    "SourceLag",
    "SparkConsumer",
    "counted_stream",
    "lag",
    "register",
    "session",
    "without_duplicates",
]
