"""Listeners that report the lag of every batch of every query: to a log, a function, Prometheus."""

# ruff: noqa: N802 - the names of methods are Spark's

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from turbopump.errors import MissingPackage
from turbopump.spark.query_lag import SourceLag, lag_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_log = logging.getLogger(__name__)


def _log_lag(lag: SourceLag) -> None:
    _log.info("%s", lag)


class LagListener(StreamingQueryListener):
    """Reports the lag of each batch to a function; by default to the log, at level INFO.

    ::

        spark.streams.addListener(turbopump.spark.LagListener(print))
    """

    def __init__(self, report: Callable[[SourceLag], None] = _log_lag) -> None:
        self._report = report

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        for each in lag_of(event.progress):
            self._report(each)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        pass


_LABELS = ("query", "topics", "group")


class PrometheusListener(LagListener):
    """Exports the lag of all queries as metrics of ``prometheus_client``.

    Metrics of a query disappear when it ends. ``registry`` is the default one if None.

    ::

        prometheus_client.start_http_server(9108)
        spark.streams.addListener(turbopump.spark.PrometheusListener())
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        try:
            from prometheus_client import REGISTRY, Counter, Gauge
        except ImportError as missing:
            raise MissingPackage.of_extra(
                "prometheus", "PrometheusListener needs prometheus-client"
            ) from missing
        super().__init__(self._export)
        to = REGISTRY if registry is None else registry
        start = "turbopump_spark"
        self._offsets = Gauge(
            f"{start}_lag_offsets", "Unread messages per queue", (*_LABELS, "stat"), registry=to
        )
        self._seconds = Gauge(
            f"{start}_lag_seconds", "Age of the last message read", (*_LABELS, "stat"), registry=to
        )
        self._total = Gauge(f"{start}_unread", "Unread messages", _LABELS, registry=to)
        self._rows = Counter(f"{start}_rows", "Messages read", _LABELS, registry=to)
        self._batch = Gauge(f"{start}_batch", "Number of the last batch", _LABELS, registry=to)
        self._by_run: dict[str, set[tuple[str, ...]]] = defaultdict(set)

    def _export(self, lag: SourceLag) -> None:
        labels = (lag.query, ",".join(lag.topics), lag.group or "")
        self._by_run[lag.run_id].add(labels)
        self._batch.labels(*labels).set(lag.batch_id)
        self._rows.labels(*labels).inc(lag.rows)
        self._total.labels(*labels).set(lag.offsets_total)
        for gauge, spread in ((self._offsets, lag.offsets), (self._seconds, lag.seconds)):
            if spread is not None:
                gauge.labels(*labels, "min").set(spread.min)
                gauge.labels(*labels, "avg").set(spread.avg)
                gauge.labels(*labels, "max").set(spread.max)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        for query, topics, group in self._by_run.pop(str(event.runId), ()):
            of_source = {"query": query, "topics": topics, "group": group}
            for metric in (self._offsets, self._seconds, self._total, self._rows, self._batch):
                metric.remove_by_labels(of_source)
