"""Background work of a client continues after an unexpected error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusters import Recorder, cluster
from consumers import Seen, committed, consuming, send
from turbopump.client import puller
from turbopump.client.lite_pull_consumer import LitePullConsumer
from turbopump.client.offsets import RemoteOffsets
from turbopump.client.queue_locks import QueueLocks
from turbopump.client.queue_reader import QueueReader
from turbopump.client.rebalance import Rebalancer
from turbopump.client.session import Session
from turbopump.message import MessageQueue
from turbopump.testing import virtual_time, wait_until
from turbopump.wire.codes import RequestCode

QUEUE = MessageQueue("T", "a", 0)


class Bug:
    """Makes a function fail for some calls, once enabled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.calls_left = 0
        self._own: Callable[..., Any] = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: self._call(*args, **kwargs))

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if self.calls_left:
            self.calls_left -= 1
            raise LookupError("a bug")
        return self._own(*args, **kwargs)


@virtual_time()
async def test_offsets_are_committed_after_a_bug_in_committing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bug = Bug(monkeypatch, RemoteOffsets, "persist")
    async with cluster(tmp_path) as world:
        await send(world, [b"1"], to=QUEUE)
        seen = Seen()
        async with consuming(world, seen):
            bug.calls_left = 2
            await wait_until(lambda: seen.count == 1)
            await wait_until(lambda: bug.calls_left == 0, 60)
            await wait_until(lambda: world.brokers["a"].state.offsets.find("g", "T", 0) == 1, 60)
    assert caplog.text.count("offset commits failed") == 2


@virtual_time()
async def test_heartbeats_continue_after_a_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bug, recorder = Bug(monkeypatch, Session, "heartbeat"), Recorder()
    async with cluster(tmp_path) as world:
        await send(world, [b"1"], to=QUEUE)
        async with consuming(world, Seen(), session=world.session(hooks=[recorder])):
            bug.calls_left = 1
            await wait_until(lambda: bug.calls_left == 0, 60)
            known = len(recorder.of(RequestCode.HEART_BEAT))
            await wait_until(lambda: len(recorder.of(RequestCode.HEART_BEAT)) > known, 60)
    assert "heartbeat failed and is started again" in caplog.text


@virtual_time()
async def test_rebalancing_continues_after_a_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bug = Bug(monkeypatch, Rebalancer, "balance")
    async with cluster(tmp_path) as world:
        seen = Seen()
        async with consuming(world, seen):
            bug.calls_left = 1
            await send(world, [b"1"])
            await wait_until(lambda: seen.count == 1, 60)
    assert "rebalance failed and is started again" in caplog.text


@virtual_time()
async def test_a_bug_in_pulling_skips_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bug = Bug(monkeypatch, puller, "matching")
    async with cluster(tmp_path) as world:
        await send(world, [b"1", b"2"], to=QUEUE)
        seen = Seen()
        bug.calls_left = 2
        async with consuming(world, seen):
            await wait_until(lambda: seen.count == 2, 60)
        assert seen.bodies == [b"1", b"2"]
        assert await committed(world) == 2
    assert caplog.text.count(f"pull of {QUEUE} failed") == 2


@virtual_time()
async def test_an_orderly_queue_continues_after_a_bug_in_locking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = Bug(monkeypatch, QueueLocks, "renew")
    async with cluster(tmp_path) as world:
        await send(world, [b"1"], to=QUEUE)
        seen = Seen()
        async with consuming(world, seen, orderly=True):
            await wait_until(lambda: seen.count == 1, 60)
            bug.calls_left = 4
            await wait_until(lambda: bug.calls_left == 0, 120)
            await send(world, [b"2"], to=QUEUE)
            await wait_until(lambda: seen.count == 2, 120)


@virtual_time()
async def test_prefetching_continues_after_a_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = Bug(monkeypatch, QueueReader, "pull")
    async with cluster(tmp_path) as world:
        await send(world, [b"1"], to=QUEUE)
        session = world.session()
        async with LitePullConsumer("g", session=session, start_from="first") as consumer:
            bug.calls_left = 4
            await consumer.subscribe("T")
            (message,) = await consumer.poll(timeout=60)
    assert message.body == b"1"
