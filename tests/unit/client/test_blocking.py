"""The wrapper for threads: what a call takes along to the loop."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
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


class Fatal(Probe):
    async def end_the_loop(self) -> None:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(60)


class BlockingFatal(Blocking[Fatal]):
    def __init__(self) -> None:
        self._hold(Fatal())

    end_the_loop = blocking(Fatal.end_the_loop)


def test_nobody_waits_for_a_loop_that_has_ended() -> None:
    program = """
from unit.client.test_blocking import BlockingFatal
from turbopump.errors import NotRunning
fatal = BlockingFatal()
fatal.__enter__()
for _ in range(2):
    try:
        fatal.end_the_loop()
    except NotRunning:
        print("not running")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.stdout.splitlines() == ["not running"] * 2, done.stderr
