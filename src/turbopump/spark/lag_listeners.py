"""Listeners that report the lag of every batch of every query: to a log, a function, Prometheus."""

# ruff: noqa: N802 - the names of methods are Spark's

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from turbopump.errors import MissingPackage
from turbopump.spark.query_lag import SourceLag, lag_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge

    _M = TypeVar("_M", Counter, Gauge)

_log = logging.getLogger(__name__)
_log_lag = partial(_log.info, "%s")


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
        self._metrics: list[Counter | Gauge] = []

        def metric(kind: type[_M], name: str, text: str, *more: str) -> _M:
            to = REGISTRY if registry is None else registry
            made = kind(f"turbopump_spark_{name}", text, (*_LABELS, *more), registry=to)
            self._metrics.append(made)
            return made

        self._offsets = metric(Gauge, "lag_offsets", "Unread messages per queue", "stat")
        self._seconds = metric(Gauge, "lag_seconds", "Age of the last message read", "stat")
        self._total = metric(Gauge, "unread", "Unread messages")
        self._rows = metric(Counter, "rows", "Messages read")
        self._bad = metric(Counter, "bad_records", "Records that could not be decoded")
        self._batch = metric(Gauge, "batch", "Number of the last batch")
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
            for stat in ("min", "avg", "max") if spread is not None else ():
                gauge.labels(*labels, stat).set(getattr(spread, stat))

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
