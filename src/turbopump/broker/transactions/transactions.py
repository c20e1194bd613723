"""Ending transactions: the committed message is stored, then an operation for its half message.

A request is acknowledged once what it asked for is stored as the broker's mode promises. Repeated
requests change nothing, whichever copy of the half message they name.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary

from msgspec import Struct
from msgspec.structs import replace

from turbopump.broker.durability import Late, Outcome, Promise, set_outcome
from turbopump.broker.lost_tables import readable_queue
from turbopump.broker.message_writer import MessageWriter
from turbopump.broker.offsets import Offsets
from turbopump.broker.searches import Searches
from turbopump.broker.topics import Topics
from turbopump.broker.transactions import half as halves
from turbopump.broker.transactions.endings import End, Ending, EndingKey, OnEnded, Ts
from turbopump.broker.transactions.half import QUEUE_ID, Half, Identity, half_of, identity_of
from turbopump.broker.transactions.ledger import Fate, Ledger, Progress
from turbopump.broker.transactions.queues import RUN_COUNT, TransactionQueues
from turbopump.clock import Clock
from turbopump.errors import RemoteError
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store.outcomes import Appended
from turbopump.store.store import Store
from turbopump.supervisor import Watch
from turbopump.wire import properties as names
from turbopump.wire.hashing import body_crc
from turbopump.wire.hosts import Host
from turbopump.wire.names import CHECKED_TOO_OFTEN_TOPIC, HALF_OPERATIONS_TOPIC, HALF_TOPIC
from turbopump.wire.record import MessageView, Record

_log = logging.getLogger(__name__)

PROGRESS_GROUP = "CID_RMQ_SYS_TRANS"
"""Progress in both queues is kept as this group's offsets."""

LOAD_MAX = 2048
"""Half messages read in one iteration of the event loop."""

RETRY_MS = 1000
"""Retry interval after the store refused an operation."""

_MARKS_MAX = 16

_FINAL = {Fate.COMMITTED, Fate.ROLLED_BACK, Fate.ABANDONED}
"""What needs no search of the store."""


class Replacement(Struct, frozen=True):
    """A half message, and the record that takes its place."""

    half: Half
    record: Record
    checks: int = 0


@dataclass(eq=False, kw_only=True)
class Transactions:
    """Half messages and how they end."""

    store: Store
    writer: MessageWriter
    topics: Topics
    offsets: Offsets
    store_host: Host
    clock: Clock
    watch: Watch
    searches: Searches

    def __post_init__(self) -> None:
        self.queues = TransactionQueues(self.store, self.searches)
        self.ledger = Ledger(QueueOffset(0), QueueOffset(0))
        self._earlier_end = QueueOffset(0)
        """Half messages before it are from an earlier run."""
        self._endings: dict[EndingKey, Ending] = {}
        self._loading = asyncio.Lock()
        self._turns: WeakValueDictionary[Identity | None, asyncio.Lock] = WeakValueDictionary()
        """One for each transaction whose past is searched for: no other request ends it then."""
        self._unwritten: list[QueueOffset] = []
        """Half messages whose operation is to be written."""
        self._writing: asyncio.Handle | None = None
        self._marks: deque[tuple[PhysicalOffset, Progress]] = deque()
        """Progress that counts once the log is flushed to a position."""
        self._saved: Progress | None = None

    def load(self) -> None:
        """Load which half messages had ended when the broker was stopped."""
        first, self._earlier_end = self.queues.half_range
        if not self._earlier_end:
            return
        prepare_topics(self.topics)
        floor = max(first, self._progress_in(HALF_TOPIC))
        operation = self._progress_in(HALF_OPERATIONS_TOPIC)
        self.ledger = Ledger(floor, operation)
        for at, ended in self.queues.operations(operation):
            self.ledger.note_operation(at, ended)
            self.ledger.close(ended, Fate.ENDED)

    def _progress_in(self, topic: str) -> QueueOffset:
        return self.offsets.find(PROGRESS_GROUP, topic, QUEUE_ID) or QueueOffset(0)

    # --- what is open -----------------------------------------------------------------------------

    async def load_open(self, age_ms: int) -> bool:
        """Read some half messages of at least this age that have not ended; False at the end."""
        ledger, end = self.ledger, self.queues.half_range[1]
        stop = min(end, QueueOffset(ledger.seen + LOAD_MAX))
        ledger.skip_known(stop)
        if ledger.seen < stop:
            await self.queues.fetch_halves(ledger.seen, self._unknown_count())
            # Others may have read them meanwhile.
            ledger.skip_known(stop)
        if ledger.seen >= stop:
            return stop < end
        found = self.queues.halves(ledger.seen, self._unknown_count())
        now_ms = self.clock.now_ms()
        for view in found:
            if 0 <= now_ms - view.store_timestamp_ms < age_ms:
                # Later ones are younger still.
                return False
            self._note(view)
            ledger.seen = QueueOffset(view.queue_offset + 1)
        return bool(found)

    def _unknown_count(self) -> int:
        """Return how many half messages to read next."""
        count = 1
        while count < RUN_COUNT and self._is_unknown(QueueOffset(self.ledger.seen + count)):
            count += 1
        return count

    @property
    def _has_earlier(self) -> bool:
        """Whether half messages of earlier runs may be open that were not read yet."""
        return self.ledger.seen < self._earlier_end

    async def _load_earlier(self) -> None:
        """Read the open half messages of earlier runs, unless that has happened already."""
        async with self._loading:
            has_more = self._has_earlier
            while has_more:
                has_more = await self.load_open(0) and self._has_earlier
                await asyncio.sleep(0)

    def _is_unknown(self, offset: QueueOffset) -> bool:
        return self.ledger.is_open(offset) and offset not in self.ledger.open

    def _note(self, view: MessageView) -> None:
        """Add a half message, unless it has ended although no operation names it."""
        half, first = half_of(view), halves.first_offset_of(view)
        if not self._is_unknown(half.queue_offset):
            return
        if first is not None and self.ledger.fate(first) is Fate.ENDED:
            # Apache RocketMQ ends a copy by naming the first one.
            self.close(half.queue_offset, Fate.ENDED)
            return
        older = self.ledger.add(half)
        if older is None:
            return
        if first is None:
            # A crash came between the copy and the operation for the older one.
            self.close(older, Fate.REPLACED)
        else:
            # Without an operation, which would end this copy after a restart.
            self.ledger.close(older, Fate.REPLACED)

    # --- ending -----------------------------------------------------------------------------------

    def end(self, end: End, on_ended: OnEnded[*Ts], *args: *Ts) -> Awaitable[None] | None:
        """Commit or roll back; raises RemoteError if the request does not fit its half message.

        If the half message has to be read from the disk first, or others of earlier runs, one of
        which may be a newer copy, or what became of it then, the caller awaits the result.
        """
        size_max = self.store.config.record_bytes_max
        is_cold = self.store.cold_part(end.physical_offset, size_max) is not None
        if is_cold or self._may_have_copy(end):
            return self._end_later(end, on_ended, args)
        view = self._half_of(end)
        if self._join(end, view, on_ended, args):
            return None
        if self._needs_past(end, view):
            return self._end_later(end, on_ended, args)
        self._end(end, view, self._known_target(end, view), on_ended, args)
        return None

    def _may_have_copy(self, end: End) -> bool:
        """Whether a newer copy of a half message may be among those that were not read yet."""
        return self._has_earlier and not self.ledger.is_open(end.queue_offset)

    async def _end_later(
        self, end: End, on_ended: Callable[..., None], args: tuple[object, ...]
    ) -> None:
        await self.queues.fetched_message(end.physical_offset)
        # Before others are read: most forged requests end here.
        view = self._half_of(end)
        if self._may_have_copy(end):
            await self._load_earlier()
        async with self._turn_of(view):
            if not self._join(end, view, on_ended, args):
                target = await self._target(end, view)
                self._end(end, self._half_of(end), target, on_ended, args)

    def _turn_of(self, view: MessageView) -> asyncio.Lock:
        return self._turns.setdefault(identity_of(view), asyncio.Lock())

    def _join(
        self, end: End, view: MessageView, on_ended: Callable[..., None], args: tuple[object, ...]
    ) -> bool:
        """Report the end to a request too that is in progress already, if it is."""
        ending = self._endings.get(identity_of(view) or end.queue_offset)
        if ending is None:
            return False
        if ending.commits != end.commits:
            raise RemoteError.system("the transaction is being ended with the opposite decision")
        ending.add(on_ended, args)
        return True

    def _end(
        self,
        end: End,
        view: MessageView,
        target: QueueOffset | None,
        on_ended: Callable[..., None],
        args: tuple[object, ...],
    ) -> None:
        if target is None:
            on_ended(None, *args)
            return
        ending = Ending(target, commits=end.commits, was_open=self.ledger.is_open(target))
        record = self._final(view) if end.commits else self._rollback(ending, view)
        ending.add(on_ended, args)
        self._begin(identity_of(view) or target, ending, record)

    def _begin(self, key: EndingKey, ending: Ending, record: Record) -> None:
        self._endings[key] = ending
        try:
            self.writer.append_soon(record, Promise.DURABLE, partial(self._stored, key, ending))
        except BaseException:
            # Nothing is stored, or the outcome would not be reported: it can be ended again.
            self._endings.pop(key, None)
            raise

    def _half_of(self, end: End) -> MessageView:
        """Return the half message that a request names, if everything about it fits."""
        view = self.queues.half(end.queue_offset)
        if view is None or view.physical_offset != end.physical_offset:
            there = self.queues.message_at(end.physical_offset)
            if there is None or there.topic != HALF_TOPIC:
                raise RemoteError.system(
                    f"no half message at commitLogOffset {end.physical_offset}"
                )
            raise RemoteError.system(
                f"tranStateTableOffset of the half message at {end.physical_offset}"
                f" must be {there.queue_offset}, got {end.queue_offset}"
            )
        if view.properties.get(names.PRODUCER_GROUP, "") != end.group:
            raise RemoteError.system(
                f"the half message belongs to another producer group than {end.group!r}"
            )
        if halves.is_another(view, end.message_id):
            raise RemoteError.system(
                f"the half message at {end.physical_offset} is {view.unique_key}, not"
                f" {end.message_id}, which was lost with the power"
            )
        return view

    def _needs_past(self, end: End, view: MessageView) -> bool:
        """Whether the store has to be searched, or is, for what became of a half message."""
        identity = identity_of(view)
        if identity is None:
            return False
        if identity in self._turns:
            return True
        offset = self._open_copy(end, view)
        if offset is not None:
            return offset < self._earlier_end
        return self.ledger.fate(self._ended_copy(end, view)) not in _FINAL

    def _open_copy(self, end: End, view: MessageView) -> QueueOffset | None:
        """Return the half message to end, perhaps a newer copy, if it is open."""
        if self.ledger.is_open(end.queue_offset):
            return end.queue_offset
        return self.ledger.newest_copy(identity_of(view))

    def _ended_copy(self, end: End, view: MessageView) -> QueueOffset:
        return self.ledger.abandoned_copy(identity_of(view), end.queue_offset)

    def _known_target(self, end: End, view: MessageView) -> QueueOffset | None:
        """Do as `_target`, without searching the store."""
        offset = self._open_copy(end, view)
        if offset is not None:
            return offset
        offset = self._ended_copy(end, view)
        return _late_target(end, offset, self.ledger.fate(offset))

    async def _target(self, end: End, view: MessageView) -> QueueOffset | None:
        """Return the half message to end, perhaps a newer copy; None if it has ended so already."""
        offset = self._open_copy(end, view)
        while offset is not None and not await self.was_committed(offset, view):
            # It may have been checked meanwhile, and replaced by a copy.
            searched, offset = offset, self._open_copy(end, view)
            if offset == searched:
                return offset
        offset = self._ended_copy(end, view)
        return _late_target(end, offset, await self._fate(offset, view))

    async def was_committed(self, offset: QueueOffset, view: MessageView) -> bool:
        """Whether an open half message was committed before a crash; if so, it is closed."""
        if offset >= self._earlier_end or not await self.queues.was_committed(view):
            return False
        if (identity_of(view) or offset) in self._endings:
            # What was found is being stored now, and may be lost yet.
            return False
        self.close(offset, Fate.COMMITTED)
        return True

    async def _fate(self, offset: QueueOffset, view: MessageView) -> Fate:
        fate = self.ledger.fate(offset)
        if fate is not None and fate in _FINAL:
            return fate
        if await self.queues.was_committed(view):
            return Fate.COMMITTED
        return Fate.ABANDONED if await self.queues.was_abandoned(view) else Fate.ENDED

    def _final(self, view: MessageView) -> Record:
        if body_crc(view.stored_body) != view.body_crc:
            # The copy would get a valid checksum, and pass for an intact message.
            reason = "half message, not committed: the body does not match its checksum"
            self.store.note_damaged(view.physical_offset, reason)
            raise RemoteError.system(reason)
        try:
            draft = halves.final_draft(view)
        except (KeyError, ValueError) as error:
            raise RemoteError.system(
                f"the half message does not name its queue: {error}"
            ) from error
        queue_id = readable_queue(self.topics, draft.topic, draft.queue_id)
        record = self.writer.record(replace(draft, queue_id=queue_id))
        return replace(record, prepared_transaction_offset=view.physical_offset)

    def _rollback(self, ending: Ending, view: MessageView) -> Record:
        """Return the record to store: an operation, or a new copy of an abandoned half message.

        The copy shows, also after a restart, that it is no longer abandoned. Its operation follows.
        """
        return self._operation(ending.target) if ending.was_open else halves.copy_of(view, 0)

    def _stored(self, key: EndingKey, ending: Ending, outcome: Outcome) -> None:
        """Report an end as soon as possible, and close the transaction when it is certain."""
        if isinstance(outcome, Late):
            ending.report(RemoteError(outcome.code, outcome.remark))
            self.writer.when_settled([outcome.appended], partial(self._settle, key, ending))
        else:
            self._settle(key, ending, outcome)

    def _settle(self, key: EndingKey, ending: Ending, outcome: Outcome) -> None:
        del self._endings[key]
        if isinstance(outcome, RemoteError):
            ending.report(outcome)
            return
        if ending.commits:
            self.close(ending.target, Fate.COMMITTED)
        elif isinstance(outcome, Appended):
            if ending.was_open:
                self.ledger.note_operation(outcome.queue_offset, ending.target)
            else:
                self.close(outcome.queue_offset, Fate.ROLLED_BACK)
            self.ledger.close(ending.target, Fate.ROLLED_BACK)
        ending.report(None)

    def close(self, offset: QueueOffset, fate: Fate) -> None:
        """Note how a half message ended, and have it written if it was open."""
        was_open = self.ledger.is_open(offset)
        self.ledger.close(offset, fate)
        if was_open:
            # Written soon, with the operations of other requests.
            self._unwritten.append(offset)
            if self._writing is None:
                self._writing = asyncio.get_running_loop().call_soon(self.write_operations)

    def is_ending(self, half: Half) -> bool:
        """Whether the end of a half message is being stored."""
        return (half.identity or half.queue_offset) in self._endings

    # --- operations -------------------------------------------------------------------------------

    def _operation(self, half: QueueOffset) -> Record:
        return halves.operation(half, self.clock.now_ms(), self.store_host)

    def write_operations(self) -> None:
        """Write the operations of committed messages.

        If it is refused, the ledger remembers what has ended, and so does the store: the committed
        message is found by its unique key.
        """
        self._writing = None
        written, self._unwritten = self._unwritten, []
        if not written:
            return
        try:
            appended = self.writer.append_all([self._operation(half) for half in written])
        except RemoteError as error:
            _log.warning(
                "cannot store %d transaction operations yet, will retry: %s", len(written), error
            )
            self._retry(written)
            return
        except Exception as error:  # noqa: BLE001 - a bug: operations must still be written
            self._retry(written, self.watch.failed(error))
            return
        self.watch.succeeded()
        for stored, half in zip(appended, written, strict=True):
            self.ledger.note_operation(stored.queue_offset, half)
        self.writer.when_settled(appended, partial(self._operations_settled, appended, written))

    def _operations_settled(
        self, appended: Sequence[Appended], written: list[QueueOffset], outcome: Outcome
    ) -> None:
        if isinstance(outcome, RemoteError):
            self._forget_operations(appended[0].queue_offset)
            self._retry(written)

    def _forget_operations(self, first: QueueOffset) -> None:
        self.ledger.forget_operations(first)
        # Progress that relied on them.
        self._marks.clear()

    def _retry(self, written: list[QueueOffset], pause_ms: int = RETRY_MS) -> None:
        self._unwritten += written
        if self._writing is None:
            loop = asyncio.get_running_loop()
            self._writing = loop.call_later(pause_ms / 1000, self.write_operations)

    def stop(self) -> None:
        """Write what is left, for the last time."""
        if self._writing is not None:
            self._writing.cancel()
        self.write_operations()
        if self._writing is not None:
            self._writing.cancel()
        if self.queues.half_range[1]:
            self.advance()

    # --- copies -----------------------------------------------------------------------------------

    async def replace(self, replaced: Sequence[Replacement], fate: Fate) -> list[Appended]:
        """Store records in place of half messages, each with its operation; return their places.

        With `Fate.REPLACED` they are copies, which are open from then on. On RemoteError nothing
        has changed.
        """
        # Operations last: after a crash in between, a copy shows that it replaces another.
        records = [old.record for old in replaced]
        records += [self._operation(old.half.queue_offset) for old in replaced]
        appended = self.writer.append_all(records)
        places, operations = appended[: len(replaced)], appended[len(replaced) :]
        for old, place, operation in zip(replaced, places, operations, strict=True):
            self.ledger.note_operation(operation.queue_offset, old.half.queue_offset)
            if fate is Fate.ABANDONED:
                self.ledger.give_up(old.half)
            else:
                self.ledger.close(old.half.queue_offset, fate)
                self.ledger.add(halves.copied(old.half, place, old.checks))
        outcome = await self._settled(appended)
        if isinstance(outcome, RemoteError):
            self._undo(replaced, places, operations[0].queue_offset, fate)
            raise outcome
        return places

    def _undo(
        self,
        replaced: Sequence[Replacement],
        places: Sequence[Appended],
        operation: QueueOffset,
        fate: Fate,
    ) -> None:
        self._forget_operations(operation)
        for old, place in zip(replaced, places, strict=True):
            if fate is Fate.REPLACED:
                self.ledger.forget(place.queue_offset)
            self.ledger.reopen(old.half)

    async def _settled(self, appended: Sequence[Appended]) -> Outcome:
        settled: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.writer.when_settled(appended, partial(set_outcome, future=settled))
        return await settled

    async def resume(self, position: PhysicalOffset) -> None:
        """Restart the checks of an abandoned half message; raises RemoteError."""
        view = await self.queues.fetched_message(position)
        if view is None or view.topic not in {CHECKED_TOO_OFTEN_TOPIC, HALF_TOPIC}:
            raise RemoteError.system(f"no open or abandoned half message at {position}")
        await self._load_earlier()
        half, copy = half_of(view), halves.copy_of(view, 0)
        async with self._turn_of(view):
            if half.identity in self._endings:
                raise RemoteError.system("the transaction is being ended")
            if await self.queues.was_committed(view):
                raise RemoteError.system("the transaction is already committed")
            offset = self.ledger.newest_copy(half.identity)
            if offset is None and not await self._is_resumable(view):
                raise RemoteError.system("the transaction has already ended")
        if offset is not None:
            half = self.ledger.open[offset]
        elif view.topic == CHECKED_TOO_OFTEN_TOPIC:
            await self._reopen(half, copy)
            return
        await self.replace([Replacement(half, copy)], Fate.REPLACED)

    async def _is_resumable(self, view: MessageView) -> bool:
        if view.topic == HALF_TOPIC:
            return self.ledger.is_open(view.queue_offset)
        identity = identity_of(view)
        if identity is None:
            return True
        copy = self.ledger.abandoned_copy(identity, QueueOffset(-1))
        return await self._fate(copy, view) is Fate.ABANDONED

    async def _reopen(self, abandoned: Half, copy: Record) -> None:
        prepare_topics(self.topics)
        appended = self.writer.append_all([copy])
        self.ledger.add(halves.copied(abandoned, appended[0], 0))
        outcome = await self._settled(appended)
        if isinstance(outcome, RemoteError):
            self.ledger.forget(appended[0].queue_offset)
            raise outcome
        self.ledger.note_resumed(abandoned.identity)

    # --- progress ---------------------------------------------------------------------------------

    def advance(self) -> None:
        """Note up to where both queues need not be read again."""
        progress = self.ledger.advance()
        if len(self._marks) >= _MARKS_MAX:
            self._marks.pop()
        self._marks.append((self.store.written_end, progress))

    def settle_progress(self) -> None:
        """Commit the progress that survives a power failure, for the next save of offsets."""
        while self._marks and self._marks[0][0] <= self.store.flushed_end:
            self._saved = self._marks.popleft()[1]
        if self._saved is not None:
            # Every time: any client may have committed something else for the group.
            self.offsets.commit(PROGRESS_GROUP, HALF_TOPIC, QUEUE_ID, self._saved.half)
            operation = self._saved.operation
            self.offsets.commit(PROGRESS_GROUP, HALF_OPERATIONS_TOPIC, QUEUE_ID, operation)


def _late_target(end: End, offset: QueueOffset, fate: Fate | None) -> QueueOffset | None:
    """Return a half message that is to be ended although it is not open."""
    if fate is Fate.ABANDONED:
        # Better late than never.
        return offset
    if end.commits == (fate is Fate.COMMITTED):
        return None
    done = "committed" if fate is Fate.COMMITTED else "rolled back, or replaced by a copy,"
    raise RemoteError.system(f"the transaction is already {done}")


def prepare_topics(topics: Topics) -> None:
    """Create the topics of half messages and operations, if missing."""
    topics.create_internal(HALF_TOPIC, queues=1)
    # Apache RocketMQ creates none for the operations; with it, tools can read them.
    topics.create_internal(HALF_OPERATIONS_TOPIC, queues=1)
