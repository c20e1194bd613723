"""Offsets in a store of the application, such as the database of its results."""

from __future__ import annotations

import asyncio
import inspect
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from turbopump.client.delivery.listener import is_async, is_being_cancelled
from turbopump.client.offsets import Offsets, RemoteOffsets
from turbopump.client.session import Session
from turbopump.errors import ClientError, InvalidArgument
from turbopump.machine.threads import DaemonThreads
from turbopump.message import MessageQueue, QueueOffset
from turbopump.timeouts import timeout

_log = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 30
_METHODS = ("load", "advance", "remove", "commit")


class OffsetStore(Protocol):
    """Keeps the offsets of one consumer, such as in the database of the listener's results.

    ::

        class Offsets:
            def load(self, queue): ...
            def advance(self, queue, offset): ...
            def remove(self, queue): ...
            def commit(self): ...

        PushConsumer("billing", bill, offset_store=Offsets(), orderly=True, ...)

    An offset is that of the next message to consume. Changes come in groups: `advance` and
    `remove`, then `commit`, which writes them in one transaction. Plain methods run in a thread of
    the consumer, coroutine functions on its event loop, one call at a time. If one raises, or a
    group takes more than 30 seconds, that is logged, and the whole group is repeated later.
    """

    @abstractmethod
    def load(self, queue: MessageQueue) -> Awaitable[int | None] | int | None:
        """Return the stored offset of a queue; None to start where the group would without."""

    @abstractmethod
    def advance(self, queue: MessageQueue, offset: int) -> Awaitable[None] | None:
        """Note how far a queue is consumed, unless a higher offset is stored."""

    @abstractmethod
    def remove(self, queue: MessageQueue) -> Awaitable[None] | None:
        """Note that the stored offset of a queue is void; a lower one may follow."""

    @abstractmethod
    def commit(self) -> Awaitable[None] | None:
        """Store what was noted since the last `commit`, all of it or nothing."""


def check_offset_store(store: object) -> None:
    """Refuse objects that lack a method of `OffsetStore`."""
    missing = [name for name in _METHODS if not callable(getattr(store, name, None))]
    if isinstance(store, type):
        raise InvalidArgument(f"offset_store must be an object, got {store!r}; pass an instance")
    if missing:
        raise InvalidArgument(
            f"offset_store must be an object with {', '.join(_METHODS)}, got {store!r} without "
            f"{', '.join(missing)}"
        )


class StoredOffsets(Offsets):
    """Offsets in a store of the application, and then on brokers, so that operators see the lag.

    Each change reaches the store first.
    """

    def __init__(
        self, store: OffsetStore, session: Session, group: str, *, is_broadcast: bool
    ) -> None:
        super().__init__()
        self._store = store
        self._session = session
        self._group = group
        self._on_brokers = None if is_broadcast else RemoteOffsets(session, group)
        self._stored: dict[MessageQueue, QueueOffset] = {}
        """What the store is known to have, at least."""
        self._resets: dict[MessageQueue, QueueOffset] = {}
        """Resets that the store does not have yet."""
        self._thread = DaemonThreads(1, "turbopump-offsets")
        self._calling = asyncio.Lock()

    @property
    def on_brokers(self) -> RemoteOffsets | None:
        return self._on_brokers

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    async def stored(self, queue: MessageQueue) -> QueueOffset | None:
        found = await self._call(("load", queue))
        if found is None:
            return None if self._on_brokers is None else await self._on_brokers.stored(queue)
        if not isinstance(found, int) or isinstance(found, bool) or found < 0:
            raise ClientError(
                f"offset_store.load() must return an offset from 0 on, or None, got {found!r} for "
                f"{queue}"
            )
        self._note({queue: QueueOffset(found)})
        return QueueOffset(found)

    def has_uncommitted(self, queues: Collection[MessageQueue]) -> bool:
        brokers = self._on_brokers
        if self._uncommitted(queues):
            return True
        return brokers is not None and brokers.has_uncommitted(queues)

    def _uncommitted(self, queues: Collection[MessageQueue]) -> dict[MessageQueue, QueueOffset]:
        known = ((queue, self.positions.of(queue)) for queue in queues)
        return {
            queue: at
            for queue, at in known
            if at is not None and (at != self._stored.get(queue) or queue in self._resets)
        }

    async def persist(self, queues: Collection[MessageQueue], *, is_routine: bool = False) -> None:
        for queue in [each for each in queues if each in self._resets]:
            await self.store_reset(queue)
        offsets = self._uncommitted([each for each in queues if each not in self._resets])
        changes = (("advance", queue, offset) for queue, offset in offsets.items())
        if offsets and await self._is_committed(*changes):
            self._note(offsets)
        if self._on_brokers is not None:
            await self._on_brokers.persist(queues, is_routine=is_routine)

    def forget(self, queue: MessageQueue) -> None:
        super().forget(queue)
        self._stored.pop(queue, None)
        self._resets.pop(queue, None)
        if self._on_brokers is not None:
            self._on_brokers.forget(queue)

    def reset(self, queue: MessageQueue, offset: QueueOffset) -> None:
        super().reset(queue, offset)
        self._resets[queue] = offset

    async def store_reset(self, queue: MessageQueue) -> bool:
        # Before redelivery: a listener may compare messages with the store, to skip processed ones.
        offset = self._resets.get(queue)
        if offset is None:
            return True
        # In one transaction: a higher offset that is stored counts no longer.
        if not await self._is_committed(("remove", queue), ("advance", queue, offset)):
            return False
        if self._resets.get(queue) == offset:
            del self._resets[queue]
            self._note({queue: offset})
        return True

    def outlives_topic(self, queue: MessageQueue) -> bool:
        return queue in self._stored

    async def remove(self, queue: MessageQueue) -> bool:
        return await self._is_committed(("remove", queue))

    def _note(self, offsets: Mapping[MessageQueue, QueueOffset]) -> None:
        """Note what is stored; brokers get it next."""
        for queue, offset in offsets.items():
            self._stored[queue] = offset
            if self._on_brokers is not None:
                self._on_brokers.positions.replace(queue, offset)

    # --- calling ----------------------------------------------------------------------------------

    async def _is_committed(self, *changes: tuple[Any, ...]) -> bool:
        """Make changes in one transaction; return whether that worked."""
        try:
            await self._call(*changes, ("commit",))
        except ClientError:
            return False
        return True

    async def _call(self, *calls: tuple[Any, ...]) -> Any:
        """Call methods of the store; return the result of the last one.

        Logs a failure, and raises it as ClientError: the caller retries. Groups of calls do not
        overlap, and have the order of this method's: a thread that is too slow delays the next.
        """
        name = calls[0][0]
        async with self._calling:
            try:
                async with timeout(_CALL_TIMEOUT_S):
                    result = None
                    for name, *arguments in calls:
                        result = await self._result(getattr(self._store, name), arguments)
                    return result
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
                    raise
                is_late = isinstance(error, TimeoutError) and not error.args
                why = f"no result within {_CALL_TIMEOUT_S} s" if is_late else repr(error)
                failure = f"offset_store.{name}() failed: {why}"
                if self._session.log_limit.is_due((name, self._group)):
                    text = "%s: %s; tried again, and logged once a minute"
                    _log.warning(text, self._group, failure, exc_info=error)
                raise ClientError(failure) from error

    async def _result(self, call: Callable[..., Any], arguments: Sequence[object]) -> Any:
        if is_async(call):
            return await call(*arguments)
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self._thread, _called, call, arguments)
        return await result if inspect.isawaitable(result) else result


def _called(call: Callable[..., Any], arguments: Sequence[object]) -> Any:
    """Call a plain method, in the thread."""
    try:
        return call(*arguments)
    except StopIteration as error:
        # As of `next(rows)` without rows; no future can hold it.
        raise RuntimeError("StopIteration") from error
