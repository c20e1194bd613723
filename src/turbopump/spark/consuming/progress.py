"""A consumer's results so far, collected from the progress that Spark reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import repeat
from typing import Protocol, TypeAlias

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)
from pyspark.sql.streaming.query import StreamingQuery

from turbopump.spark.consuming.handler_runner import Counts
from turbopump.spark.observed_metrics import observed

_END_TIMEOUT_S = 10.0
_POLL_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True)
class ConsumerReport:
    """Outcomes of messages; a batch repeated after a failure counts once, when it completes."""

    batches: int = 0
    handled: int = 0
    """Messages for which the function succeeded."""

    retried: int = 0
    """Messages sent back for redelivery; each attempt counts."""

    dead: int = 0
    """Messages that were dead-lettered."""

    error: str | None = None
    """One of the errors that the function raised in the last batch that had any."""

    bad: int = 0
    """Records that could not be decoded, however ``onBadRecord`` handles them."""

    @property
    def received(self) -> int:
        return self.handled + self.retried + self.dead

    def __str__(self) -> str:
        text = (
            f"{self.received} messages in {self.batches} batches: {self.handled} handled, "
            f"{self.retried} sent back for redelivery, {self.dead} dead letters"
        )
        text += f", {self.bad} bad records" if self.bad else ""
        return f"{text}; {self.error}" if self.error else text

    def plus(self, counts: Counts) -> ConsumerReport:
        """Return the report including one more batch."""
        return ConsumerReport(
            self.batches + 1,
            self.handled + counts.handled,
            self.retried + counts.retried,
            self.dead + counts.dead,
            counts.error or self.error,
            self.bad + counts.bad,
        )


Reached: TypeAlias = Callable[[ConsumerReport], bool]


class RunWatcher(Protocol):
    """Tracks the report of a run."""

    def report(self) -> ConsumerReport: ...

    def wait(self, is_reached: Reached, timeout_s: float | None) -> bool:
        """Wait until a report fulfils a condition; return whether it does, or did at the end."""
        ...

    def finish(self) -> None:
        """Receive the remaining reports of a run that has ended."""
        ...


def start_watched(
    spark: SparkSession, start: Callable[[], StreamingQuery]
) -> tuple[StreamingQuery, RunWatcher]:
    """Start a query and watch it from its first batch."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        # Listeners of its client stop at the first response that they do not understand.
        query = start()
        return query, PollingWatcher(query)
    totals = ProgressListener()
    spark.streams.addListener(totals)
    try:
        query = start()
    except BaseException:
        spark.streams.removeListener(totals)
        raise
    return query, ListeningWatcher(spark, totals, str(query.runId))


def counts_of(progress: StreamingQueryProgress) -> Counts | None:
    """Return the counts in the progress of a batch, or None if it had no messages."""
    told = observed(progress)
    # Those of a `counted_stream` have the same name, but count other things.
    if told is None or told.get("handled") is None:
        return None
    return Counts(**{field.name: told[field.name] for field in fields(Counts)})


# --- from listeners -------------------------------------------------------------------------------


class ProgressListener(StreamingQueryListener):
    """Adds up the counts of each batch of each run, as Spark reports them."""

    def __init__(self) -> None:
        self._reports: dict[str, ConsumerReport] = {}
        self._ended: set[str] = set()
        self._changed = threading.Condition()

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        counts = counts_of(event.progress)
        if counts is None:
            return
        run = str(event.progress.runId)
        with self._changed:
            self._reports[run] = self._of(run).plus(counts)
            self._changed.notify_all()

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802 - Spark's name
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        with self._changed:
            self._ended.add(str(event.runId))
            self._changed.notify_all()

    def report(self, run: str) -> ConsumerReport:
        """Return the report of a run so far."""
        with self._changed:
            return self._of(run)

    def wait(self, run: str, is_reached: Reached, timeout_s: float | None) -> bool:
        """Wait until a report fulfils a condition, or until the run has ended."""
        with self._changed:
            self._changed.wait_for(
                lambda: run in self._ended or is_reached(self._of(run)), timeout_s
            )
            return is_reached(self._of(run))

    def await_end(self, run: str) -> None:
        """Wait until Spark has reported everything about a run that has ended."""
        with self._changed:
            # Spark reports in order, so the end comes last; without it the report may have gaps.
            self._changed.wait_for(lambda: run in self._ended, _END_TIMEOUT_S)

    def _of(self, run: str) -> ConsumerReport:
        return self._reports.get(run, ConsumerReport())


class ListeningWatcher:
    """Watches a run in a session with listeners."""

    def __init__(self, spark: SparkSession, totals: ProgressListener, run: str) -> None:
        self._spark = spark
        self._totals = totals
        self._run = run
        self._is_over = False

    def report(self) -> ConsumerReport:
        return self._totals.report(self._run)

    def wait(self, is_reached: Reached, timeout_s: float | None) -> bool:
        return self._totals.wait(self._run, is_reached, timeout_s)

    def finish(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._totals.await_end(self._run)
            self._spark.streams.removeListener(self._totals)


# --- by polling -----------------------------------------------------------------------------------


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
