"""The wrapper for threads: what a call takes along to the loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

from turbopump.client.blocking import Blocking, blocking, promising

_caller: contextvars.ContextVar[int] = contextvars.ContextVar("caller")


class Probe:
    """An asynchronous client that tells in whose context it runs."""

    async def start(self) -> None: ...

    async def __aexit__(self, *error: object) -> None: ...

    async def caller(self) -> int:
        return _caller.get()

    async def promise(self) -> asyncio.Future[int]:
        return asyncio.ensure_future(self.caller())


class BlockingProbe(Blocking[Probe]):
    def __init__(self) -> None:
        self._hold(Probe())

    caller = blocking(Probe.caller)
    promise = promising(Probe.promise)


def test_calls_run_in_the_context_of_their_thread() -> None:
    together = threading.Barrier(8)
    with BlockingProbe() as probe:

        def ask(number: int) -> bool:
            _caller.set(number)
            together.wait()
            promises = [probe.promise() for _ in range(100)]
            told = {probe.caller() for _ in range(100)}
            return told | {promise.result() for promise in promises} == {number}

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(ask, range(8)))
