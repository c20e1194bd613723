"""Delayed messages: kept in one queue per level, and moved to their own topic when due.

A level's queue is in delivery order, because all its messages wait equally long. So one timer per
level is enough: it is set for the queue's head, and a run delivers everything due. Delays count
from when a message was stored by `turbopump.store.steady_clock`, even if the wall clock was set
meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turbopump.broker.delay_recovery import SavedDelays, delivered_end
from turbopump.broker.durability import Outcome
from turbopump.broker.jobs import when_done
from turbopump.broker.lost_tables import readable_queue
from turbopump.broker.message_writer import MessageWriter, draft_like, record_of
from turbopump.broker.topics import Topics
from turbopump.clock import Clock
from turbopump.errors import DiskFailed, RecordError, RemoteError, StoreError
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store import outcomes
from turbopump.store.config import ReadLimits
from turbopump.store.outcomes import Appended, Arrival, Cold, Filter, ReadOutcome, Units
from turbopump.store.steady_clock import CLOCK_SET_MS, SteadyClock
from turbopump.store.store import Store
from turbopump.supervisor import Supervisor, Watch
from turbopump.tables import Table, TableFile
from turbopump.wire import properties as names
from turbopump.wire.bodies import DelayOffsets
from turbopump.wire.codes import ResponseCode
from turbopump.wire.hashing import body_crc
from turbopump.wire.names import SCHEDULE_TOPIC
from turbopump.wire.record import MessageView, Record, decode_record

_log = logging.getLogger(__name__)

RUN_COUNT_MAX = 256
"""Messages delivered in one iteration of the event loop, so that other work gets its turn."""

RETRY_MS = 100
"""Retry interval after the store refused a delivery."""

WATCH_MS = 5000
"""How often to check whether the clock was set or the machine suspended."""

_MARKS_MAX = 64
"""Runs of a level that wait for a flush separately; later runs wait together."""

_FETCHES_MAX = 3
"""After as many fetches for one run, its messages are read even if memory has not kept them."""

_RUN_LIMITS = ReadLimits.uniform(bytes_max=8 * 1024 * 1024, count_max=RUN_COUNT_MAX)


class DueFilter:
    """Passes the messages at the front of a level's queue that are due.

    ``forgive`` also passes those due further ahead than any message of the level can be, which
    happens when the clock was set back after they were stored.
    """

    def __init__(self, steady_clock: SteadyClock, delay_ms: int, *, forgive: bool) -> None:
        self._steady_clock = steady_clock
        self.now_ms = steady_clock.now_ms()
        self._latest_ms = self.now_ms + delay_ms
        self._forgive = forgive
        self.head_ms: int | None = None
        """When the head of the queue is due."""

    def __call__(self, units: Units) -> NDArray[np.bool_]:
        times = units["tags_code"] - self._steady_clock.shifts_ms(units["physical_offset"])
        self.head_ms = int(times[0])
        due = times <= self.now_ms
        if self._forgive:
            due |= times > self._latest_ms
        front: NDArray[np.bool_] = np.logical_and.accumulate(due)
        return front


class Level:
    """One delay level: its delivery progress, and its next run."""

    def __init__(self, number: int, delay_ms: int) -> None:
        self.number = number
        self.delay_ms = delay_ms
        self.offset = QueueOffset(0)
        self.safe_offset = QueueOffset(0)
        """Delivery progress that is on disk: a power failure must not lose due messages whose
        copies are newer than the last flush."""
        self.log_end: PhysicalOffset | None = None
        """Where the log ended at that progress; None if unknown."""
        self.delivered: deque[tuple[PhysicalOffset, QueueOffset]] = deque()
        """Progress that counts once the log is flushed to a position."""
        self.head: tuple[QueueOffset, int] | None = None
        """When the message at an offset is due; cached, so that runs need not read it."""
        self.timer: asyncio.TimerHandle | None = None
        self.is_fetching = False
        """Whether a worker reads what the next run needs, and schedules it then."""
        self.fetches = 0
        """How often that has happened since the last run that needed nothing."""
        self.fetch_error: BaseException | None = None
        """Why the last fetch failed."""
        self.failing: Watch | None = None
        """Counts failures in a row, while there are any."""
        self.held_until_ms: int | None = None
        """Set when the head is due further ahead than its delay: the clock was set back before the
        start."""

    @property
    def queue_id(self) -> int:
        return self.number - 1

    def note_delivered(self, log_end: PhysicalOffset, behind: QueueOffset) -> None:
        """Note that messages before an offset are stored in their topics, before ``log_end``."""
        if len(self.delivered) >= _MARKS_MAX:
            # Copies of the last mark may lie further back in the log than this one's.
            log_end = max(log_end, self.delivered.pop()[0])
        self.delivered.append((log_end, behind))

    def settle(self, flushed_end: PhysicalOffset) -> None:
        """Adopt the progress that is on disk."""
        while self.delivered and self.delivered[0][0] <= flushed_end:
            log_end, behind = self.delivered.popleft()
            if behind > self.safe_offset:
                self.safe_offset, self.log_end = behind, log_end

    def skip_to(self, offset: QueueOffset, log_end: PhysicalOffset) -> None:
        """Continue at an offset, because the messages before it are gone."""
        self.offset = self.safe_offset = offset
        self.log_end = log_end
        self.delivered.clear()

    @property
    def is_watched(self) -> bool:
        """Whether a run is scheduled, or will be."""
        return self.timer is not None or self.is_fetching


@dataclass(eq=False)
class Delays:
    """Delivers delayed messages: never early, and late only by what the store needs."""

    store: Store
    writer: MessageWriter
    file: TableFile
    levels_ms: Sequence[int]
    topics: Topics
    clock: Clock
    work: Supervisor

    def __post_init__(self) -> None:
        self._levels = [Level(n, delay_ms) for n, delay_ms in enumerate(self.levels_ms, start=1)]
        self._table = Table("delay progress", self.file, self.encoded)
        self._loaded: dict[int, int] = {}
        self._noted: dict[int, int] = {}
        self._log_ends: dict[int, int] = {}
        self.changes = 0
        """How often the progress of any level has changed."""
        self._noted_changes = 0
        self._running = False
        self._shift_ms = self.store.steady_clock.shift_ms
        self._missed_ms = self._timers_missed_ms()

    @property
    def progress(self) -> DelayOffsets:
        """Delivery progress on disk, by level; levels never used are left out."""
        for level in self._levels:
            level.settle(self.store.flushed_end)
        used = {level.number: int(level.safe_offset) for level in self._levels if level.offset}
        # Levels that are not configured now may be again later, and must keep their progress.
        return DelayOffsets(offset_table={**self._loaded, **used})

    def load(self) -> bool:
        """Load the saved progress, if any."""
        saved = self.file.load(SavedDelays)
        self._adopt(saved or SavedDelays())
        for level in self._levels:
            if level.log_end is None and level.number not in self._loaded:
                # It was never saved: it had delivered nothing when the log was empty.
                level.log_end = PhysicalOffset(0)
            if level.log_end is not None:
                self._skip_delivered(level, level.log_end)
        return saved is not None

    def _adopt(self, saved: SavedDelays) -> None:
        self._loaded, self._log_ends = dict(saved.offset_table), dict(saved.log_ends)
        self._noted = dict(saved.offset_table)
        for level in self._levels:
            log_end = saved.log_ends.get(level.number)
            level.offset = level.safe_offset = QueueOffset(self._loaded.get(level.number, 0))
            level.log_end = None if log_end is None else PhysicalOffset(log_end)
            level.delivered.clear()

    def _skip_delivered(self, level: Level, log_end: PhysicalOffset) -> None:
        """Skip what was delivered after the last save, before a crash."""
        try:
            behind = delivered_end(
                self.store, level.queue_id, level.offset, level.delay_ms, log_end
            )
        except StoreError as error:
            _log.warning(
                "delay level %d: some messages may be redelivered: %s", level.number, error
            )
            return
        if behind > level.offset:
            _log.info("delay level %d: already delivered up to %d", level.number, behind)
            level.offset = behind
            level.note_delivered(self.store.written_end, behind)
            self.changes += 1

    def adopt_copy(self, copied: SavedDelays) -> None:
        """Adopt a master's progress; for a slave, which does not deliver."""
        self._adopt(copied)
        self._table.changes += 1
        self._table.save_soon()

    @property
    def saving(self) -> Table:
        """What keeps the file up to date with the progress that is on disk."""
        if self.changes != self._noted_changes:
            progress = dict(self.progress.offset_table)
            if progress != self._noted:
                self._noted = progress
                self._table.changes += 1
            if not any(level.delivered for level in self._levels):
                self._noted_changes = self.changes
        return self._table

    def encoded(self) -> bytes:
        """Return the progress as JSON, the form of the file."""
        table = self.progress.offset_table
        ends = {level.number: level.log_end for level in self._levels if level.log_end is not None}
        return SavedDelays(offset_table=table, log_ends={**self._log_ends, **ends}).encode()

    def start(self) -> None:
        """Deliver what is due, now and later."""
        self._running = True
        for level in self._levels:
            self._schedule_run(level, 0)

    def stop(self) -> None:
        self._running = False
        for level in self._levels:
            if level.timer is not None:
                level.timer.cancel()
                level.timer = None

    def notify(self, arrival: Arrival) -> None:
        """Schedule a run of a level whose queue was empty before this message."""
        if arrival.topic != SCHEDULE_TOPIC or arrival.queue_id >= len(self._levels):
            return
        level = self._levels[arrival.queue_id]
        if not level.is_watched and self._running:
            self._schedule_run(level, min(arrival.tags_code - self.clock.now_ms(), level.delay_ms))

    def watch_clock(self) -> None:
        """Run all levels if the clock was set or timers are late; call it every `WATCH_MS`."""
        steady_clock = self.store.steady_clock
        # The store does so itself while messages arrive.
        steady_clock.check(self.store.written_end, self.clock.now_ms())
        shift_ms, self._shift_ms = self._shift_ms, steady_clock.shift_ms
        missed_ms, self._missed_ms = self._missed_ms, self._timers_missed_ms()
        if self._shift_ms == shift_ms and self._missed_ms - missed_ms < CLOCK_SET_MS:
            return
        for level in self._levels:
            level.head = None
            if level.is_watched:
                self._schedule_run(level, 0)

    def _timers_missed_ms(self) -> int:
        """Return a number that grows by the time that timers miss while the machine sleeps."""
        return self.clock.uptime_ms() - int(asyncio.get_running_loop().time() * 1000)

    def _schedule_run(self, level: Level, wait_ms: int) -> None:
        """Schedule the next run of a level, replacing the one scheduled before."""
        if level.timer is not None:
            level.timer.cancel()
        loop = asyncio.get_running_loop()
        level.timer = loop.call_later(max(wait_ms, 0) / 1000, self._run, level)

    def _run(self, level: Level) -> None:
        """Deliver what is due of a level, up to the limit of one run, and schedule the next run."""
        level.timer = None
        if level.is_fetching:
            return
        try:
            wait_ms = self._deliver_due(level)
        except RemoteError as error:
            _log.warning("delay level %d: delivery refused, will retry: %s", level.number, error)
            wait_ms = RETRY_MS
        except Exception as error:  # noqa: BLE001 - whatever it was, the level must continue
            level.failing = self.work.watch(f"delay level {level.number}")
            wait_ms = level.failing.failed(error)
        else:
            if level.failing is not None:
                level.failing.succeeded()
                level.failing = None
        # A failed flush has already scheduled its retry.
        if wait_ms is not None and not level.is_watched and self._running:
            self._schedule_run(level, wait_ms)

    def _deliver_due(self, level: Level) -> int | None:
        """Return how long to wait before the next run; None if no wait leads to it."""
        if self.writer.busy() is not None:
            return RETRY_MS
        now_ms = self.store.steady_clock.now_ms()
        if level.head is not None and level.head[0] == level.offset:
            head_ms = level.head[1]
            if now_ms < head_ms <= now_ms + level.delay_ms:
                return self._wait_ms(level, head_ms, now_ms)
        held = level.held_until_ms
        forgive = held is not None and now_ms >= held
        due = DueFilter(self.store.steady_clock, level.delay_ms, forgive=forgive)
        outcome = self._read(level, due)
        match outcome:
            case outcomes.Found():
                self._deliver(level, outcome)
                return 0
            case outcomes.NoMatch():
                level.head = None if due.head_ms is None else (level.offset, due.head_ms)
                return self._wait_ms(level, due.head_ms, now_ms)
            case outcomes.OffsetTooSmall() | outcomes.OffsetTooLarge():
                _log.warning(
                    "delay level %d: offset %d is not in the queue, resuming at %d",
                    level.number,
                    level.offset,
                    outcome.next_offset,
                )
                self._skip_to(level, outcome.next_offset)
                return 0
            case outcomes.MessagesRemoved():
                # Deleted before it was due: skip one at a time, as the next one may still exist.
                self._skip_to(level, QueueOffset(level.offset + 1))
                return 0
            case outcomes.MessageDamaged():
                self._skip_to(level, outcome.next_offset)
                return 0
            case outcomes.UnitsMissing():
                # Not skipped: the messages are in the log, and a restart rebuilds the queue.
                raise DiskFailed(
                    f"queue {level.queue_id} of {SCHEDULE_TOPIC} cannot be read at offset"
                    f" {level.offset}: restore its file, or restart the broker, which rebuilds the"
                    " queue from the log"
                )
            case _:
                return None

    def _read(self, level: Level, due: DueFilter) -> ReadOutcome | None:
        """Read what is due; None if a worker reads it into memory first.

        Raises DiskFailed if that has just failed.
        """
        read = self.store.read if level.fetches >= _FETCHES_MAX else self.store.read_from_memory
        outcome = read(
            SCHEDULE_TOPIC,
            level.queue_id,
            level.offset,
            RUN_COUNT_MAX,
            Filter(units=due),
            _RUN_LIMITS,
        )
        error, level.fetch_error = level.fetch_error, None
        if not isinstance(outcome, Cold):
            level.fetches = 0
            return outcome
        if error is not None:
            level.fetches = 0
            raise DiskFailed(f"the store's files cannot be read: {error}") from error
        level.is_fetching = True
        level.fetches += 1
        when_done(self.store.fetch(outcome), lambda job: self._fetched(level, job))
        return None

    def _fetched(self, level: Level, job: Future[None]) -> None:
        """Run a level whose messages are in memory now, or cannot be read."""
        level.is_fetching = False
        level.fetch_error = job.exception()
        if self._running:
            self._schedule_run(level, 0)

    def _skip_to(self, level: Level, offset: QueueOffset) -> None:
        level.skip_to(offset, self.store.written_end)
        self.changes += 1

    def _wait_ms(self, level: Level, head_ms: int | None, now_ms: int) -> int:
        wait_ms = WATCH_MS if head_ms is None else head_ms - now_ms
        if wait_ms <= level.delay_ms:
            level.held_until_ms = None
        elif level.held_until_ms is None:
            # No message waits longer than its delay, so the clock was set back before the start.
            # How long this one has waited is unknown: waiting its full delay again may be late, but
            # never early.
            level.held_until_ms = now_ms + level.delay_ms
        if level.held_until_ms is not None:
            wait_ms = min(wait_ms, level.held_until_ms - now_ms)
        return wait_ms

    def _deliver(self, level: Level, found: outcomes.Found) -> None:
        dropped: Counter[str] = Counter()
        records = [self._delivered(message, dropped) for message in found.messages]
        for topic, count in dropped.items():
            _log.warning("dropped %d delayed messages of topic %s: it was deleted", count, topic)
        behind = QueueOffset(found.queue_offsets[-1] + 1)

        def done(outcome: Outcome) -> None:
            if isinstance(outcome, Appended):
                level.note_delivered(outcome.end_offset, behind)
                self.changes += 1
            elif level.offset >= behind:
                # Not stored after all: repeat these messages, whenever the next one is due.
                level.settle(self.store.flushed_end)
                level.offset = level.safe_offset
                if self._running:
                    self._schedule_run(level, RETRY_MS)

        appended = self._stored([record for record in records if record is not None])
        level.offset = behind
        if appended:
            self.writer.when_settled(appended, done)
        else:
            level.note_delivered(self.store.flushed_end, behind)
            self.changes += 1

    def _delivered(self, message: memoryview, dropped: Counter[str]) -> Record | None:
        """Return the record for the message's own topic; None if it cannot be built.

        ``dropped`` counts the messages of deleted topics.
        """
        try:
            view = decode_record(message)
            if body_crc(view.stored_body) == view.body_crc:
                return self._own_record(view, dropped)
            # The copy would get a valid checksum, and pass for an intact message.
            reason = "delayed message, not delivered: the body does not match its checksum"
            self.store.note_damaged(view.physical_offset, reason)
        except (RecordError, RemoteError, KeyError, ValueError) as error:
            _log.warning("skipped a delayed message that cannot be delivered: %s", error)
        return None

    def _own_record(self, view: MessageView, dropped: Counter[str]) -> Record | None:
        """Return the record for the message's own topic; None if that was deleted."""
        # The properties stay as they are, including the delay level, which is not read again.
        named = view.properties
        topic, queue_id = named[names.REAL_TOPIC], int(named[names.REAL_QUEUE_ID])
        if self.topics.find(topic) is None and self.store.is_removed(topic, view.physical_offset):
            dropped[topic] += 1
            return None
        queue_id = readable_queue(self.topics, topic, queue_id)
        return record_of(draft_like(view, topic, queue_id, named))

    def _stored(self, records: Sequence[Record]) -> list[Appended]:
        """Store messages; one that can never be stored must not block the others."""
        if not records:
            return []
        try:
            return self.writer.append_all(records)
        except RemoteError as error:
            if error.code != ResponseCode.MESSAGE_ILLEGAL:
                raise
            if len(records) > 1:
                return [stored for record in records for stored in self._stored([record])]
            _log.error("skipped a delayed message that cannot be delivered: %s", error)
            return []
