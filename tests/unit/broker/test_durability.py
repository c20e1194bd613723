"""The gate of acknowledgements: which waiters are notified when, and an unresponsive disk."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from appending import append
from brokers import SMALL_STORE
from store_work import sync_log
from turbopump.broker.config import OverloadConfig
from turbopump.broker.durability import Durability, Late, Outcome, Promise, Report
from turbopump.errors import RemoteError, WriteFailed
from turbopump.machine.files import REAL_FILES
from turbopump.net.deadlines import Deadlines
from turbopump.store.config import FlushConfig, FlushMode
from turbopump.store.outcomes import Appended
from turbopump.store.store import Store
from turbopump.testing import virtual_loop, virtual_machine, virtual_time
from turbopump.wire.codes import ResponseCode
from unit.store.support import record

ALL = (Promise.WRITTEN, Promise.DURABLE, Promise.DURABLE_EVENTUALLY)


class Gate:
    """A gate in front of a store whose flushes a test completes."""

    def __init__(self, store: Store, limits: OverloadConfig) -> None:
        self.store = store
        self.flush: Future[None] = Future()
        self.gate = Durability(store, Deadlines(virtual_loop().clock), limits)
        self.outcomes: list[tuple[Outcome, Promise]] = []

    def store_one(self, promise: Promise) -> Appended:
        with patch.object(self.store._flusher, "join", lambda: self.flush):
            appended = append(self.store, [record(b"body")])
        self.gate.acknowledge(appended, Report(promise, partial(self._note, promise)))
        return appended

    def _note(self, promise: Promise, outcome: Outcome) -> None:
        self.outcomes.append((outcome, promise))

    @property
    def notified(self) -> list[Promise]:
        return [promise for _, promise in self.outcomes]

    @property
    def readable(self) -> int:
        return self.store.queue_range("Topic", 0)[1]


@contextmanager
def gate(
    directory: Path, mode: FlushMode = FlushMode.SYNC, sends_max: int = 10, bytes_max: int = 2**20
) -> Iterator[Gate]:
    config = replace(SMALL_STORE, flush=FlushConfig(mode=mode))
    with Store.open(directory, config, machine=virtual_machine(REAL_FILES)) as store:
        limits = OverloadConfig(sends_waiting_max=sends_max, unflushed_bytes_max=bytes_max)
        yield Gate(store, limits)


@virtual_time()
async def test_asynchronous_flush_makes_no_sender_wait(tmp_path: Path) -> None:
    with gate(tmp_path, FlushMode.ASYNC, sends_max=1, bytes_max=1) as at:
        for promise in ALL:
            at.store_one(promise)
        assert at.notified == list(ALL)
        assert all(isinstance(outcome, Appended) for outcome, _ in at.outcomes)
        assert len(at.gate) == 0
        assert at.gate.busy() is None, "the page cache is the kernel's to bound"


@virtual_time()
async def test_with_synchronous_flush_every_waiter_is_notified_once_when_readable(
    tmp_path: Path,
) -> None:
    with gate(tmp_path) as at:
        for promise in ALL:
            at.store_one(promise)
        assert at.notified == [Promise.WRITTEN]
        assert (len(at.gate), at.readable) == (3, 0)
        sync_log(at.store)
        at.flush.set_result(None)
        await asyncio.sleep(10)
        assert at.notified == list(ALL)
        assert all(isinstance(outcome, Appended) for outcome, _ in at.outcomes)
        assert (len(at.gate), at.readable) == (0, 3)


@virtual_time()
async def test_a_failing_answer_does_not_block_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Outcome) -> None:
        raise RuntimeError("a bug")

    with gate(tmp_path) as at:
        broken = at.store_one(Promise.WRITTEN)
        at.gate.acknowledge(broken, Report(Promise.DURABLE, fail))
        at.store_one(Promise.DURABLE)
        at.flush.set_result(None)
        await at.gate.settle(10_000)
        assert at.notified == [Promise.WRITTEN, Promise.DURABLE]
    assert "RuntimeError: a bug" in caplog.text


@pytest.mark.parametrize("fails_before", [False, True])
@virtual_time()
async def test_a_failed_flush_is_an_error_for_every_waiter(
    tmp_path: Path, fails_before: bool
) -> None:
    with gate(tmp_path) as at:
        if fails_before:
            at.flush.set_exception(WriteFailed("the disk said no"))
        at.store_one(Promise.DURABLE)
        at.store_one(Promise.DURABLE_EVENTUALLY)
        if not fails_before:
            at.flush.set_exception(WriteFailed("the disk said no"))
        await asyncio.sleep(10)
        assert at.notified == [Promise.DURABLE, Promise.DURABLE_EVENTUALLY]
        for outcome, _ in at.outcomes:
            assert isinstance(outcome, RemoteError)
            assert outcome.code == ResponseCode.SERVICE_NOT_AVAILABLE
            assert "not stored: the disk said no" in outcome.remark
        assert at.readable == 0


@virtual_time()
async def test_a_slow_flush_times_out_only_for_peers_and_stays_unflushed(tmp_path: Path) -> None:
    with gate(tmp_path, sends_max=2) as at:
        stored = at.store_one(Promise.DURABLE)
        at.store_one(Promise.DURABLE_EVENTUALLY)
        await asyncio.sleep(4.99)
        assert not at.notified
        await asyncio.sleep(0.2)
        [(late, _)] = at.outcomes
        assert isinstance(late, Late)
        assert (late.code, late.appended) == (ResponseCode.FLUSH_DISK_TIMEOUT, stored)
        busy = at.gate.busy()
        assert busy is not None, "as unflushed as before"
        assert busy.code == ResponseCode.SYSTEM_BUSY
        sync_log(at.store)
        at.flush.set_result(None)
        await asyncio.sleep(1)
        assert at.notified == [Promise.DURABLE, Promise.DURABLE_EVENTUALLY]
        assert at.readable == 2, "still readable, once it is on disk"
        assert at.gate.busy() is None


@pytest.mark.parametrize("promise", ALL)
@virtual_time()
async def test_unflushed_messages_are_bounded_whatever_their_guarantee(
    tmp_path: Path, promise: Promise
) -> None:
    with gate(tmp_path / "count", sends_max=2) as at:
        at.store_one(promise)
        assert at.gate.busy() is None
        at.store_one(promise)
        assert at.gate.busy() is not None
    with gate(tmp_path / "bytes", bytes_max=100) as at:
        at.store_one(promise)
        busy = at.gate.busy()
        assert busy is not None
        assert "[OVERLOAD]1 messages of " in busy.remark
