"""What is repeated: its pauses, what fails, and what stopping leaves."""

from __future__ import annotations

import asyncio

import pytest

from turbopump.broker.periodic import Periodic
from turbopump.testing import virtual_loop, virtual_time


@virtual_time()
async def test_the_pause_begins_when_an_action_is_done() -> None:
    times: list[float] = []

    async def act() -> None:
        times.append(virtual_loop().time())
        await asyncio.sleep(1)

    periodic = Periodic()
    periodic.every(5000, act, first_ms=500)
    periodic.every(5000, lambda: times.append(-virtual_loop().time()))
    await asyncio.sleep(13)
    await periodic.stop()
    assert times == pytest.approx([0.5, -5, 6.5, -10, 12.5], abs=1e-6)
    await asyncio.sleep(60)
    assert len(times) == 5, "stopped, one of them in the middle"


@virtual_time()
async def test_failures_are_logged_and_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    tries: list[str] = []

    def fail() -> None:
        tries.append("plain")
        raise LookupError("once more")

    async def fail_later() -> None:
        await asyncio.sleep(0)
        tries.append("later")
        raise LookupError("once more")

    periodic = Periodic()
    periodic.every(1000, fail)
    periodic.every(1000, fail_later)
    await asyncio.sleep(2.5)
    await periodic.stop()
    assert tries == ["plain", "later"] * 2
    assert caplog.text.count("fail_later failed") == 2


@virtual_time()
async def test_an_interval_that_cannot_be_found_out_stays_and_stops_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known_ms = [1000, 2000]
    done: list[tuple[str, float]] = []

    def unknown() -> int:
        raise LookupError("no such setting")

    async def later() -> None:
        done.append(("later", virtual_loop().time()))

    periodic = Periodic()
    periodic.every(lambda: known_ms.pop(0), lambda: done.append(("odd", virtual_loop().time())))
    periodic.every(unknown, later, first_ms=3000)
    periodic.every(1000, lambda: done.append(("even", virtual_loop().time())))
    await asyncio.sleep(7.5)
    await periodic.stop()
    assert [round(time) for name, time in done if name == "odd"] == [1, 3, 5, 7]
    assert [round(time) for name, time in done if name == "later"] == [3, 6]
    assert [round(time) for name, time in done if name == "even"] == list(range(1, 8))
    assert "its pause stays at 2000 ms" in caplog.text
    assert "its pause stays at 3000 ms" in caplog.text


@virtual_time()
async def test_an_interval_may_change_meanwhile() -> None:
    pause_ms = 1000
    times: list[float] = []
    periodic = Periodic()
    periodic.every(lambda: pause_ms, lambda: times.append(virtual_loop().time()))
    await asyncio.sleep(1.5)
    pause_ms = 10_000
    await asyncio.sleep(20)
    await periodic.stop()
    assert times == pytest.approx([1, 2, 12], abs=1e-6)


@virtual_time()
async def test_what_is_due_together_is_done_in_one_turn() -> None:
    loop, done = virtual_loop(), []
    periodic = Periodic()
    await asyncio.sleep(0.0123)
    for interval_ms in (5000, 5000, 10_000):
        periodic.every(interval_ms, lambda: done.append(loop.time()))
    timers = loop.timers_set
    await asyncio.sleep(60)
    await periodic.stop()
    assert len(done) == 11 + 11 + 5
    assert all(round(time * 1000) % 50 == 0 for time in done), "late by up to 50 ms, never early"
    assert loop.timers_set - timers <= 13
