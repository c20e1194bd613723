"""Redrive: send matching dead letters again, on all cores of the cluster.

Spark selects the letters; the executors send them with `turbopump.admin`. Each copy names its
letter and is searched for before a letter is sent: letters redriven by an earlier run, by one that
died, or by ``turbopump dead-letters`` are not sent again.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its conventional name

from turbopump.admin.administration import Admin
from turbopump.admin.dead_letters import Destination, LetterFilter, Outcome
from turbopump.admin.range_reader import OffsetRange, Span
from turbopump.client.config import ClientConfig
from turbopump.client.names import check_topic_for_sending
from turbopump.client.session import Session
from turbopump.errors import NotThere
from turbopump.message import MessageQueue, QueueOffset
from turbopump.spark.pipelines.arguments import between, require_driver, to_utc
from turbopump.spark.pipelines.pacing import Pace, Pacer, slices
from turbopump.spark.pipelines.progress import Step, Watch, unwatched
from turbopump.spark.pipelines.reports import Table, facts
from turbopump.spark.pipelines.send_progress import SendProgress
from turbopump.spark.pipelines.spark_errors import explain_errors
from turbopump.spark.records.schema import report_schemas
from turbopump.spark.shared_session import shared_session
from turbopump.spark.worker_process import begins_call
from turbopump.wire.names import dead_letter_topic, retry_topic
from turbopump.wire.properties import RETRY_TOPIC

_LETTERS_AT_ONCE = 256
_PLACE = ("broker", "queueId", "queueOffset")
_SPARK, _ARROW = report_schemas("topic string, outcome string, letters long")


@dataclass(frozen=True, slots=True)
class RedrivenTopic:
    """The outcomes of the letters for one topic."""

    topic: str | None
    """None for letters that do not name their original topic."""

    letters: int
    sent: int
    would_be_sent: int
    sent_before: int
    origin_unknown: int
    origin_gone: int
    """Their topic was deleted; a redrive does not re-create it."""


@dataclass(frozen=True, slots=True)
class RedriveReport:
    """What a redrive found, selected and sent; each letter counts when its outcome is known."""

    group: str
    where: str | None
    is_dry_run: bool
    letters: int
    """All dead letters of the group at the start."""

    chosen: int
    """Matching letters, including those that expired before they were sent."""

    topics: tuple[RedrivenTopic, ...]
    seconds: float

    @property
    def gone(self) -> int:
        return self.chosen - sum(each.letters for each in self.topics)

    @property
    def sent(self) -> int:
        return sum(each.sent for each in self.topics)

    @property
    def sent_before(self) -> int:
        return sum(each.sent_before for each in self.topics)

    def tables(self) -> tuple[Table, ...]:
        title = f"dead letters of {self.group}" + (
            ", dry run: nothing was sent" if self.is_dry_run else ""
        )
        rows = tuple(
            (
                each.topic or "origin unknown",
                each.letters,
                each.would_be_sent if self.is_dry_run else each.sent,
                each.sent_before,
            )
            for each in self.topics
        )
        done = "would be sent" if self.is_dry_run else "sent"
        return (
            Table(title, ("to topic", "letters", done, "sent before"), rows),
            facts(
                "",
                dead_letters=self.letters,
                chosen=self.chosen,
                **{done.replace(" ", "_"): sum(row[2] for row in rows)},
                sent_before=self.sent_before,
                gone_meanwhile=self.gone,
                seconds=self.seconds,
            ),
        )


def redrive(
    spark: SparkSession,
    group: str,
    nameserver: str | Sequence[str],
    *,
    where: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    to: Destination | str = Destination.ORIGIN,
    again: bool = False,
    rate_per_s: float | None = None,
    is_dry_run: bool = False,
    watch: Watch = unwatched,
) -> RedriveReport:
    """Resend the dead letters of a group, all or those that match.

    ``where`` is a Spark SQL condition over the columns of the source, such as
    ``reconsumeTimes >= 3 AND body LIKE '%timeout%'``; ``since`` and ``until`` bound the time at
    which they became dead letters. ``again`` also resends letters that were redriven before.
    """
    require_driver(spark, "redrive")
    since, until = to_utc("since", since), to_utc("until", until)
    started_s = time.monotonic()
    pace = Pace(rate_per_s)
    if isinstance(to, str):
        check_topic_for_sending(to)
    client = ClientConfig(nameserver)
    shared_session(client).run(lambda session: _require_letters(session, group))
    with explain_errors():
        source = {
            "nameserver": ";".join(client.nameserver_addresses),
            "topic": dead_letter_topic(group),
            # A message may be a dead letter because its body is damaged.
            "onBadRecord": "null",
        }
        every = spark.read.format("rocketmq").options(**source).load()
        chosen = between(every, F.col("storeTimestamp"), since, until)
        chosen = chosen if where is None else chosen.where(where)
        watch(Step("choosing dead letters"))
        origins = chosen.groupBy(F.col("properties")[RETRY_TOPIC].alias("origin")).count()
        counts = {row["origin"]: row["count"] for row in origins.collect()}
        letters = every.count()
        total = sum(counts.values())
        watch(Step("dead letters chosen", total, letters))
        work = _Work(client, group, to, again, is_dry_run, pace, time.time())
        tasks = min(spark.sparkContext.defaultParallelism, -(-total // _LETTERS_AT_ONCE) or 1)
        targets = [] if is_dry_run else _targets(group, to, counts)
        with SendProgress(client, targets, "dead letters done", total, watch):
            done = _done(chosen, work, tasks) if total else []
    return RedriveReport(
        group, where, is_dry_run, letters, total, _topics(done), time.monotonic() - started_s
    )


async def _require_letters(session: Session, group: str) -> None:
    """Raise NotThere with similar names unless the group is known and had a dead letter."""
    admin = Admin(session=session)
    topic = dead_letter_topic(group)
    if topic not in await admin.topics.names():
        await admin.groups.require(group)
        raise NotThere("dead letter of group", group)


def _targets(group: str, to: Destination | str, counts: Mapping[str | None, int]) -> list[str]:
    if isinstance(to, str):
        return [to]
    if to is Destination.RETRY:
        return [retry_topic(group)]
    return [origin for origin in counts if origin is not None]


def _done(chosen: DataFrame, work: _Work, tasks: int) -> list[Row]:
    # One task reads letters that are stored together.
    placed = chosen.select(*_PLACE, "offsetMsgId").repartitionByRange(tasks, *_PLACE)
    return placed.sortWithinPartitions(*_PLACE).mapInArrow(work.task(tasks), _SPARK).collect()


@dataclass(frozen=True, slots=True)
class _Work:
    """The work of executors on letters; sent to them."""

    client: ClientConfig
    group: str
    to: Destination | str
    again: bool
    is_dry_run: bool
    pace: Pace
    start_s: float

    def task(self, tasks: int) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        """Return the work of one of several tasks."""
        pace = self.pace.shared(1 / tasks)

        @begins_call
        def redriven(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            assert TaskContext.get() is not None
            pacer = Pacer(pace, self.start_s)
            for batch in batches:
                timeless = np.zeros(batch.num_rows, np.int64)
                for due in slices(timeless, 0, pace, _LETTERS_AT_ONCE):
                    time.sleep(pacer.wait_s(due, time.time()))
                    pacer.sent(due.end - due.start, time.time())
                    yield self._slice(batch.slice(due.start, due.end - due.start))

        return redriven

    def _slice(self, letters: pa.RecordBatch) -> pa.RecordBatch:
        rows = letters.to_pylist()
        span = Span(_offset_ranges(self.group, rows))
        wanted = LetterFilter(ids=frozenset(row["offsetMsgId"] for row in rows))
        counts = shared_session(self.client).run(
            lambda session: self._redrive(session, span, wanted)
        )
        done = [
            {"topic": topic, "outcome": outcome.name, "letters": count}
            for (topic, outcome), count in counts.items()
        ]
        return pa.RecordBatch.from_pylist(done, schema=_ARROW)

    async def _redrive(
        self, session: Session, span: Span, wanted: LetterFilter
    ) -> Counter[tuple[str | None, Outcome]]:
        redriven = Admin(session=session).dead_letters.redrive(
            self.group,
            to=self.to,
            wanted=wanted,
            span=span,
            again=self.again,
            dry_run=self.is_dry_run,
        )
        return Counter([(done.topic, done.outcome) async for done in redriven])


def _offset_ranges(group: str, rows: Sequence[Mapping[str, object]]) -> tuple[OffsetRange, ...]:
    """Return the queue ranges that hold these letters, which are sorted by position."""
    found: list[OffsetRange] = []
    for row in rows:
        broker, queue_id, offset = (row[name] for name in _PLACE)
        assert isinstance(queue_id, int)
        assert isinstance(offset, int)
        queue = MessageQueue(dead_letter_topic(group), str(broker), queue_id)
        begin = QueueOffset(offset)
        if found and found[-1].queue == queue and found[-1].end == offset:
            begin = found.pop().begin
        found.append(OffsetRange(queue, begin, QueueOffset(offset + 1)))
    return tuple(found)


def _topics(done: Sequence[Row]) -> tuple[RedrivenTopic, ...]:
    counts: defaultdict[str | None, Counter[str]] = defaultdict(Counter)
    for row in done:
        counts[row["topic"]][row["outcome"]] += row["letters"]
    return tuple(
        RedrivenTopic(
            topic, found.total(), **{each.name.lower(): found[each.name] for each in Outcome}
        )
        for topic, found in sorted(counts.items(), key=lambda item: item[0] or "")
    )
