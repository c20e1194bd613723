"""What a consumer has done so far, gathered from the progress that Spark reports."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from turbopump.spark.handling import Counts

METRICS = "turbopump"
"""What Spark's progress calls the counts of a consumer, under ``observedMetrics``."""

_END_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ConsumerReport:
    """What became of messages; a batch that was repeated after a failure counts when it is done."""

    batches: int = 0
    handled: int = 0
    """Those for which the function succeeded."""

    retried: int = 0
    """Those that went back to the broker to come again; each attempt counts."""

    dead: int = 0
    """Those that became dead letters."""

    error: str | None = None
    """One of the errors that the function raised in the last batch that had any."""

    @property
    def received(self) -> int:
        return self.handled + self.retried + self.dead

    def __str__(self) -> str:
        text = (
            f"{self.received} messages in {self.batches} batches: {self.handled} handled, "
            f"{self.retried} sent back to come again, {self.dead} dead letters"
        )
        return f"{text}; {self.error}" if self.error else text

    def plus(self, counts: Counts) -> ConsumerReport:
        """Return the report after one more batch."""
        return ConsumerReport(
            self.batches + 1,
            self.handled + counts.handled,
            self.retried + counts.retried,
            self.dead + counts.dead,
            counts.error or self.error,
        )


Reached = Callable[[ConsumerReport], bool]


class Totals(StreamingQueryListener):
    """Adds up the counts of each batch of each run, as Spark tells of it."""

    def __init__(self) -> None:
        self._reports: dict[str, ConsumerReport] = {}
        self._ended: set[str] = set()
        self._changed = threading.Condition()

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        progress = event.progress
        row = progress.observedMetrics.get(METRICS)
        if row is None or row["handled"] is None:
            return
        counts = Counts(row["handled"], row["retried"], row["dead"], row["error"])
        run = str(progress.runId)
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
        """Return what is known of a run."""
        with self._changed:
            return self._of(run)

    def wait(self, run: str, is_reached: Reached, timeout_s: float | None) -> bool:
        """Wait until a report fulfils a condition; return whether it does, or did at its end."""
        with self._changed:
            self._changed.wait_for(
                lambda: run in self._ended or is_reached(self._of(run)), timeout_s
            )
            return is_reached(self._of(run))

    def _of(self, run: str) -> ConsumerReport:
        return self._reports.get(run, ConsumerReport())

    def await_end(self, run: str) -> None:
        """Wait until Spark has told everything about a run that has ended."""
        with self._changed:
            # Spark tells in order, so the end comes last; without it the report may be short.
            self._changed.wait_for(lambda: run in self._ended, _END_TIMEOUT_S)
