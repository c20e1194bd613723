"""A consumer's results so far, collected from the progress that Spark reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from itertools import repeat
from typing import TypeAlias

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)
from pyspark.sql.streaming.query import StreamingQuery

from turbopump.spark.consuming.handler_runner import Counts
from turbopump.spark.stream_counts import observed

_END_TIMEOUT_S = 10.0
_POLL_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True)
class ConsumerReport(Counts):
    """Outcomes of messages; a batch repeated after a failure counts once, when it completes.

    The error is one that the function raised in the last batch that had any.
    """

    batches: int = 0

    def __str__(self) -> str:
        text = (
            f"{self.received} messages in {self.batches} batches: {self.handled} handled, "
            f"{self.retried} sent back for redelivery, {self.dead} dead letters"
        )
        text += f", {self.bad} bad records" if self.bad else ""
        return f"{text}; {self.error}" if self.error else text

    def plus(self, other: Counts) -> ConsumerReport:
        """Return the report including one more batch."""
        return ConsumerReport(**asdict(other.plus(self)), batches=self.batches + 1)


Reached: TypeAlias = Callable[[ConsumerReport], bool]


def start_watched(
    spark: SparkSession, start: Callable[[], StreamingQuery]
) -> tuple[StreamingQuery, RunWatcher]:
    """Start a query and watch it from its first batch."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        # Listeners of its client stop at the first response that they do not understand.
        query = start()
        return query, PollingWatcher(query)
    watcher = ListeningWatcher(spark)
    spark.streams.addListener(watcher)
    try:
        query = start()
    except BaseException:
        spark.streams.removeListener(watcher)
        raise
    watcher.run = str(query.runId)
    return query, watcher


def counts_of(progress: StreamingQueryProgress) -> Counts | None:
    """Return the counts in the progress of a batch, or None if it had no messages."""
    metrics = observed(progress)
    # Those of a `counted_stream` have the same name, but count other things.
    if metrics is None or metrics.get("handled") is None:
        return None
    return Counts(**{field.name: metrics[field.name] for field in fields(Counts)})


class ListeningWatcher(StreamingQueryListener):
    """Adds up the counts of a run's batches as Spark reports them."""

    def __init__(self, spark: SparkSession) -> None:
        self.run = ""
        """The run to watch, known once it has started; Spark reports other runs as well."""
        self._spark = spark
        self._reports: dict[str, ConsumerReport] = {}
        self._ended: set[str] = set()
        self._changed = threading.Condition()
        self._is_over = False

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        counts = counts_of(event.progress)
        if counts is None:
            return
        run = str(event.progress.runId)
        with self._changed:
            self._reports[run] = self._reports.get(run, ConsumerReport()).plus(counts)
            self._changed.notify_all()

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        with self._changed:
            self._ended.add(str(event.runId))
            self._changed.notify_all()

    def report(self) -> ConsumerReport:
        return self._reports.get(self.run, ConsumerReport())

    def wait(self, is_reached: Reached, timeout_s: float | None) -> bool:
        """Wait until the report fulfils a condition; return whether it does, or did at the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.run in self._ended or is_reached(self.report()), timeout_s
            )
            return is_reached(self.report())

    def finish(self) -> None:
        """Receive the remaining reports of a run that has ended."""
        if self._is_over:
            return
        self._is_over = True
        with self._changed:
            # Spark reports in order, so the end comes last; without it the report may have gaps.
            self._changed.wait_for(lambda: self.run in self._ended, _END_TIMEOUT_S)
        self._spark.streams.removeListener(self)


class PollingWatcher:
    """Watches a run by polling the progress that Spark keeps: normally its last 100 batches.

    Progress seen once is kept: the report has gaps only if polls are more than that apart.
    """

    def __init__(self, query: StreamingQuery) -> None:
        self._query = query
        self._counts: dict[int, Counts] = {}

    def report(self) -> ConsumerReport:
        for progress in self._query.recentProgress:
            counts = counts_of(progress)
            if counts is not None:
                self._counts[progress.batchId] = counts
        report = ConsumerReport()
        for batch_id in sorted(self._counts):
            report = report.plus(self._counts[batch_id])
        return report

    def wait(self, is_reached: Reached, timeout_s: float | None) -> bool:
        for backoff_s in _pauses(timeout_s):
            if is_reached(self.report()):
                return True
            try:
                if self._query.awaitTermination(backoff_s):  # type: ignore[arg-type]
                    break
            except StreamingQueryException:
                # Reported by `await_termination`; here it is an end like any other.
                break
        return is_reached(self.report())

    def finish(self) -> None:
        pass


def _pauses(timeout_s: float | None) -> Iterator[float]:
    if timeout_s is None:
        return repeat(_POLL_INTERVAL_S)
    whole, rest = divmod(timeout_s, _POLL_INTERVAL_S)
    return iter([*repeat(_POLL_INTERVAL_S, int(whole)), *([rest] if rest else [])])


RunWatcher: TypeAlias = ListeningWatcher | PollingWatcher
