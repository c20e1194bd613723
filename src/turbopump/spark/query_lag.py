"""How far a streaming query is behind the latest messages, from the progress that Spark reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from statistics import mean
from typing import TYPE_CHECKING, Any

import msgspec

from turbopump.spark.reading.offsets import (
    GROUP,
    NOTHING_BELOW,
    flat,
    flat_marks,
    has_marks,
    report_of,
)
from turbopump.spark.stream_counts import BAD, observed

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import SourceProgress, StreamingQueryProgress
    from pyspark.sql.streaming.query import StreamingQuery


def source_name(topics: Iterable[str], group: str | None) -> str:
    """Return the display name of a source, also used in Spark's UI for our queries."""
    return ", ".join(topics) + ("" if group is None else f" (group {group})")


@dataclass(frozen=True, slots=True)
class Spread:
    """Minimum, average and maximum over the queues of a source."""

    min: float
    avg: float
    max: float

    def __str__(self) -> str:
        return f"{_number(self.min)} / {_number(self.avg)} / {_number(self.max)}"

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Return the spread of values, or None if there are none."""
        found = list(values)
        return cls(min(found), mean(found), max(found)) if found else None


@dataclass(frozen=True, slots=True)
class SourceLag:
    """How far one source of a query was behind after planning a batch."""

    query: str
    """The query's name, or its id if it has none."""

    run_id: str
    batch_id: int
    topics: tuple[str, ...]
    group: str | None
    rows: int
    """Messages of the batch."""

    queues: int
    offsets: Spread | None
    """Messages that a queue has after the end of the batch.

    None, as are the total, the seconds and the group, for the first batch after a restart if Spark
    repeats it: Spark then asks for no latest offsets.
    """

    offsets_total: int | None
    seconds: Spread | None
    """Age of the last message read, 0 for a queue that is read to its end.

    Queues with unread messages but none read do not count; None if there are no others.
    """

    bad: int | None = None
    """Records of the batch that could not be decoded.

    None unless the query counts them, as `SparkConsumer` and `counted_stream` do, and has one
    source.
    """

    @property
    def name(self) -> str:
        """The topics and the group, as in ``orders, payments (group billing)``."""
        return source_name(self.topics, self.group)

    def __str__(self) -> str:
        bad = f", {self.bad} of them bad," if self.bad else ""
        read = (
            f"{self.name}, batch {self.batch_id}: {self.rows} rows{bad} from {self.queues} queues"
        )
        if self.offsets is None:
            return f"{read}; lag unknown: the batch is repeated"
        seconds = "unknown" if self.seconds is None else f"{self.seconds}"
        return f"{read}; min / avg / max behind: {self.offsets} messages, {seconds} seconds"


def lag(query: StreamingQuery) -> tuple[SourceLag, ...]:
    """Return the lag of each ``rocketmq`` source of a query after its last batch.

    Empty before the first batch. Makes no request: Spark's progress has the figures.

    ::

        for source in turbopump.spark.lag(query):
            print(source.name, source.offsets.max, source.seconds)
    """
    progress = query.lastProgress
    return () if progress is None else lag_of(progress)


def lag_of(progress: StreamingQueryProgress) -> tuple[SourceLag, ...]:
    """Return the lag in the progress of one batch, for each ``rocketmq`` source."""
    lags = (_source_lag(progress, source) for source in progress.sources)
    found = tuple(each for each in lags if each is not None)
    counts = observed(progress)
    if len(found) != 1 or counts is None or BAD not in counts:
        return found
    # Null if the batch had no rows to count.
    return (replace(found[0], bad=counts[BAD] or 0),)


def _source_lag(progress: StreamingQueryProgress, source: SourceProgress) -> SourceLag | None:
    reported, ended = _decoded(source.latestOffset), _decoded(source.endOffset)
    report = report_of(reported)
    is_repeated = source.latestOffset in (None, "null") and has_marks(ended)
    if report is None and not is_repeated:
        return None
    latest, end, marks = flat(reported), flat(ended), flat_marks(ended)
    behind = {queue: max(0, at - end[queue]) for queue, at in latest.items() if queue in end}
    offsets = Spread.of(behind.values())
    if offsets is None and not is_repeated:
        return None
    planned_ms = datetime.fromisoformat(progress.timestamp).timestamp() * 1000
    seconds = Spread.of(
        max(0.0, planned_ms - marks[queue][0]) / 1000 if left else 0.0
        for queue, left in behind.items()
        if not left or marks.get(queue, NOTHING_BELOW) != NOTHING_BELOW
    )
    return SourceLag(
        query=progress.name or str(progress.id),
        run_id=str(progress.runId),
        batch_id=progress.batchId,
        topics=tuple(sorted({queue.topic for queue in (latest or end)})),
        group=None if report is None else report[GROUP],
        rows=source.numInputRows,
        queues=len(behind or end),
        offsets=offsets,
        offsets_total=None if offsets is None else sum(behind.values()),
        seconds=seconds,
    )


def _decoded(offsets: str | None) -> Mapping[str, Any]:
    """Decode an offset of any source; only JSON objects are ours."""
    try:
        found = msgspec.json.decode(offsets or "{}")
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
