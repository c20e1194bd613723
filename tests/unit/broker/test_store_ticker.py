"""When the store is ticked: often while messages arrive, rarely afterwards, and then not at all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from turbopump.broker.store_ticker import StoreTicker
from turbopump.machine.files import REAL_FILES
from turbopump.store.config import FlushConfig, StoreConfig
from turbopump.store.store import Store
from turbopump.supervisor import Supervisor
from turbopump.testing import virtual_loop, virtual_machine, virtual_time

FLUSH = FlushConfig(interval_ms=2000, queue_interval_ms=3000)


@virtual_time()
async def test_a_message_after_an_idle_period_makes_ticks_frequent_immediately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, ticks = virtual_loop(), list[float]()
    with Store.open(
        tmp_path, StoreConfig(flush=FLUSH), machine=virtual_machine(REAL_FILES)
    ) as store:
        monkeypatch.setattr(store, "tick", lambda: ticks.append(loop.time()))
        store_ticker = StoreTicker(store, loop.clock, Supervisor().watch("store maintenance"))

        async def ticks_of(seconds: float) -> list[float]:
            ticks.clear()
            started_s = loop.time()
            await asyncio.sleep(seconds)
            return [round(tick_s - started_s, 3) for tick_s in ticks]

        store_ticker.note_message()
        assert await ticks_of(1.05) == pytest.approx([0.1 * at for at in range(1, 11)])
        assert await ticks_of(3.9) == pytest.approx([1.95]), "idle"
        store_ticker.note_message()
        assert await ticks_of(0.15) == pytest.approx([0.05]), "one that is near stays where it is"
        await asyncio.sleep(1.9)
        assert await ticks_of(0.1) == []
        store_ticker.note_message()
        store_ticker.note_message()
        assert await ticks_of(0.35) == pytest.approx([0.1, 0.2, 0.3])
        await asyncio.sleep(60)
        assert await ticks_of(60) == []
        store_ticker.stop()
        store_ticker.note_message()
        assert await ticks_of(60) == [], "a message in flight at the end starts no timer"


@virtual_time()
async def test_ticks_continue_after_a_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop, ticks = virtual_loop(), list[float]()

    def fail() -> None:
        ticks.append(round(loop.time(), 1))
        if len(ticks) <= 2:
            raise LookupError("a bug")

    with Store.open(
        tmp_path, StoreConfig(flush=FLUSH), machine=virtual_machine(REAL_FILES)
    ) as store:
        monkeypatch.setattr(store, "tick", fail)
        store_ticker = StoreTicker(store, loop.clock, Supervisor().watch("store maintenance"))
        store_ticker.note_message()
        await asyncio.sleep(6)
        store_ticker.stop()
    assert ticks == pytest.approx([0.1, 1.1, 3.1, 5.1])
    assert caplog.text.count("store maintenance failed") == 2


@virtual_time()
async def test_a_message_that_a_tick_makes_readable_starts_no_second_timer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timers that are never stopped would tick a closed store."""
    loop, ticks = virtual_loop(), list[float]()

    def tick() -> None:
        ticks.append(round(loop.time(), 1))
        store_ticker.note_message()

    with Store.open(
        tmp_path, StoreConfig(flush=FLUSH), machine=virtual_machine(REAL_FILES)
    ) as store:
        monkeypatch.setattr(store, "tick", tick)
        store_ticker = StoreTicker(store, loop.clock, Supervisor().watch("store maintenance"))
        store_ticker.note_message()
        await asyncio.sleep(0.45)
        store_ticker.stop()
        await asyncio.sleep(60)
    assert ticks == pytest.approx([0.1, 0.2, 0.3, 0.4])
