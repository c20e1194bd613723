"""The life cycle of sessions and their users: start, close, `async with`."""

from __future__ import annotations

import asyncio
import functools
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Self, TypeVar

from turbopump.client.background import is_loop_thread
from turbopump.client.members import ConsumerMember, ProducerMember
from turbopump.errors import NotRunning

if TYPE_CHECKING:
    from turbopump.client.session import Session

R = TypeVar("R")

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class LifeCycle(ABC):
    """Starts and closes, explicitly or as a context manager."""

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class ServingLifeCycle(LifeCycle):
    """Calls the application until it is closed."""

    def __init__(self) -> None:
        self._closed: asyncio.Event | None = None
        """Set once the client is closed; None before its first start, and after one that failed."""
        self._closing: asyncio.Task[None] | None = None

    @property
    @abstractmethod
    def is_calling(self) -> bool:
        """Whether the caller runs in a function or hook of the application that this called."""

    @abstractmethod
    def begin_closing(self) -> asyncio.Task[None] | None:
        """Close in a separate task, which outlives its caller; call on the loop only.

        Return that task, or None if there is nothing to close.
        """

    async def close(self) -> None:
        """Stop pulling, wait for running functions, commit, leave the group.

        Called from one of these functions or a hook, it does not wait: it closes after that call.
        """
        closing = self.begin_closing()
        if closing is not None and not self.is_calling:
            await asyncio.shield(closing)

    async def wait(self, *, handle_signals: bool = True) -> None:
        """Wait until the client is closed.

        In the main thread, SIGINT and SIGTERM close it: it leaves the group, waits for running
        functions, commits, and this returns. A second signal ends the process. Handlers that the
        program installed stay in place; with ``handle_signals=False``, no handler is replaced.
        Raises NotRunning before the start.
        """
        closed = self._closed
        if closed is None:
            raise not_running(f"this {type(self).__name__}")
        loop = asyncio.get_running_loop()
        begin = functools.partial(loop.call_soon_threadsafe, self.begin_closing)
        with stop_signals(begin) if handle_signals else nullcontext():
            await closed.wait()
            if self._closing is not None:
                await asyncio.shield(self._closing)


@asynccontextmanager
async def started(session: Session, member: ProducerMember | ConsumerMember) -> AsyncIterator[None]:
    """Start a session for a member; after an error, leave and close it."""
    await session.start()
    try:
        yield
    except BaseException:
        await leave(session, member)
        raise


async def leave(session: Session, member: ProducerMember | ConsumerMember) -> None:
    """Leave a session, and close it even if brokers could not be notified."""
    try:
        await session.leave(member)
    finally:
        await session.close()


def require_running(running: R | None, kind: str, group: str) -> R:
    """Return the state between start and close; raises NotRunning."""
    if running is None:
        raise not_running(f"{kind} {group!r}")
    return running


def not_running(what: str) -> NotRunning:
    """Return the error of a client that is not started, or closed."""
    # Blocking clients run on a loop thread.
    how = "`with`, or call" if is_loop_thread() else "`async with`, or await"
    return NotRunning(f"{what} is not running: use it inside {how} start()")


@contextmanager
def stop_signals(
    begin: Callable[[], object], kill: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Stop in an orderly way on the first signal; on the second, call ``kill`` and end the process.

    Handlers belong to the main thread, so elsewhere this does nothing. Only Python's own handlers
    are replaced: the program, or a framework that runs it, may have installed others, and an
    ignored signal stays ignored, as ``nohup`` requires.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_begun = False

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal is_begun
        if is_begun:
            kill()
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        is_begun = True
        begin()

    wanted = [each for each in _STOP_SIGNALS if _is_pythons(signal.getsignal(each))]
    before = {each: signal.signal(each, handle) for each in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_pythons(handler: object) -> bool:
    """Whether only the interpreter or asyncio has installed the handler of a signal."""
    if handler in (signal.SIG_DFL, signal.default_int_handler):
        return True
    # `asyncio.run` cancels its main task on SIGINT, by a bound method with the task.
    method = getattr(handler, "func", None)
    return isinstance(getattr(method, "__self__", None), asyncio.Runner)
