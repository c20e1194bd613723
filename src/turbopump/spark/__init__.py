"""The data pipeline on Spark: source, sink, consumer and ready-made pipelines.

Spark is imported only on use, so that code on executors starts quickly and a missing PySpark is
reported only where it is needed.
"""

from typing import TYPE_CHECKING

from turbopump.lazy_names import lazy_names

if TYPE_CHECKING:
    from turbopump.client.delivery.results import GiveUp, RetryLater
    from turbopump.spark.consumer import ConsumerRun, SparkConsumer
    from turbopump.spark.consuming.progress import ConsumerReport
    from turbopump.spark.lag_listeners import LagListener, PrometheusListener
    from turbopump.spark.query_lag import SourceLag, lag
    from turbopump.spark.session_builder import session
    from turbopump.spark.source import register
    from turbopump.spark.stream_counts import counted_stream
    from turbopump.spark.writing.deduplication import without_duplicates
else:
    _HOMES = {
        "spark.consumer": "ConsumerRun SparkConsumer",
        "client.delivery.results": "GiveUp RetryLater",
        "spark.consuming.progress": "ConsumerReport",
        "spark.lag_listeners": "LagListener PrometheusListener",
        "spark.query_lag": "SourceLag lag",
        "spark.session_builder": "session",
        "spark.source": "register",
        "spark.stream_counts": "counted_stream",
        "spark.writing.deduplication": "without_duplicates",
    }
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)

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
