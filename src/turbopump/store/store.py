"""The store: append, read, look up, flush, maintain. Everything else in this folder serves it.

One thread owns a store and makes all calls. The store's flusher, a background worker, completes the
futures of `append`; after a flush in synchronous mode the owner calls `dispatch` (reads do so
implicitly), as only the owner may access queues and index.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, Self, TypeVar

from turbopump.core import Block, RecordEntry, Records
from turbopump.errors import InvalidArgument, StoreClosed, WriteRefused
from turbopump.machine import Machine
from turbopump.machine.files import OpenFiles
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store.append import Appender
from turbopump.store.cold_reads import ColdReads
from turbopump.store.commit_log import CommitLog
from turbopump.store.config import FlushMode, ReadLimits, RetentionConfig, StoreConfig
from turbopump.store.consume_queue import ConsumeQueue, QueueKey
from turbopump.store.damage import DamageLog
from turbopump.store.deferred_steps import DeferredSteps
from turbopump.store.directory import StoreDirectory
from turbopump.store.dispatch import EVERY_QUEUE, Dispatcher, Listener, Watches
from turbopump.store.flush import Flusher, done
from turbopump.store.health import Health, disk_failed, refusal, translate_disk_errors
from turbopump.store.key_index import KeyIndex
from turbopump.store.log_scan import scan
from turbopump.store.losses import check_files
from turbopump.store.maintenance import Maintenance
from turbopump.store.outcomes import (
    EVERYTHING,
    Appended,
    Cold,
    Filter,
    FoundByKey,
    ReadOutcome,
    Units,
)
from turbopump.store.queue_rebuild import QueueRebuild
from turbopump.store.queues import Queues
from turbopump.store.reading import read_queue, unknown_queue
from turbopump.store.record_starts import begins_record
from turbopump.store.recovery import Recovery
from turbopump.store.removed_topics import RemovedTopics
from turbopump.store.retention import Retention, Verdict
from turbopump.store.scrubber import Scrubber
from turbopump.store.segments import Segments
from turbopump.store.steady_clock import SteadyClock
from turbopump.store.time_lookup import marks_at, offset_by_time, result_of, store_timestamp_at
from turbopump.store.unit_repair import UnitRepair
from turbopump.store.write_behind import WriteBehind

_TICK_MS = 100
"""How often `append` runs the maintenance if the owner does not call `tick`."""

_CLOSING_MS_MAX = 750
"""Time limit in closing for writing queues and index, and again for syncing; the rest is left."""

_AfterCut = tuple[Listener | None, Watches, dict[QueueKey, QueueOffset]]
"""What a store that is opened again after a cut has to know: listener, watches, ends of queues."""


P = ParamSpec("P")
T = TypeVar("T")


def _search(
    steps_of: Callable[Concatenate[Store, P], Iterator[T]],
) -> Callable[Concatenate[Store, P], Iterator[T]]:
    """Make a search raise `DiskFailed` in place of OSError, and `StoreClosed` once it is over.

    That is when its files were closed between two steps, even if the store is open again.
    """

    @wraps(steps_of)
    def named(self: Store, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        opening = self._opening
        try:
            for step in steps_of(self, *args, **kwargs):
                yield step
                self._check_open()
                if self._opening != opening:
                    raise StoreClosed("the store was closed and opened again during the search")
        except OSError as error:
            raise disk_failed(error) from error

    return named


class Store:
    """An open store. Get one from `open`; `close` it or use it in a ``with`` statement."""

    def __init__(self, directory: Path, config: StoreConfig, machine: Machine) -> None:
        self.config = config
        self._machine = machine
        self._clock = machine.clock
        self.steady_clock = SteadyClock(machine.clock)
        self._directory = StoreDirectory(directory, machine.files)
        self._open_files = OpenFiles(machine.files, config.open_files_max)
        self._opening = 0
        """How often the files were opened."""
        self._make_files()
        self._make_workers()
        self._synchronous = config.flush.mode is FlushMode.SYNC
        self._done = done()
        self._ticked_ms = 0
        self.cut_ranges: dict[QueueKey, tuple[int, int]] = {}
        """Queues that were cut while the store was open: their shortest and their longest end."""
        self.kept_from: Callable[[], PhysicalOffset | None] = lambda: None
        """Where the log begins that must be kept, whatever `retain` would delete: on a slave, what
        its master still has. None if nothing must."""
        self._open = False
        self._after_cut: _AfterCut | None = None

    def _make_files(self) -> None:
        """Create the log, the queues and the index."""
        self._opening += 1
        config, clock, spare = self.config, self._clock, self._directory.spare
        files, lock = self._machine.files, self._machine.background.lock()
        segments = Segments(self._directory.commit_log, config.segment_bytes, files, spare)
        self._segments = segments
        self._log = CommitLog(segments, files, self._open_files, config.mapped_segments_max, lock)
        self._queues = Queues(
            self._directory.queues,
            config.queue_segment_bytes,
            files,
            self._open_files,
            spare,
            clock,
            RemovedTopics(self._directory.removed_topics, files),
        )
        self._index = (
            KeyIndex(self._directory.index, config, clock, files, self._open_files, spare)
            if config.index_enabled
            else None
        )

    def _make_workers(self) -> None:
        """Create the parts that read, write and repair the files."""
        config, machine, directory = self.config, self._machine, self._directory
        clock, files = machine.clock, machine.files
        log, queues, index = self._log, self._queues, self._index
        self._dispatcher = dispatcher = Dispatcher(queues, index, config.delay_levels)
        self.damage = DamageLog()
        """What was found to be damaged since the store was opened."""
        self._repair = UnitRepair(log, dispatcher.code_of, self.damage)
        self._scrubber = Scrubber(log, queues, dispatcher, self._repair, self.damage)
        self._behind = behind = WriteBehind(
            machine, directory.checkpoint, log, queues, index, dispatcher.crowded
        )
        self._cold_reads = ColdReads(machine, log)
        self._flusher = flusher = Flusher(log.sync, machine.background.worker("store-flusher"))
        self._appender = Appender(config, clock, log, queues)
        self._deferred = deferred = DeferredSteps()
        self._health = health = Health(
            config, clock, log, queues, dispatcher, flusher, behind, deferred
        )
        self._retention = Retention(
            config.retention, clock, self.steady_clock, files, directory, log, queues, index, health
        )
        self._maintenance = Maintenance(
            config.flush, clock, log, dispatcher, flusher, behind, health
        )
        self._rebuild = rebuild = QueueRebuild(
            directory, queues, config.queue_segment_bytes, files, clock
        )
        self._recovery = Recovery(
            config,
            log,
            queues,
            index,
            dispatcher,
            behind,
            deferred,
            self._repair,
            self.damage,
            rebuild,
        )

    @classmethod
    def open(
        cls,
        directory: Path | str,
        config: StoreConfig | None = None,
        machine: Machine | None = None,
    ) -> Self:
        """Lock a directory, recover its content, and start to flush."""
        store = cls(Path(directory), config or StoreConfig(), machine or Machine())
        store._directory.acquire()
        try:
            store._recover()
        except BaseException:
            store._directory.release()
            raise
        return store

    def _recover(self) -> None:
        """Make log, queues and index agree, and open."""
        try:
            check_files(self._directory, self.config.segment_bytes)
            self._directory.make_parts()
            self._segments.load()
            self._rebuild.load_queues()
            if self._index is not None:
                self._index.load()
            self._behind.load()
            self.recovered = self._recovery.run(crashed=self._directory.has_crashed)
            self._cold_reads.stored_from = self._log.written
            self.steady_clock.begin(self._log.written)
            self._deferred.attempt(self._directory.mark_running)
            self._retention.refuse_if_full()
        except BaseException:
            self._flusher.stop()
            self._close_files()
            raise
        self._open = True
        if self._deferred.error is not None:
            # What is known to be on disk may be deleted to make room.
            self._maintenance.flush()

    def close(self) -> None:
        """Flush everything and release the directory.

        What cannot be flushed is left to the recovery of the next start.
        """
        if self._after_cut is not None:
            self._after_cut = None
            self._directory.release()
        if not self._open:
            return
        try:
            self.flush()
            clean = self._settle()
            self._flusher.stop()
            failures = (self._flusher.failure, self._behind.failure, self._deferred.error)
            if clean and not any(failures):
                self._directory.mark_stopped()
        finally:
            self._open = False
            self._flusher.stop()
            self._close_files()
            self._directory.release()

    def flush(self) -> None:
        """Wait until everything written so far is on disk, or cannot be (see `refusal`)."""
        self._check_open()
        if not self._health.is_writable():
            self._health.probe()
        self._maintenance.flush()
        self._flusher.wait_idle()

    def _settle(self) -> bool:
        """Dispatch and write everything flushed; return whether that is all there is."""
        self._dispatcher.advance(self._log.flushed)
        try:
            self._behind.write_all(_CLOSING_MS_MAX)
        except OSError as error:
            self._behind.fail(error)
        else:
            entered_ms = self._dispatcher.store_timestamp_ms
            self._flusher.submit(self._behind.sync_job(entered_ms, _CLOSING_MS_MAX))
            self._flusher.wait_idle()
        return self._dispatcher.first_waiting is None and self._log.flushed == self._log.written

    def _close_files(self) -> None:
        self._cold_reads.close()
        self._log.close()
        self._open_files.close_all()
        self._behind.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Writing

    def new_block(self) -> Block:
        """Return an empty block: add messages and batches to it, and `append` it once."""
        return Block(self.config.record_bytes_max, self.config.group_bytes_max)

    def append(self, block: Block, *, defer_dispatch: bool = False) -> list[Appended]:
        """Store the messages and batches of a block; all of them, or none and an error.

        Each of them stays together in one file. With ``defer_dispatch`` the caller does something
        more urgent first, and then calls `dispatch` itself.
        """
        self._check_writable()
        begin = self._log.written
        try:
            found = self._appender.write(block)
        except BaseException as error:
            self._undo_write(begin, error)
            raise
        time_ms = self._appender.store_timestamp_ms
        durable = self._follow(found, time_ms, defer_dispatch)
        appended: list[Appended] = []
        for number in range(len(block)):
            positions, offset = block.positions(number), block.queue_offset(number)
            end = PhysicalOffset(positions[0] + block.group_size(number))
            appended.append(Appended(positions, offset, time_ms, end, durable))
        return appended

    @translate_disk_errors
    def append_raw(self, position: PhysicalOffset, data: bytes | memoryview) -> Future[None]:
        """Store bytes of a master's log at the same position, as a slave does.

        Messages become readable once they are complete. Data must not cross the end of a file.
        Raises InvalidArgument for bytes that cannot follow; nothing is changed then. The result is
        done when the bytes are as durable as the mode promises.
        """
        self._check_writable()
        begin = self._log.written
        try:
            self._appender.write_raw(position, data)
            followed_to = max(self._dispatcher.followed_to, self._log.min_offset)
            found = self._appender.complete_records(followed_to)
        except (OSError, InvalidArgument) as error:
            self._undo_write(begin, error)
            raise
        return self._follow(found, self._clock.now_ms(), defer_dispatch=False)

    @translate_disk_errors
    def drop_unfinished(self) -> None:
        """Cut off an incomplete message or filler whose rest a master has not sent."""
        self._check_open()
        log = self._log
        file_start = PhysicalOffset(log.tail_end - log.segment_bytes)
        whole = max(self._dispatcher.followed_to, log.min_offset, file_start)
        if whole < log.written < log.tail_end:
            log.truncate(whole)

    @translate_disk_errors
    def cut(self, end: PhysicalOffset | None) -> Path:
        """Drop all messages from a position on, which begins one; with None, all of them.

        Returns the directory where the bytes of the log are kept. Queues and index follow. Waits
        for the disk, and rereads as much of the log as after a crash. If it fails, as on a full
        disk, it can be called again, after `reopen`.
        """
        self.flush()
        listener, watched = self._dispatcher.listener, self._dispatcher.watched
        ends = {queue.key: queue.max_offset for queue in self._queues}
        self._after_cut = listener, watched, ends
        self._open = False
        self._flusher.stop()
        try:
            return self._cut_log(end)
        finally:
            self._close_files()
            self.reopen()

    @translate_disk_errors
    def reopen(self) -> None:
        """Recover the log again if that failed after a cut; until then, the store is closed."""
        if self._after_cut is None:
            return
        listener, watched, ends = self._after_cut
        self._make_files()
        self._make_workers()
        self._recover()
        self._after_cut = None
        self._dispatcher.set_listener(listener, watched)
        for key, before in ends.items():
            low, high = self.cut_ranges.get(key, (before, before))
            self.cut_ranges[key] = min(low, self.queue_range(*key)[1]), max(high, before)

    def was_cut(self, topic: str, queue_id: int, offset: int) -> bool:
        """Whether a reader at an offset may have read messages that were cut off."""
        shortest, longest = self.cut_ranges.get((topic, queue_id), (0, 0))
        return shortest < offset <= longest

    def _cut_log(self, end: PhysicalOffset | None) -> Path:
        """Set aside the log from a position on; if it is killed halfway, the next start resumes."""
        log = self._log
        position = PhysicalOffset(log.min_offset - 1) if end is None else end
        # First: the log may end only where the checkpoint allows it.
        if end is None:
            self._behind.forget()
        else:
            self._behind.fit(end)
        name = f"diverged-{max(position, log.min_offset)}-{self._clock.now_ms()}"
        kept = log.set_aside(position, name)
        if log.starts:
            log.truncate(position)
        log.sync()
        return kept

    def _check_open(self) -> None:
        if not self._open:
            raise StoreClosed("the store is closed")

    def _check_writable(self) -> None:
        if self._open and self._flusher.failure is None and self._health.untroubled:
            return
        self._check_open()
        if not self._health.is_writable():
            raise self._health.reason() or WriteRefused("the store has just recovered: try again")

    def _undo_write(self, begin: PhysicalOffset, error: BaseException) -> None:
        """Undo a failed write, and translate its error for callers."""
        torn = isinstance(error, OSError)
        try:
            if torn or self._log.written != begin:
                # After an error of the disk, bytes may remain behind the end.
                self._log.truncate(begin)
        except OSError as left:
            self._health.torn(begin, left)
        if isinstance(error, OSError):
            raise refusal(error, "the commit log cannot be written") from error

    def _follow(self, found: Sequence[Records], now_ms: int, defer_dispatch: bool) -> Future[None]:
        """Dispatch messages written at a timestamp, and run due maintenance."""
        is_much = self._dispatcher.follow(found)
        durable = self._flusher.join() if self._synchronous else self._done
        if is_much and not defer_dispatch and not self._synchronous:
            self.dispatch()
        # Also if the clock was set: these are the first messages with the new time.
        if found and not 0 <= now_ms - self._ticked_ms < _TICK_MS:
            self._tick(found[0].physical_offset, now_ms)
        return durable

    # Maintenance

    def dispatch(self) -> None:
        """Make messages up to `readable_end` readable; call it after a flush."""
        self._check_open()
        self._dispatcher.advance(self.readable_end)
        if self._behind.crowded():
            try:
                self._behind.spill()
            except OSError as error:
                self._health.blocked(error)

    def tick(self) -> None:
        """Run due maintenance: flush, write queues and index, repair. Call it about every 100 ms.

        It never waits for the disk unless something is broken.
        """
        self._check_open()
        self._tick(self._log.written, self._clock.now_ms())

    def _tick(self, position: PhysicalOffset, now_ms: int) -> None:
        self._ticked_ms = now_ms
        self.dispatch()
        self._maintenance.run()
        # A repair may have cut the log.
        self.steady_clock.check(min(position, self._log.written), now_ms)

    def listen(self, listener: Listener | None, watched: Watches = EVERY_QUEUE) -> None:
        """Set the listener that `append` and `dispatch` call for newly readable messages.

        It receives those that are watched, which may change, and all delayed ones; an empty list if
        only others arrived. It must not raise: the messages are stored in any case.
        """
        # Messages that were readable before are not announced again.
        self.dispatch()
        self._dispatcher.set_listener(listener, watched)

    @translate_disk_errors
    def scrub(self) -> None:
        """Check the next part of the log and its queues for damage, and report it."""
        self._catch_up()
        self._scrubber.run()

    def set_retention(self, config: RetentionConfig) -> None:
        """Apply other rules from the next run of retention on."""
        self.config = replace(self.config, retention=config)
        self._retention.config = config

    @translate_disk_errors
    def retain(self, *, at_any_hour: bool = False) -> Verdict:
        """Delete expired segments, and refuse messages while the disk is full."""
        self._catch_up()
        # Only messages that are all in their queues' files may be deleted.
        first, oldest = self._dispatcher.first_waiting, self._queues.oldest_waiting()
        end = self._log.written if first is None else first
        dispatched_to = end if oldest is None else min(end, oldest[1].physical_offset)
        kept_from = self.kept_from()
        end = dispatched_to if kept_from is None else min(dispatched_to, kept_from)
        return self._retention.run(end, at_any_hour=at_any_hour)

    @translate_disk_errors
    def remove_topic(
        self, topic: str, end: PhysicalOffset | None = None, *, is_deleted: bool = False
    ) -> None:
        """Delete a topic's queues; its messages expire with the log. Offsets restart at 0.

        With a position, as on a slave: messages after it are of a re-created topic. If it
        ``is_deleted`` by an operator, its delayed messages are removed too, even if it has no
        queues. A slave does not know that: its master may have lost the topic in a crash.
        """
        self.dispatch()
        end = self._log.written if end is None else end
        self._queues.remove_topic(topic, end, self._log.min_offset, is_deleted=is_deleted)

    def removed_end(self, topic: str) -> PhysicalOffset:
        """Return the position before which a topic's messages were removed with it, or 0."""
        return PhysicalOffset(self._queues.removed.end_of(topic.encode()))

    def is_removed(self, topic: str, position: PhysicalOffset) -> bool:
        """Whether a topic was removed after the message at a position was stored."""
        return self._queues.removed.covers(topic.encode(), position)

    # Reading

    @property
    def readable_end(self) -> PhysicalOffset:
        """Position up to which messages may be read: in synchronous mode, what is on disk."""
        return self._log.flushed if self._synchronous else self._log.written

    @property
    def min_offset(self) -> PhysicalOffset:
        """Position of the first message in the log."""
        return self._log.min_offset

    @property
    def written_end(self) -> PhysicalOffset:
        """Position after the last message, readable or not."""
        return self._log.written

    @property
    def flushed_end(self) -> PhysicalOffset:
        """Position up to which messages survive a power failure."""
        return self._log.flushed

    @property
    def refusal(self) -> WriteRefused | None:
        """Why messages are refused now; None if they are accepted."""
        return self._health.reason()

    @translate_disk_errors
    def read(
        self,
        topic: str,
        queue_id: int,
        offset: QueueOffset,
        count_max: int,
        wanted: Filter = EVERYTHING,
        limits: ReadLimits | None = None,
    ) -> ReadOutcome:
        """Read messages of a queue from an offset on."""
        queue = self._queue(topic, queue_id)
        if queue is None:
            return unknown_queue(topic, queue_id)
        limits = limits or self.config.limits
        outcome = read_queue(self._log, queue, offset, count_max, limits, wanted, self._repair)
        assert not isinstance(outcome, Cold), "it waits for the disk"
        return outcome

    @translate_disk_errors
    def read_from_memory(
        self,
        topic: str,
        queue_id: int,
        offset: QueueOffset,
        count_max: int,
        wanted: Filter = EVERYTHING,
        limits: ReadLimits | None = None,
    ) -> ReadOutcome | Cold:
        """Do the same without waiting for the disk to read the log; return what to `fetch` first.

        What was written last is returned in any case.
        """
        queue = self._queue(topic, queue_id)
        if queue is None:
            return unknown_queue(topic, queue_id)
        limits = limits or self.config.limits
        cold_reads = self._cold_reads
        return read_queue(
            self._log, queue, offset, count_max, limits, wanted, self._repair, cold_reads
        )

    def fetch(self, cold: Cold) -> Future[None]:
        """Read parts of files into memory, on another thread; fails with the disk's error."""
        self._check_open()
        return self._cold_reads.fetch(cold)

    @translate_disk_errors
    def queue_range(self, topic: str, queue_id: int) -> tuple[QueueOffset, QueueOffset]:
        """Return the first offset of a queue and the one after its last; 0 and 0 if unknown."""
        queue = self._queue(topic, queue_id)
        if queue is None:
            return QueueOffset(0), QueueOffset(0)
        return queue.min_offset, queue.max_offset

    @translate_disk_errors
    def max_offsets(self, topic: str, queue_ids: Iterable[int]) -> list[QueueOffset]:
        """Return the offsets after the last messages of some queues; 0 for unknown ones."""
        self._catch_up()
        found = self._queues.find_all(topic, queue_ids)
        return [QueueOffset(0) if queue is None else queue.max_offset for queue in found]

    @translate_disk_errors
    def topic_ranges(self, topic: str, queues: int) -> tuple[list[int], list[int], PhysicalOffset]:
        """Return `queue_range` of queues 0 to ``queues`` - 1: all first offsets, then all ends.

        And the position in the log after the last of their messages, -1 if there is none.
        """
        self._catch_up()
        found = self._queues.find_all(topic, range(queues))
        return (
            [0 if queue is None else queue.min_offset for queue in found],
            [0 if queue is None else queue.max_offset for queue in found],
            max([q.physical_end for q in found if q is not None], default=PhysicalOffset(-1)),
        )

    def queue_ids(self) -> list[tuple[str, int]]:
        """Return topic and id of all queues that have had messages."""
        self._catch_up()
        return sorted((queue.topic, queue.queue_id) for queue in self._queues if queue.max_offset)

    @_search
    def find_offset(
        self, topic: str, queue_id: int, timestamp_ms: int
    ) -> Iterator[QueueOffset | Cold]:
        """Find the offset of the message stored nearest to a timestamp; 0 if there is none.

        Yields `Cold` before it reads a message that is not in memory, and finally the offset.
        """
        queue = self._queue(topic, queue_id)
        if queue is None:
            yield QueueOffset(0)
        else:
            search = offset_by_time(self._log, queue, timestamp_ms, self._fetched_first)
            yield (yield from search)

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int) -> QueueOffset:
        """Return the offset that `find_offset` finds, without pausing for others."""
        search = self.find_offset(topic, queue_id, timestamp_ms)
        return next(found for found in search if not isinstance(found, Cold))

    @translate_disk_errors
    def store_timestamp_ms(self, topic: str, queue_id: int, offset: QueueOffset) -> int | None:
        """Return the store timestamp of the message at an offset; None if there is none."""
        queue = self._queue(topic, queue_id)
        return None if queue is None else result_of(store_timestamp_at(self._log, queue, offset))

    @_search
    def find_marks(
        self, topic: str, queue_ids: Sequence[int], offsets: Sequence[int]
    ) -> Iterator[tuple[list[int], list[int]] | Cold]:
        """Find when, and where in the log, messages of a topic's queues were stored.

        -1 for those that do not exist. Yields `Cold` before it reads what is not in memory.
        """
        self._catch_up()
        queues, limits = self._queues.find_all(topic, queue_ids), self.config.limits

        def prepare(units: Units) -> Iterator[Cold]:
            return self._cold_reads.around_bodies(units, limits)

        yield (yield from marks_at(self._log, queues, queue_ids, offsets, prepare))

    def is_far_behind(self, topic: str, queue_id: int, offset: QueueOffset) -> bool:
        """Whether a message is so far from the log's end that it is hardly in memory any more."""
        queue = self._queue(topic, queue_id)
        unit = None if queue is None else queue.unit(offset)
        return unit is not None and unit[0] < self._log.written - self.config.limits.recent_bytes

    @_search
    def find_message(self, position: PhysicalOffset) -> Iterator[memoryview | Cold | None]:
        """Find the message that begins at a position of the log, as its offset id names it.

        Yields the message immediately if its queue has it. Otherwise it searches the log, and
        yields None before each slice. Yields `Cold` before it reads what is not in memory. Ends
        without a message if there is none at the position, even if the bytes there, in the body of
        another one, look like a message.
        """
        self._catch_up()
        yield from self._fetched_first(position)
        entry = self._entry_at(position)
        if entry is None:
            return
        queue = self._queues.find(entry.topic.decode(errors="replace"), entry.queue_id)
        limits = self.config.limits
        for is_found in begins_record(self._log, queue, entry, self._cold_reads, limits):
            if is_found is None or isinstance(is_found, Cold):
                yield is_found
            elif is_found:
                yield self._log.view(position, entry.size)

    def _fetched_first(self, position: int) -> Iterator[Cold]:
        """Return what to fetch before the record at a position is read."""
        size_max = self.config.record_bytes_max
        return self._cold_reads.record(position, size_max, self.config.limits)

    def message_at(self, position: PhysicalOffset) -> memoryview | None:
        """Return the message that `find_message` finds, without pausing for others."""
        search = self.find_message(position)
        return next((found for found in search if isinstance(found, memoryview)), None)

    def _entry_at(self, position: PhysicalOffset) -> RecordEntry | None:
        """Return what is at a position of the log, if it looks like a readable message."""
        entry = self._log.entry_at(position) if position >= 0 else None
        if entry is None or position + entry.size > self.readable_end:
            return None
        return entry

    def note_damaged(self, position: PhysicalOffset, reason: str) -> None:
        """Report a message whose body was found to be damaged."""
        self.damage.bad_message(self._log.path_at(position), position, reason)

    @_search
    def find_by_key(
        self,
        topic: str,
        key: str,
        count_max: int,
        begin_ms: int,
        end_ms: int,
        entries_max: int = sys.maxsize,
    ) -> Iterator[FoundByKey | Cold | None]:
        """Find messages by a key or unique id, at most 64.

        Yields None before each slice, `Cold` before it reads what is not in memory, and finally
        the result: at the latest when ``entries_max`` entries of the index were examined.
        """
        self._catch_up()
        if self._index is None:
            yield FoundByKey([], is_complete=True)
            return
        for found in self._index.search(topic, key, count_max, begin_ms, end_ms, entries_max):
            if found is None or isinstance(found, Cold):
                yield found
            else:
                messages: list[memoryview] = []
                for position in found.positions:
                    yield from self._fetched_first(position)
                    messages += self._messages_at(PhysicalOffset(position))
                yield FoundByKey(messages, found.is_complete)

    def messages_by_key(
        self, topic: str, key: str, count_max: int, begin_ms: int, end_ms: int
    ) -> list[memoryview]:
        """Return the messages that `find_by_key` finds, without pausing for others."""
        *_, found = self.find_by_key(topic, key, count_max, begin_ms, end_ms)
        assert isinstance(found, FoundByKey), "a search ends with its result"
        return found.messages

    def _messages_at(self, position: PhysicalOffset) -> list[memoryview]:
        """Return the message at a position from the index, also of a deleted topic, if any."""
        entry = self._entry_at(position)
        message = None if entry is None else self._log.view(position, entry.size)
        return [] if message is None else [message]

    @property
    def indexed_to(self) -> tuple[int, PhysicalOffset]:
        """Store timestamp and position of the newest message in the key index, or zeros."""
        header = None if self._index is None else self._index.newest_header
        if header is None:
            return 0, PhysicalOffset(0)
        return header.end_ms, PhysicalOffset(header.end_offset)

    @translate_disk_errors
    def raw(self, position: PhysicalOffset, size_max: int) -> memoryview | None:
        """Return up to ``size_max`` bytes of the log for a slave, within one file, or None."""
        self._catch_up()
        segment_bytes = self.config.segment_bytes
        in_file = segment_bytes - position % segment_bytes
        size = min(size_max, in_file, self.readable_end - position)
        return self._log.view(position, size) if size > 0 else None

    @translate_disk_errors
    def cold_part(self, position: PhysicalOffset, size_max: int) -> Cold | None:
        """Return what to `fetch` before `raw`; None if that does not wait for the disk."""
        self._catch_up()
        return self._cold_reads.raw(position, size_max, self.config.limits)

    def last_message(self) -> PhysicalOffset:
        """Return the position of the last message in any queue, or of the log's start."""
        self._catch_up()
        last = [queue.unit(QueueOffset(queue.max_offset - 1)) for queue in self._queues]
        positions = (unit[0] for unit in last if unit is not None)
        return max(positions, default=self._log.min_offset)

    @translate_disk_errors
    def message_start(self, position: PhysicalOffset) -> PhysicalOffset:
        """Return the start of the message, or filler, that contains a position of the log."""
        self._check_open()
        start = PhysicalOffset(position - position % self.config.segment_bytes)
        for found in scan(self._log, start, check_crc=False, end=position):
            if isinstance(found, Records):
                start = found.end
        return start

    def _queue(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        self._catch_up()
        return self._queues.find(topic, queue_id)

    def _catch_up(self) -> None:
        if not self._open:
            self._check_open()
        if self._dispatcher.first_waiting is not None:
            self.dispatch()
