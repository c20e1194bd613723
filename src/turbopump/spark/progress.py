"""What a consumer has done so far, gathered from the progress that Spark reports."""

from __future__ import annotations

import threading
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
            self._reports[run] = self._reports.get(run, ConsumerReport()).plus(counts)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802 - Spark's name
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        with self._changed:
            self._ended.add(str(event.runId))
            self._changed.notify_all()

    def report(self, run: str) -> ConsumerReport:
        """Return what is known of a run."""
        with self._changed:
            return self._reports.get(run, ConsumerReport())

    def await_end(self, run: str) -> None:
        """Wait until Spark has told everything about a run that has ended."""
        with self._changed:
            # Spark tells in order, so the end comes last; without it the report may be short.
            self._changed.wait_for(lambda: run in self._ended, _END_TIMEOUT_S)
