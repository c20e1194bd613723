"""Admission of requests: limits those in flight and holds them back from a full transport."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from turbopump.errors import NetworkError, Overloaded
from turbopump.net.deadlines import Deadlines


class Admission:
    """Places for requests in flight, granted in order, none while writing is paused."""

    def __init__(self, places: int, deadlines: Deadlines) -> None:
        self._places = places
        self._free = places
        self._deadlines = deadlines
        self.writable = True
        """Whether the transport takes more bytes; nothing is admitted until `resume` if not."""
        self._waiting: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._admitted = 0
        """Waiters with a place that have not continued yet; no later request may overtake them."""

    @property
    def is_idle(self) -> bool:
        """Whether no request has a place or waits for one."""
        return self._free == self._places and not self._waiting

    def try_enter(self) -> bool:
        """Take a place if one is free."""
        if self._free and self.writable and not self._waiting and not self._admitted:
            self._free -= 1
            return True
        return False

    async def enter(self, timeout_ms: int, address: str) -> None:
        """Wait for a place; raises Overloaded on timeout.

        ``address`` is the peer's, for the message.
        """
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def give_up() -> None:
            why = "no request in flight finished" if self.writable else "the peer read nothing"
            self._fail(waiter, Overloaded(f"{address}: {why} for {timeout_ms} ms"))

        deadline = self._deadlines.add(timeout_ms, give_up)
        self._waiting[waiter] = None
        try:
            await waiter
        except asyncio.CancelledError:
            if _was_granted(waiter):
                self.leave()
            raise
        finally:
            deadline.cancel()
            self._waiting.pop(waiter, None)
            self._admitted -= _was_granted(waiter)
        # The next request is admitted after this one has sent: its bytes may fill the transport.
        asyncio.get_running_loop().call_soon(self._admit_next)

    def leave(self) -> None:
        """Give a place back."""
        self._free += 1
        if self._waiting:
            self._admit_next()

    def resume(self) -> None:
        """Admit requests again: the transport takes more bytes."""
        self.writable = True
        self._admit_next()

    def fail_all(self, error: NetworkError) -> None:
        """Fail all waiters: the connection is closed."""
        for waiter in tuple(self._waiting):
            self._fail(waiter, error)

    def _admit_next(self) -> None:
        while self._free and self.writable and self._waiting:
            waiter, _ = self._waiting.popitem(last=False)
            # A cancelled waiter stays until its task runs.
            if not waiter.done():
                self._free -= 1
                self._admitted += 1
                waiter.set_result(None)
                return

    def _fail(self, waiter: asyncio.Future[None], error: NetworkError) -> None:
        self._waiting.pop(waiter, None)
        if not waiter.done():
            waiter.set_exception(error)


def _was_granted(waiter: asyncio.Future[None]) -> bool:
    return waiter.done() and not waiter.cancelled() and waiter.exception() is None
