"""Listeners that report the lag of every batch of every query: to a log, a function, Prometheus."""

# ruff: noqa: N802 - the names of methods are Spark's

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

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


_Labels: TypeAlias = tuple[str, str, str]
_LABELS = ("query", "topics", "group")


class PrometheusListener(LagListener):
    """Exports the lag of all queries as metrics of ``prometheus_client``.

    Metrics of a query disappear when it ends, and those of a source when its topics change.
    ``registry`` is the default one if None.

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
        self._bad = Counter(
            f"{start}_bad_records", "Records that could not be decoded", _LABELS, registry=to
        )
        self._batch = Gauge(f"{start}_batch", "Number of the last batch", _LABELS, registry=to)
        self._metrics = (
            self._offsets,
            self._seconds,
            self._total,
            self._rows,
            self._bad,
            self._batch,
        )
        self._by_run: dict[str, set[_Labels]] = {}

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        # The group of a repeated batch is unknown, and so are its labels.
        current = {_labels(each) for each in lag_of(event.progress) if each.offsets is not None}
        if current:
            self._keep(str(event.progress.runId), current)
        super().onQueryProgress(event)

    def _export(self, lag: SourceLag) -> None:
        if lag.offsets_total is None:
            return
        labels = _labels(lag)
        self._batch.labels(*labels).set(lag.batch_id)
        self._rows.labels(*labels).inc(lag.rows)
        self._total.labels(*labels).set(lag.offsets_total)
        if lag.bad is not None:
            self._bad.labels(*labels).inc(lag.bad)
        for gauge, spread in ((self._offsets, lag.offsets), (self._seconds, lag.seconds)):
            if spread is not None:
                gauge.labels(*labels, "min").set(spread.min)
                gauge.labels(*labels, "avg").set(spread.avg)
                gauge.labels(*labels, "max").set(spread.max)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        self._keep(str(event.runId), set())

    def _keep(self, run_id: str, labels: set[_Labels]) -> None:
        """Remove metrics that a run no longer has, unless another run has the same."""
        outdated = self._by_run.pop(run_id, set()) - labels
        if labels:
            self._by_run[run_id] = labels
        for each in outdated.difference(*self._by_run.values()):
            for metric in self._metrics:
                metric.remove_by_labels(dict(zip(_LABELS, each, strict=True)))


def _labels(lag: SourceLag) -> _Labels:
    return lag.query, ",".join(lag.topics), lag.group or ""
