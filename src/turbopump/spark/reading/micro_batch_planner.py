"""Plans the micro-batches of a stream: where each one ends. Runs on the driver.

A new queue is not read in the batch that finds it: that batch only records where the queue starts.
So the start is in the checkpoint before anything is read, and a repeated batch starts at the same
offsets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from turbopump.clock import Clock
from turbopump.errors import DataLost
from turbopump.message import MessageQueue
from turbopump.spark.reading.cluster import Cluster
from turbopump.spark.reading.offsets import (
    NOTHING_BELOW,
    Limits,
    Mark,
    Marks,
    Offsets,
    backlog,
    by_place,
    first_texts,
    forward,
    losses,
    moved_past,
    shares,
)
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.reading.positions import Earliest, OfGroup, Position
from turbopump.spark.reading.unreadable_queues import Unreadable

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _QueueSnapshot:
    """The state of the queues when a batch is planned."""

    start: Offsets
    """Where to resume, past lost messages."""
    new: Offsets
    """New queues, and where they start."""
    target: Offsets
    """Up to where there are messages to read."""
    closed: frozenset[MessageQueue] = frozenset()
    """Queues that are currently unreadable."""
    returned: frozenset[MessageQueue] = frozenset()
    """Queues that were deleted and re-created."""


class MicroBatchPlanner:
    """Decides where each micro-batch ends; keeps state between them.

    Queues in the checkpoint that the options no longer select keep their offsets.
    """

    def __init__(
        self,
        cluster: Cluster,
        options: SourceOptions,
        clock: Clock,
        may_commit: Callable[[], bool] = lambda: True,
    ) -> None:
        self._cluster = cluster
        self._options = options
        self._clock = clock
        self._may_commit = may_commit
        self._has_begun = False
        self._frozen: Offsets | None = None
        self.committed: dict[MessageQueue, int] = {}
        """The group's offsets that brokers have accepted."""
        self._doubtful: set[MessageQueue] = set()
        """Queues whose broker may have lost the offset that it accepted."""
        self._comparison_due_ms = clock.monotonic_ms() + options.client.route_interval_ms
        self._left: frozenset[MessageQueue] = frozenset()
        """Queues that were deleted and not re-created yet."""
        self.marks: Marks = {}
        """Marks of the last messages before the offsets that `latest` returned."""
        self._marked_at: Offsets = {}
        self._missing_due_ms = clock.monotonic_ms()
        """When to ask again for marks that are missing."""
        self._checks_all = True
        """Whether the checkpoint's marks must still be compared with all queues."""
        self._last_batch_ms = clock.monotonic_ms()
        self.latest_known: Offsets = {}
        """The end of each queue as far as it is known, for lag metrics."""
        self._reported: frozenset[str] = frozenset()
        """Unreadable queues that have been logged."""
        self._quiet: tuple[object, ...] | None = None
        """What the last look saw: offsets, ends of queues, and last messages of topics; None if
        something was unusual."""

    async def freeze(self) -> None:
        """Stop the stream at the current ends of its queues."""
        limits = await self._cluster.limits(await self._cluster.known_queues())
        self._frozen = {queue: ends.high for queue, ends in limits.items()}
        self.latest_known = self._frozen

    async def commit(self, offsets: Offsets) -> None:
        """Commit the group's offsets that have changed, and those that brokers have lost.

        Deleted queues are committed at 0: Spark commits their old offset once more when it plans
        the batch that drops them.
        """
        if not (self._options.commit_offsets and self._may_commit()):
            return
        await self._find_lost_commits(offsets)
        wanted = {**offsets, **dict.fromkeys(self._left, 0)}
        committed, doubtful = self.committed.get, self._doubtful
        changed = {q: at for q, at in wanted.items() if committed(q) != at or q in doubtful}
        accepted = await self._cluster.commit(changed) if changed else {}
        self.committed.update(accepted)
        self._doubtful.difference_update(accepted)

    async def _find_lost_commits(self, offsets: Offsets) -> None:
        """Find accepted offsets that brokers no longer have, or lost in a crash since.

        A crash shows in a lost connection; whatever else changes offsets, in a comparison at times.
        """
        lost, now_ms = self._cluster.lost_commits(), self._clock.monotonic_ms()
        doubtful = [queue for queue in self.committed if (queue.topic, queue.broker) in lost]
        if now_ms >= self._comparison_due_ms:
            self._comparison_due_ms = now_ms + self._options.client.route_interval_ms
            known = [queue for queue in offsets if queue in self.committed]
            stored = await self._cluster.stored_offsets(known)
            doubtful += (queue for queue, at in stored.items() if at != self.committed[queue])
        self._doubtful.update(doubtful)

    async def latest(
        self,
        start: Offsets,
        *,
        is_limited: bool = True,
        has_begun: bool = False,
        marks: Marks | None = None,
    ) -> Offsets:
        """Return where the batch ends that starts at ``start``, the end of the last one.

        Without new messages it waits for some: Spark would ask again immediately. A stream that
        ``has_begun`` has recorded where it starts, even if there were no queues. ``marks`` are
        those of the checkpoint, by default those recorded by the last call.
        """
        await self.commit(start)
        if marks is None:
            same = (queue for queue in self.marks if self._marked_at.get(queue) == start.get(queue))
            marks = {queue: self.marks[queue] for queue in same}
        self.marks = marks
        if not (start or has_begun or self._has_begun):
            # The first batch only records where the stream starts.
            queues = await self._cluster.queues()
            begin = await self._cluster.resolve("startingOffsets", self._options.start, queues)
            end = await self._marked({}, begin, is_first=True)
            self._has_begun = True
            return end
        seen = await self._snapshot(start, is_first=not self._has_begun)
        self._has_begun = True
        end = await self._end(seen, is_limited=is_limited)
        if end == start and self._frozen is None:
            if await self._wait(seen):
                seen = await self._snapshot(start)
            end = await self._end(seen, is_limited=is_limited)
        planned, end = end, await self._marked(start, end, self._missing(seen, end))
        if end != start:
            self._last_batch_ms = self._clock.monotonic_ms()
        elif planned != start:
            # Spark would ask a broker that does not respond again immediately.
            await self._wait(seen)
        self._left -= {queue for queue in seen.returned if end.get(queue) == planned.get(queue)}
        return end

    async def _marked(
        self,
        start: Offsets,
        end: Offsets,
        missing: Offsets | None = None,
        *,
        is_first: bool = False,
    ) -> Offsets:
        """Record the last message before each offset that has changed, or that has no mark.

        A queue whose broker does not respond stays at its old offset, and a new one is not added:
        without a mark, a re-created queue would be read from the middle.
        """
        changed = {queue: at for queue, at in end.items() if start.get(queue) != at}
        asked = {queue: at for queue, at in changed.items() if at > 0}
        if missing:
            asked.update(missing)
        found = await self._last_marks(asked, is_first=is_first) if asked else {}
        if held := asked.keys() - found.keys():
            stays = {queue: start[queue] for queue in held if queue in start}
            end = {queue: at for queue, at in end.items() if queue not in held} | stays
            changed = {queue: at for queue, at in changed.items() if queue not in held}
        known = {queue: mark for queue, mark in found.items() if mark is not None}
        # Without those of other offsets.
        kept = {q: mark for q, mark in self.marks.items() if q in end and q not in changed}
        self.marks = {**kept, **known}
        self._marked_at = end
        return end

    async def _last_marks(
        self, offsets: Offsets, *, is_first: bool
    ) -> Mapping[MessageQueue, Mark | None]:
        """Return the mark before each offset, None if it is unknown; brokers may not respond.

        The first batch and a frozen stream need all: there is no later batch to wait for.
        """
        cluster = self._cluster
        needs_all = is_first or self._frozen is not None
        found = await (cluster.all_marks(offsets) if needs_all else cluster.marks(offsets))
        absent = [queue for queue, mark in found.items() if mark is None]
        if not absent:
            return found
        ends_of = cluster.limits if needs_all else cluster.known_limits
        limits = await ends_of(absent)
        answers: dict[MessageQueue, Mark | None] = {q: m for q, m in found.items() if m is not None}
        for queue, ends in limits.items():
            if ends.is_certain and ends.low >= offsets[queue]:
                answers[queue] = NOTHING_BELOW
            elif needs_all or ends.high >= offsets[queue]:
                answers[queue] = None
            # Else the topic was just re-created, or a slave responds that lacks the message.
        return answers

    def _missing(self, seen: _QueueSnapshot, end: Offsets) -> Offsets:
        """Return offsets without a mark whose brokers respond, once per lookup of queues.

        Checkpoints of version 0.1 have no marks, and a slave may not know one.
        """
        marks, now_ms = self.marks, self._clock.monotonic_ms()
        if now_ms < self._missing_due_ms:
            return {}
        self._missing_due_ms = now_ms + self._options.client.route_interval_ms
        offsets = ((queue, end.get(queue, 0)) for queue in seen.target if queue not in marks)
        return {queue: at for queue, at in offsets if at > 0}

    async def without_lost(
        self, start: Offsets, end: Offsets, start_marks: Marks, end_marks: Marks
    ) -> Offsets:
        """Return the end of a batch that another process has planned, without re-created queues.

        Spark repeats such a batch without asking where it ends, but its messages may have changed.
        Raises DataLost if losses are errors.
        """
        batch = [queue for queue, at in start.items() if end.get(queue, at) > at]
        limits = await self._cluster.known_limits(batch)
        before = await self._changed_marks(start, batch, start_marks)
        last = await self._changed_marks(end, batch, end_marks)
        recreated = before[0] | last[0]
        # The task that reads the rest reports expired messages.
        gone = {
            queue: ends
            for queue, ends in limits.items()
            if queue in recreated or (ends.is_certain and ends.high < end[queue])
        }
        self._past_losses(end, gone, recreated)
        return {queue: at for queue, at in end.items() if queue not in gone}

    async def _forget(self, deleted: Iterable[MessageQueue]) -> frozenset[MessageQueue]:
        """Reset the group's offsets of deleted queues, and return the queues that were reset.

        Brokers may keep the old offset. A queue leaves the checkpoint only after the reset, or
        another process would resume from the old offset once the queue is re-created.
        """
        leaving = frozenset(deleted)
        self._left |= leaving
        if self._left:
            await self.commit({})
        if not self._options.commit_offsets:
            return leaving
        return frozenset(queue for queue in leaving if self.committed.get(queue) == 0)

    # --- state of queues --------------------------------------------------------------------------

    async def _snapshot(self, start: Offsets, *, is_first: bool = False) -> _QueueSnapshot:
        known = await self._cluster.known_queues(start)
        new = await self._new_queues(start, known)
        read = [queue for queue in start if self._options.chosen.has(queue)]
        limits = found = await self._limits(read)
        outside = [q for q, ends in limits.items() if not ends.low <= start[q] <= ends.high]
        doubtful = set(read).difference(known)
        doubtful.update(queue for queue in outside if limits[queue].high < start[queue])
        unreadable = await self._cluster.unreadable(read, doubtful)
        if is_first:
            self._require_frozen(read, unreadable)
        closed = await self._closed(limits, unreadable)
        self._require_nothing_lost(start, closed, unreadable)
        deleted = (queue for queue, why in unreadable.items() if why is Unreadable.DELETED)
        gone = await self._forget(deleted)
        kept = {queue: at for queue, at in start.items() if queue not in gone} if gone else start
        if unreadable:
            limits = {queue: ends for queue, ends in limits.items() if queue not in unreadable}
        again = {queue: limits[queue].low for queue in self._left & kept.keys() & limits.keys()}
        recreated, unchecked = frozenset[MessageQueue](), frozenset[MessageQueue]()
        newest = self._cluster.newest()
        if unreadable or newest is None or self._quiet != (start, found, newest):
            recreated, unchecked = await self._recreated(kept, limits)
        suspects = {q: limits[q] for q in chain(outside, recreated) if q in limits}
        reached = self._past_losses(kept, {**suspects, **closed}, recreated)
        if again:
            reached = {**reached, **again}
        highs = {queue: ends.high for queue, ends in limits.items() if queue not in unchecked}
        self.latest_known = {**kept, **highs, **new}
        target = highs
        if self._frozen is not None or reached != kept:
            # A re-created queue moves back in this batch and is read in the next: a range that
            # ends before its start is empty.
            target = {
                queue: high if self._frozen is None else min(high, self._frozen[queue])
                for queue, high in highs.items()
                if reached[queue] >= kept[queue]
            }
        returned = self._left & (new.keys() | again.keys())
        seen = _QueueSnapshot(reached, new, target, closed=frozenset(unreadable), returned=returned)
        unusual = unreadable or new or unchecked or recreated or returned or doubtful
        self._quiet = None if unusual or self._frozen else (start, found, newest)
        return seen

    async def _closed(
        self, limits: Mapping[MessageQueue, Limits], unreadable: Mapping[MessageQueue, Unreadable]
    ) -> Mapping[MessageQueue, Limits]:
        """Return the known ends of closed queues."""
        closed = [queue for queue, why in unreadable.items() if why is Unreadable.CLOSED]
        asked = [queue for queue in closed if queue not in limits]
        ends = {**limits, **(await self._cluster.known_limits(asked) if asked else {})}
        return {queue: ends[queue] for queue in closed if queue in ends}

    def _require_nothing_lost(
        self,
        start: Offsets,
        closed: Mapping[MessageQueue, Limits],
        unreadable: Mapping[MessageQueue, Unreadable],
    ) -> None:
        """Raise DataLost for unreadable messages, or log them once.

        What a deleted topic still had is unknown. A closed queue keeps its messages: nothing is
        lost if all of them were read.
        """
        unread = {queue: ends.high - start[queue] for queue, ends in closed.items()}
        lost = [
            f"{queue} cannot be read from offset {start[queue]}: {why.value}"
            for queue, why in sorted(unreadable.items())
            if why is Unreadable.DELETED or unread.get(queue, 0) > 0
        ]
        if lost and self._options.fail_on_data_loss:
            raise DataLost(f"{first_texts(lost)}; failOnDataLoss=false reads the others")
        untold = [text for text in lost if text not in self._reported]
        if untold:
            _log.warning("%s; reading the others", first_texts(untold))
        self._reported = frozenset(lost)

    async def _limits(self, queues: Iterable[MessageQueue]) -> Mapping[MessageQueue, Limits]:
        """Return the ends of queues whose brokers are available; the next call asks again.

        With `freeze` there is no next call, so it waits for all brokers.
        """
        if self._frozen is None:
            return await self._cluster.known_limits(queues)
        return await self._cluster.limits(queue for queue in queues if queue in self._frozen)

    def _require_frozen(
        self, read: Iterable[MessageQueue], unreadable: Collection[MessageQueue]
    ) -> None:
        """Raise DataLost if a frozen stream would miss queues of its checkpoint."""
        frozen = self._frozen
        missing = [] if frozen is None else sorted(set(read) - frozen.keys() - set(unreadable))
        if not missing:
            return
        text = (
            f"{first_texts(missing)}: the name servers do not know these queues of the "
            "checkpoint: their brokers are unavailable or forbid reading"
        )
        if self._options.fail_on_data_loss:
            raise DataLost(f"{text}; failOnDataLoss=false reads the others")
        _log.warning("%s; reading the others", text)

    async def _new_queues(self, start: Offsets, queues: Iterable[MessageQueue]) -> Offsets:
        """Return where new queues start: at their first message, or the group's committed offset.

        The group may have read a queue that was unavailable when the stream started. Offsets of a
        shared group belong to others, and those of a deleted queue say nothing of a re-created one.
        """
        new = [queue for queue in queues if queue not in start]
        limits = await self._limits(new) if new else {}
        if not limits:
            return {}
        options = self._options
        position: Position = Earliest()
        if options.group is not None and not options.allow_shared_group:
            position = options.start if isinstance(options.start, Earliest) else OfGroup(Earliest())
        found = await self._cluster.resolve("startingOffsets", position, limits)
        return {**found, **{queue: limits[queue].low for queue in self._left & limits.keys()}}

    async def _recreated(
        self, start: Offsets, limits: Mapping[MessageQueue, Limits]
    ) -> tuple[frozenset[MessageQueue], frozenset[MessageQueue]]:
        """Return queues whose last message read has changed, and those not checked.

        Such a topic was deleted and re-created, or its broker lost the end of its log. Either way
        the message with the highest log position has changed, so only that one is checked for each
        topic and broker. The first call checks all: what happened before is unknown. An idle stream
        skips this.
        """
        marks = self.marks

        def checkable(queues: Iterable[MessageQueue]) -> list[MessageQueue]:
            known = (queue for queue in queues if queue in marks and queue in limits)
            return [
                queue
                for queue in known
                if limits[queue].low < start[queue] <= limits[queue].high
                # A slave may still have what its master has deleted.
                and (limits[queue].is_certain or marks[queue] != NOTHING_BELOW)
            ]

        if self._checks_all:
            recreated, unchecked = await self._changed(start, checkable(limits))
            self._checks_all = bool(unchecked)
            return recreated, unchecked
        newest = _newest(marks)
        samples = checkable(newest)
        if len(samples) < len(newest):
            samples = _newest({queue: marks[queue] for queue in checkable(limits)})
        # These have no position to sort by; few can be checked, as messages do not come back.
        samples += checkable(queue for queue, mark in marks.items() if mark == NOTHING_BELOW)
        changed, unavailable = await self._changed(start, samples)
        unchecked = frozenset(_in_places_of(unavailable, limits))
        suspects = checkable(_in_places_of(changed, limits))
        recreated, unknown = await self._changed(start, suspects)
        return recreated, unchecked | unknown

    async def _changed(
        self, start: Offsets, queues: Iterable[MessageQueue]
    ) -> tuple[frozenset[MessageQueue], frozenset[MessageQueue]]:
        """Compare the last messages read; a frozen stream has no later batch for the others."""
        needs_all = self._frozen is not None
        return await self._changed_marks(start, queues, self.marks, needs_all=needs_all)

    async def _changed_marks(
        self,
        offsets: Offsets,
        queues: Iterable[MessageQueue],
        marks: Marks,
        *,
        needs_all: bool = False,
    ) -> tuple[frozenset[MessageQueue], frozenset[MessageQueue]]:
        """Return queues whose message before an offset has changed, and those unavailable."""
        asked = {queue: offsets[queue] for queue in queues if queue in marks}
        ask = self._cluster.all_marks if needs_all else self._cluster.marks
        found = await ask(asked) if asked else {}
        changed = (queue for queue, mark in found.items() if mark not in (None, marks[queue]))
        return frozenset(changed), frozenset(asked.keys() - found.keys())

    def _past_losses(
        self,
        start: Offsets,
        limits: Mapping[MessageQueue, Limits],
        recreated: Collection[MessageQueue],
    ) -> Offsets:
        lost = losses(start, limits, recreated)
        if not lost:
            return start
        text = first_texts(lost)
        if self._options.fail_on_data_loss:
            raise DataLost(f"{text}; failOnDataLoss=false continues without them")
        _log.warning("%s; continuing without them", text)
        return moved_past(start, limits, recreated)

    # --- end of the batch -------------------------------------------------------------------------

    async def _end(self, seen: _QueueSnapshot, *, is_limited: bool) -> Offsets:
        rows = backlog(seen.start, seen.target)
        if is_limited:
            rows = {} if self._is_too_few(sum(rows.values())) else await self._cut(seen, rows)
        end = forward(seen.start, rows)
        return {**end, **seen.new} if seen.new else end

    def _is_too_few(self, rows: int) -> bool:
        """Whether to wait for more messages; never for a frozen stream."""
        if self._frozen is not None or rows >= self._options.trigger.rows_min:
            return False
        return self._delay_left_ms() > 0

    def _delay_left_ms(self) -> int:
        waited_ms = self._clock.monotonic_ms() - self._last_batch_ms
        return self._options.trigger.delay_max_ms - waited_ms

    async def _cut(
        self, seen: _QueueSnapshot, rows: dict[MessageQueue, int]
    ) -> dict[MessageQueue, int]:
        """Return how many rows of each queue the limits allow."""
        trigger = self._options.trigger
        if trigger.bytes_max is not None:
            found = await self._cluster.bytes_per_row({queue: seen.start[queue] for queue in rows})
            each = {queue: max(1, size) for queue, size in found.items()}
            given = shares({queue: rows[queue] * each[queue] for queue in rows}, trigger.bytes_max)
            rows = {q: min(rows[q], max(1, given[q] // each[q])) for q in rows}
        return rows if trigger.rows_max is None else shares(rows, trigger.rows_max)

    async def _wait(self, seen: _QueueSnapshot) -> bool:
        """Wait for messages, at most until the next lookup of queues is due."""
        wait_ms = min(self._options.idle_wait_ms, self._options.client.route_interval_ms)
        if backlog(seen.start, seen.target):
            wait_ms = min(wait_ms, max(1, self._delay_left_ms()))
        return await self._cluster.wait_for_messages(self._ends_to_wait_at(seen), wait_ms)

    def _ends_to_wait_at(self, seen: _QueueSnapshot) -> Offsets:
        return {
            queue: max(at, seen.target.get(queue, at))
            for queue, at in seen.start.items()
            if self._options.chosen.has(queue) and queue not in seen.closed
        }


def _newest(marks: Marks) -> list[MessageQueue]:
    """Return, for each topic and broker, the queue whose mark is furthest in the log."""
    found = []
    for queues in by_place(marks).values():
        positions = [marks[queue][1] for queue in queues]
        newest = max(positions)
        if newest > NOTHING_BELOW[1]:
            found.append(queues[positions.index(newest)])
    return found


def _in_places_of(
    some: Collection[MessageQueue], queues: Iterable[MessageQueue]
) -> list[MessageQueue]:
    """Return the queues that share topic and broker with some others."""
    places = {(queue.topic, queue.broker) for queue in some}
    return [q for q in queues if (q.topic, q.broker) in places] if places else []
