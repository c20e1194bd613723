from __future__ import annotations

import asyncio
from concurrent.futures import Future

from turbopump.broker.durability import Durability, NotDurableYet
from turbopump.broker.overload import LoopLag
from turbopump.errors import WriteFailed
from turbopump.net.deadlines import Deadlines
from turbopump.testing import virtual_loop, virtual_time


class Watcher:
    def __init__(self, waiting_max: int = 10) -> None:
        self.flushed = 0
        deadlines = Deadlines(virtual_loop().clock)
        self.durability = Durability(deadlines, self._after, 5000, waiting_max)
        self.told: list[BaseException | None] = []

    def _after(self) -> None:
        self.flushed += 1


@virtual_time()
async def test_everyone_who_waits_for_a_flush_is_told_once() -> None:
    watcher = Watcher()
    flush: Future[None] = Future()
    for _ in range(3):
        watcher.durability.when_done(flush, watcher.told.append)
    assert len(watcher.durability) == 3
    flush.set_result(None)
    await asyncio.sleep(10)
    assert watcher.told == [None, None, None]
    assert watcher.flushed == 1
    assert len(watcher.durability) == 0


@virtual_time()
async def test_a_failed_flush_is_an_error_for_everyone_and_nothing_becomes_readable() -> None:
    watcher = Watcher()
    flush: Future[None] = Future()
    watcher.durability.when_done(flush, watcher.told.append)
    watcher.durability.watch(flush, watcher.told.append)
    failure = WriteFailed("the disk said no")
    flush.set_exception(failure)
    await asyncio.sleep(10)
    assert watcher.told == [failure, failure]
    assert watcher.flushed == 0


@virtual_time()
async def test_a_slow_flush_is_reported_after_its_time_and_only_then() -> None:
    watcher = Watcher(waiting_max=1)
    flush: Future[None] = Future()
    watcher.durability.when_done(flush, watcher.told.append)
    assert watcher.durability.is_full
    await asyncio.sleep(4.99)
    assert not watcher.told
    await asyncio.sleep(0.2)
    assert isinstance(watcher.told[0], NotDurableYet)
    assert not watcher.durability.is_full
    flush.set_result(None)
    await asyncio.sleep(1)
    assert len(watcher.told) == 1
    assert watcher.flushed == 1, "readable all the same, once it is on disk"


@virtual_time()
async def test_flushes_nobody_waits_for_are_noticed() -> None:
    watcher = Watcher()
    flush: Future[None] = Future()
    watcher.durability.watch(flush)
    flush.set_result(None)
    await asyncio.sleep(0.1)
    assert watcher.flushed == 1


@virtual_time()
async def test_lag_is_what_a_stalled_loop_makes_requests_wait() -> None:
    clock = virtual_loop().clock
    lag = LoopLag(clock)
    assert lag.lag_ms == 0
    await asyncio.sleep(0.05)
    assert lag.lag_ms <= 0
    clock.advance_ns(700_000_000)
    assert lag.lag_ms >= 600, "noticed by the first request after the stall"
    await asyncio.sleep(0)
    await asyncio.sleep(0.005)
    assert lag.lag_ms >= 600, "and by all that waited"
    await asyncio.sleep(0.02)
    assert lag.lag_ms <= 0, "but not by those that came later"
    lag.stop()


@virtual_time()
async def test_lag_is_not_looked_for_while_nobody_asks() -> None:
    lag = LoopLag(virtual_loop().clock)
    assert lag.lag_ms == 0
    await asyncio.sleep(1)
    assert lag._timer is None
