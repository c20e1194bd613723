"""The fifth stage: committed offsets, on the broker or, when broadcasting, in a local file.

Those in a store of the application are in `turbopump.client.offset_store`.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable
from pathlib import Path

from turbopump.client import calls
from turbopump.client.replicas import Replica
from turbopump.client.session import Session
from turbopump.client.start_position import At, AtEnd, AtTime, StartFrom, start_in
from turbopump.errors import InvalidArgument, NetworkError, TurbopumpError
from turbopump.machine import Machine
from turbopump.machine.files import Files, make_directory_durable
from turbopump.message import MessageQueue, QueueOffset
from turbopump.tables import Table, TableFile, TableWriter
from turbopump.wire.bodies import QueueOffsets

_log = logging.getLogger(__name__)

COMMIT_AGAIN_MS = 30_000
"""How often an unchanged offset is committed again, since brokers may have lost it."""

_COMMIT_TIMES = 2
_COMMIT_TIMEOUT_MS = 5000
_DEFAULT_DIRECTORY = ".rocketmq_offsets"


class Positions:
    """Offsets in memory: they only increase, except by a reset or an orderly rollback."""

    def __init__(self) -> None:
        self._offsets: dict[MessageQueue, QueueOffset] = {}
        self.changes = 0
        """How many changes were noted."""

    def of(self, queue: MessageQueue) -> QueueOffset | None:
        return self._offsets.get(queue)

    def all_of(self, topic: str) -> dict[MessageQueue, int]:
        return {queue: offset for queue, offset in self._offsets.items() if queue.topic == topic}

    def advance(self, queue: MessageQueue, offset: QueueOffset) -> None:
        """Note progress; ignore an offset that lies behind."""
        if offset > self._offsets.get(queue, -1):
            self._offsets[queue] = offset
            self.changes += 1

    def replace(self, queue: MessageQueue, offset: QueueOffset) -> None:
        """Set an offset, possibly backwards."""
        self._offsets[queue] = offset
        self.changes += 1

    def forget(self, queue: MessageQueue) -> None:
        self._offsets.pop(queue, None)
        self.changes += 1


class Offsets(ABC):
    """Where offsets persist."""

    def __init__(self) -> None:
        self.positions = Positions()

    @property
    def on_brokers(self) -> RemoteOffsets | None:
        """The offsets that are committed to brokers, by pulls as well; None if none are."""
        return None

    async def open(self) -> None:  # noqa: B027 - brokers are asked for each queue
        """Read the stored offsets, if reading them once is enough."""

    def close(self) -> None:  # noqa: B027 - brokers keep the offsets
        """Release what `open` acquired."""

    @abstractmethod
    async def stored(self, queue: MessageQueue) -> QueueOffset | None:
        """Return the stored offset of a queue, or None; raises TurbopumpError."""

    @abstractmethod
    def has_uncommitted(self, queues: Collection[MessageQueue]) -> bool:
        """Whether a routine `persist` has anything to commit."""

    @abstractmethod
    async def persist(self, queues: Collection[MessageQueue], *, is_routine: bool = False) -> None:
        """Commit the positions of these queues; failures are logged and retried next time.

        A routine commit may leave out offsets known to be committed.
        """

    def forget(self, queue: MessageQueue) -> None:
        """Forget the position of a queue that is gained or lost."""
        self.positions.forget(queue)

    def reset(self, queue: MessageQueue, offset: QueueOffset) -> None:
        """Set the position of a queue that continues elsewhere, possibly backwards."""
        self.positions.replace(queue, offset)

    async def store_reset(self, queue: MessageQueue) -> bool:  # noqa: ARG002 - brokers store it later
        """Store a reset if it must precede redelivery; return whether that worked."""
        return True

    def outlives_topic(self, queue: MessageQueue) -> bool:  # noqa: ARG002 - brokers remove it
        """Whether the offset of a queue has to be removed when its topic is deleted."""
        return False

    async def remove(self, queue: MessageQueue) -> bool:  # noqa: ARG002 - see `outlives_topic`
        """Remove the offset of a queue whose topic was deleted; return whether that worked."""
        return True


class CommitHistory:
    """The commits of one queue, to repeat them only as often as needed.

    Commits are one-way, and a broker that crashes loses the latest. So each offset is committed
    twice in a row, and again every `COMMIT_AGAIN_MS` while it is unchanged.
    """

    __slots__ = ("_at_ms", "_offset", "_times")

    def __init__(self) -> None:
        self._offset: QueueOffset | None = None
        self._times = 0
        self._at_ms = 0

    def is_settled(self, offset: QueueOffset, now_ms: int) -> bool:
        is_same = offset == self._offset and self._times >= _COMMIT_TIMES
        return is_same and now_ms - self._at_ms < COMMIT_AGAIN_MS

    @property
    def due_ms(self) -> int:
        """When an unchanged offset is next committed."""
        return self._at_ms + COMMIT_AGAIN_MS

    def note(self, offset: QueueOffset, now_ms: int) -> None:
        self._times = self._times + 1 if offset == self._offset else 1
        self._offset, self._at_ms = offset, now_ms


OffsetToCommit = Callable[[MessageQueue, Replica, QueueOffset], Awaitable[QueueOffset | None]]
"""Returns what to commit instead of a position; None to commit nothing now."""


class RemoteOffsets(Offsets):
    """Offsets on the brokers, shared by the group."""

    def __init__(self, session: Session, group: str) -> None:
        super().__init__()
        self._history: defaultdict[MessageQueue, CommitHistory] = defaultdict(CommitHistory)
        self._session = session
        self._group = group
        self.offset_to_commit: OffsetToCommit | None = None
        """Compares a broker first, which may have lost messages since they were pulled."""
        self._seen: tuple[int, int] | None = None
        """The state in which everything was committed, valid until the time below."""
        self._settled_until_ms = 0

    @property
    def on_brokers(self) -> RemoteOffsets:
        return self

    async def stored(self, queue: MessageQueue) -> QueueOffset | None:
        # Apache RocketMQ's client takes any error for "none" and then skips all messages. Here it
        # is raised, and the queue does not start before its broker has responded.
        address = await self._session.address_of(queue)
        timeout_ms = self._session.config.request_timeout_ms
        return await calls.committed_offset(self._session, address, self._group, queue, timeout_ms)

    def has_uncommitted(self, queues: Collection[MessageQueue]) -> bool:
        now_ms = self._session.clock.monotonic_ms()
        seen = (self.positions.changes, len(queues))
        if seen == self._seen and now_ms < self._settled_until_ms:
            return False
        if any(self._is_uncommitted(queue, now_ms) for queue in queues):
            return True
        known = (queue for queue in queues if self.positions.of(queue) is not None)
        due_ms = (self._history[queue].due_ms for queue in known)
        self._seen, self._settled_until_ms = seen, min(due_ms, default=now_ms + COMMIT_AGAIN_MS)
        return False

    def _is_uncommitted(self, queue: MessageQueue, now_ms: int) -> bool:
        offset = self.positions.of(queue)
        return offset is not None and not self._history[queue].is_settled(offset, now_ms)

    async def persist(self, queues: Collection[MessageQueue], *, is_routine: bool = False) -> None:
        now_ms = self._session.clock.monotonic_ms()
        by_broker: defaultdict[str, list[MessageQueue]] = defaultdict(list)
        for queue in queues:
            is_known = self.positions.of(queue) is not None
            if is_known and not (is_routine and not self._is_uncommitted(queue, now_ms)):
                by_broker[queue.broker].append(queue)
        if len(by_broker) == 1:
            await self._commit(*by_broker.values())
            return
        # An unresponsive broker does not delay the others.
        async with asyncio.TaskGroup() as group:
            for own in by_broker.values():
                group.create_task(self._commit(own))

    async def _commit(self, queues: Iterable[MessageQueue]) -> None:
        """Commit to one broker, one offset after another, until the network fails."""
        for queue in queues:
            try:
                replica = await self._session.replica_to_commit(queue)
                offset = await self._offset_at(replica, queue)
                if offset is None:
                    continue
                await calls.commit_offset(
                    self._session, replica.address, self._group, queue, offset, _COMMIT_TIMEOUT_MS
                )
                if replica.is_master:
                    # Slaves forget or refuse it: the master gets it once it is back.
                    self._history[queue].note(offset, self._session.clock.monotonic_ms())
            except TurbopumpError as error:
                what = "offset of %s in %s not committed"
                self._session.warn(_log, queue.broker, error, what, self._group, queue)
                if isinstance(error, NetworkError):
                    # The others would wait just as long without result; the next commit is soon.
                    return

    async def _offset_at(self, replica: Replica, queue: MessageQueue) -> QueueOffset | None:
        """Return what to commit to a replica, None if there is nothing to commit."""
        # Not earlier: while others were committed, this queue may have gone back, or was lost.
        position = self.positions.of(queue)
        if position is None or self.offset_to_commit is None:
            return position
        offset = await self.offset_to_commit(queue, replica, position)
        latest = self.positions.of(queue)
        if offset is None or latest is None:
            return None
        if offset == position < latest:
            # A pull may have committed more meanwhile. Now that it is compared, nothing is awaited.
            return await self._offset_at(replica, queue)
        return min(offset, latest)


class LocalOffsets(Offsets):
    """Offsets in this client's own file, in the format of Apache RocketMQ's client.

    It has no version, to be what that client writes, byte for byte.
    """

    def __init__(self, path: Path, machine: Machine | None = None) -> None:
        super().__init__()
        machine = machine or Machine()
        self._files = machine.files
        writer = TableWriter(machine.background, machine.clock)
        self._file = TableFile(path, self._files, writer, is_verbatim=True)
        self._table = Table(f"offsets in {path}", self._file, self._encoded)
        self._stored: dict[MessageQueue, QueueOffset] = {}
        """The contents of the file, unless the table is dirty."""
        self._lock: int | None = None

    async def open(self) -> None:
        await self._file.writer.write(self._open)

    def _open(self) -> None:
        self._lock = _locked(self._files, self._file.path)
        saved = self._file.load_expendable(
            QueueOffsets, "broadcasting starts without stored offsets"
        )
        if saved is not None:
            self._stored = {queue: QueueOffset(at) for queue, at in saved.offset_table.items()}

    def close(self) -> None:
        """Release the file to other consumers."""
        self._file.writer.close()
        if self._lock is not None:
            self._files.close(self._lock)
            self._lock = None

    async def stored(self, queue: MessageQueue) -> QueueOffset | None:
        return self._stored.get(queue)

    def has_uncommitted(self, queues: Collection[MessageQueue]) -> bool:
        return self._table.is_dirty or any(self._is_uncommitted(queue) for queue in queues)

    def _is_uncommitted(self, queue: MessageQueue) -> bool:
        offset = self.positions.of(queue)
        return offset is not None and self._stored.get(queue) != offset

    async def persist(self, queues: Collection[MessageQueue], *, is_routine: bool = False) -> None:  # noqa: ARG002 - the file is known to hold what it held
        for queue in queues:
            offset = self.positions.of(queue)
            if offset is not None and self._stored.get(queue) != offset:
                self._stored[queue] = offset
                self._table.changes += 1
        await self._table.try_save()

    def _encoded(self) -> bytes:
        return QueueOffsets(offset_table=dict(self._stored)).encode(bare_keys=True)


def offsets_path(directory: Path | None, client_id: str, group: str) -> Path:
    """Return where a broadcasting consumer stores its offsets; by default in the home folder."""
    return (directory or Path.home() / _DEFAULT_DIRECTORY) / client_id / group / "offsets.json"


def _locked(files: Files, path: Path) -> int | None:
    """Lock the file: two writers would skip each other's messages."""
    try:
        make_directory_durable(files, path.parent)
        lock = files.open_new(path.with_name(path.name + ".lock"))
    except OSError as error:
        _log.warning("offsets cannot be kept in %s: %s", path, error)
        return None
    try:
        files.lock(lock)
    except OSError as error:
        files.close(lock)
        raise InvalidArgument(
            f"another broadcasting consumer keeps its offsets in {path}: give each of them its own"
            " ClientConfig(instance=...) or offsets_directory"
        ) from error
    return lock


async def start_offset(
    session: Session, queue: MessageQueue, stored: QueueOffset | None, start_from: StartFrom
) -> QueueOffset:
    """Return where to start in a queue, as brokers know it; ``stored`` is the committed offset."""
    timeout_ms = session.config.request_timeout_ms
    match start_in(queue.topic, stored, start_from):
        case At(offset):
            return offset
        case AtEnd():
            # A slave may not know offsets that the group committed in the meantime: starting at its
            # end could skip messages.
            address = session.address_to_write(queue.broker)
            return await calls.max_offset(session, address, queue, timeout_ms)
        case AtTime(timestamp_ms):
            address = await session.address_of(queue)
            return await calls.offset_at(session, address, queue, timestamp_ms, timeout_ms)
