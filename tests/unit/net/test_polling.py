"""Polling for requests instead of sleeping: only while they follow each other closely."""

from __future__ import annotations

import asyncio
import os

import pytest

from turbopump.clock import SYSTEM_CLOCK
from turbopump.net.polling import BusyPoller, busy_poller
from turbopump.testing import virtual_loop, virtual_time

POLL_NS = 100_000
SOON_NS = 80_000
CREDIT = 64


class Requests:
    """Requests at given times, and a thread that is preempted on demand."""

    def __init__(self) -> None:
        self.now_ns = 10**12
        self.preempted = 7
        self.polling = BusyPoller(POLL_NS, lambda: self.now_ns, lambda: self.preempted)

    def serve(self, after_ns: int, requests: int = 1) -> None:
        """Let requests arrive n ms after the last ones."""
        self.now_ns += after_ns
        self.polling.served(requests)

    async def look(self, after_ns: int = 1000) -> bool:
        """Run one loop iteration; return whether it continues to poll."""
        self.now_ns += after_ns
        await asyncio.sleep(0)
        return self.polling.is_polling

    async def stream(self, count: int = 2) -> None:
        """Let requests follow each other closely, with some polls between them."""
        for _ in range(count):
            self.serve(SOON_NS // 2)
            await self.look(SOON_NS // 2)


@virtual_time()
async def test_infrequent_requests_are_not_polled_for() -> None:
    requests = Requests()
    for _ in range(3 * CREDIT):
        requests.serve(5_000_000)
        assert not requests.polling.is_polling


@virtual_time()
async def test_a_request_close_after_another_starts_polling_for_the_next() -> None:
    requests = Requests()
    requests.serve(5_000_000)
    requests.serve(SOON_NS)
    assert requests.polling.is_polling
    for _ in range(10):
        assert await requests.look(POLL_NS // 10)
    assert not await requests.look(1), "the time has passed"
    assert not await requests.look()


@virtual_time()
async def test_polling_lasts_from_the_latest_request() -> None:
    requests = Requests()
    await requests.stream(1000)
    assert requests.polling.is_polling
    assert await requests.look(POLL_NS - SOON_NS // 2)
    assert not await requests.look()


@virtual_time()
async def test_at_most_one_poll_in_64_close_requests_misses() -> None:
    requests = Requests()
    vain = close = 0
    for _ in range(100):
        # Pairs, each followed by a pause: polling never pays.
        requests.serve(5_000_000)
        requests.serve(SOON_NS)
        close += 1
        if requests.polling.is_polling:
            vain += 1
            assert not await requests.look(POLL_NS + 1)
    assert vain == 1 + (close - 1) // CREDIT


@virtual_time()
async def test_the_end_of_a_long_stream_costs_one_missed_poll_only() -> None:
    requests = Requests()
    await requests.stream(10 * CREDIT)
    assert not await requests.look(POLL_NS)
    await requests.stream(2)
    assert requests.polling.is_polling, "it has paid off before"


@virtual_time()
async def test_requests_that_arrive_together_need_no_polls() -> None:
    requests = Requests()
    for _ in range(2 * CREDIT):
        requests.serve(SOON_NS, requests=2)
        assert not requests.polling.is_polling
    await requests.stream()
    requests.serve(SOON_NS // 2, requests=2)
    assert not await requests.look(), "and ends them"


@virtual_time()
async def test_a_contended_processor_is_yielded_for_a_while() -> None:
    requests = Requests()
    await requests.stream(CREDIT)
    requests.serve(1000)
    requests.preempted += 1
    assert not await requests.look(1_000_000), "the poll took a millisecond"
    await requests.stream(CREDIT)
    assert not requests.polling.is_polling, "requests arrive soon, but other processes are busy"
    requests.now_ns += 100_000_000
    await requests.stream()
    assert requests.polling.is_polling


@virtual_time()
async def test_repeated_contention_yields_the_processor_longer() -> None:
    requests = Requests()

    async def rest_ms() -> int:
        """Take the processor, and return for how long it is yielded to others."""
        await requests.stream()
        requests.preempted += 1
        assert not await requests.look(1_000_000)
        since_ns = requests.now_ns
        while not requests.polling.is_polling:
            requests.now_ns += 10_000_000
            await requests.stream(1)
        return (requests.now_ns - since_ns) // 10_000_000 * 10

    await requests.stream(CREDIT)
    assert [await rest_ms() for _ in range(4)] == [100, 200, 400, 400]
    await requests.stream(1000)
    assert await rest_ms() == 100, "no other process needed it for a while"


@virtual_time()
async def test_a_long_loop_iteration_does_not_count_as_contention() -> None:
    requests = Requests()
    await requests.stream(CREDIT)
    requests.serve(1_000_000)
    assert await requests.look()


@virtual_time()
async def test_polling_does_not_delay_senders_that_need_this_processor() -> None:
    requests = Requests()
    looked = 0
    for _ in range(CREDIT):
        await requests.stream(1)
        requests.preempted += 1
        looked += requests.polling.is_polling
    assert 0 < looked <= CREDIT // 2, "found, but only after the sender had taken the processor"
    requests.now_ns += 100_000_000
    await requests.stream()
    assert requests.polling.is_polling, "the sender may be on another one by now"


@virtual_time()
async def test_there_is_no_polling_where_it_cannot_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert busy_poller(100, SYSTEM_CLOCK) is not None
    assert busy_poller(0, SYSTEM_CLOCK) is None
    assert busy_poller(100, virtual_loop().clock) is None
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1})
    assert busy_poller(100, SYSTEM_CLOCK) is None
