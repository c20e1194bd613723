"""Requests that arrive in one chunk are stored with one write, and acknowledged one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from brokers import (
    BROKER_HOST,
    SMALL_STORE,
    SYNC_STORE,
    StuckDisk,
    running_broker,
    send_header,
    shut_gate,
    stuck_disk,
)
from netkit import RawPeer
from turbopump.broker.config import OverloadConfig
from turbopump.broker.durability import Durability
from turbopump.errors import WriteFailed
from turbopump.store.config import StoreConfig
from turbopump.testing import MemoryNetwork, virtual_time, wait_until
from turbopump.wire.bodies import GroupConfig
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request
from turbopump.wire.framing import FrameDecoder, encode
from turbopump.wire.headers import SendBack
from turbopump.wire.record import MessageView

COUNT = 6

Make = Callable[[MessageView, int], Command]


def send(_: MessageView, number: int, **named: str) -> Command:
    header = send_header(queue_id=number % 2, named=named)
    return request(RequestCode.SEND_MESSAGE_V2, header, b"%d" % number)


def send_back(failed: MessageView, _: int) -> Command:
    header = SendBack(offset=failed.physical_offset, group="g", delay_level=0, origin_topic="T")
    return request(RequestCode.CONSUMER_SEND_MSG_BACK, header)


MAKE: dict[str, Make] = {
    "sends": send,
    "send-backs": send_back,
    "both": lambda failed, number: (send, send_back)[number % 2](failed, number),
}


class Pipeline:
    """A peer that writes several requests in one chunk."""

    def __init__(self, peer: RawPeer) -> None:
        self._peer = peer

    def write(self, make: Make, failed: MessageView, count: int = COUNT) -> None:
        self._peer.received = b""
        requests = [replace(make(failed, number), opaque=number + 1) for number in range(count)]
        self._peer.transport.write(b"".join(bytes(encode(each)) for each in requests))

    @property
    def answers(self) -> dict[int, Command]:
        """The answers to the last chunk, by number."""
        return {each.opaque - 1: each for each in FrameDecoder().feed(bytes(self._peer.received))}

    @property
    def codes(self) -> list[int]:
        return [answer.code for answer in self.answers.values()]


@pytest.fixture
def bursts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of all bursts that pass the gate; the first is that of `burst_test`."""
    sizes: list[int] = []
    right = Durability.acknowledge_all

    def noted(self: Durability, appended: Any, pending: Any) -> None:
        sizes.append(len(pending))
        right(self, appended, pending)

    monkeypatch.setattr(Durability, "acknowledge_all", noted)
    return sizes


def burst_test(
    directory: Path,
    test: Callable[..., Any],
    store: StoreConfig = SYNC_STORE,
    **changes: Any,
) -> None:
    """Run a test with a broker, a pipeline, a failed message and a stuck disk."""

    @virtual_time()
    async def run(disk: StuckDisk) -> None:
        network = MemoryNetwork()
        async with running_broker(directory, network, store=store, **changes) as (broker, client):
            await broker.state.groups.update(GroupConfig(group_name="g"))
            sending = asyncio.create_task(client.send(b"fails"))
            if store is SYNC_STORE:
                await wait_until(lambda: len(broker.path.durability) == 1)
                disk.flush(broker.store)
            await sending
            [failed] = await client.messages()
            peer = await network.host("10.0.0.8").connect(BROKER_HOST, 10911, RawPeer)
            await test(broker, Pipeline(peer), failed, disk)
            peer.transport.close()

    with stuck_disk() as disk:
        run(disk)


@pytest.mark.parametrize("what", MAKE)
def test_nothing_is_acknowledged_before_the_flush(
    tmp_path: Path, what: str, bursts: list[int]
) -> None:
    async def test(broker: Any, pipeline: Pipeline, failed: MessageView, disk: StuckDisk) -> None:
        pipeline.write(MAKE[what], failed)
        await wait_until(lambda: len(broker.path.durability) == COUNT)
        await asyncio.sleep(1)
        assert not pipeline.answers
        disk.flush(broker.store)
        await asyncio.sleep(1)
        assert pipeline.codes == [ResponseCode.SUCCESS] * COUNT
        assert bursts == [1, COUNT]

    burst_test(tmp_path, test)


@pytest.mark.parametrize("what", MAKE)
def test_all_fail_if_the_flush_fails(tmp_path: Path, what: str, bursts: list[int]) -> None:
    async def test(broker: Any, pipeline: Pipeline, failed: MessageView, disk: StuckDisk) -> None:
        pipeline.write(MAKE[what], failed)
        await wait_until(lambda: len(broker.path.durability) == COUNT)
        disk.flushes[-1].set_exception(WriteFailed("the disk said no"))
        await asyncio.sleep(1)
        assert pipeline.codes == [ResponseCode.SERVICE_NOT_AVAILABLE] * COUNT
        assert all("the disk said no" in (each.remark or "") for each in pipeline.answers.values())
        assert bursts == [1, COUNT]

    burst_test(tmp_path, test)


def test_a_slow_flush_is_not_a_success(tmp_path: Path, bursts: list[int]) -> None:
    async def test(broker: Any, pipeline: Pipeline, failed: MessageView, disk: StuckDisk) -> None:
        pipeline.write(MAKE["both"], failed)
        await asyncio.sleep(2)
        # Senders get a stored status; consumers must not commit what may still be lost.
        late = [ResponseCode.FLUSH_DISK_TIMEOUT, ResponseCode.SYSTEM_ERROR]
        codes = {number: answer.code for number, answer in pipeline.answers.items()}
        assert codes == {number: late[number % 2] for number in range(COUNT)}
        assert bursts == [1, COUNT]
        disk.flush(broker.store)

    burst_test(tmp_path, test, overload=OverloadConfig(sync_flush_timeout_ms=1000))


def test_only_sends_that_do_not_wait_for_the_disk_are_answered_immediately(
    tmp_path: Path, bursts: list[int]
) -> None:
    def make(failed: MessageView, number: int) -> Command:
        return send(failed, number, WAIT="false" if number % 2 else "true")

    async def test(broker: Any, pipeline: Pipeline, failed: MessageView, disk: StuckDisk) -> None:
        pipeline.write(make, failed)
        await asyncio.sleep(1)
        assert sorted(pipeline.answers) == [1, 3, 5]
        assert pipeline.codes == [ResponseCode.SUCCESS] * 3
        disk.flush(broker.store)
        await asyncio.sleep(1)
        assert pipeline.codes == [ResponseCode.SUCCESS] * COUNT
        assert bursts == [1, COUNT]

    burst_test(tmp_path, test)


def test_a_large_burst_is_acknowledged_together(tmp_path: Path, bursts: list[int]) -> None:
    async def test(broker: Any, pipeline: Pipeline, failed: MessageView, disk: StuckDisk) -> None:
        pipeline.write(send, failed, count=100)
        await wait_until(lambda: len(broker.path.durability) == 100)
        assert not pipeline.answers
        disk.flush(broker.store)
        await asyncio.sleep(1)
        assert pipeline.codes == [ResponseCode.SUCCESS] * 100
        assert bursts == [1, 100]

    burst_test(tmp_path, test)


@pytest.mark.parametrize("store", [SMALL_STORE, SYNC_STORE], ids=["ASYNC_FLUSH", "SYNC_FLUSH"])
@pytest.mark.parametrize("what", MAKE)
def test_a_shut_gate_lets_no_success_of_a_burst_through(
    tmp_path: Path, what: str, store: StoreConfig
) -> None:
    async def test(broker: Any, pipeline: Pipeline, failed: MessageView, disk: StuckDisk) -> None:
        stored = broker.store.written_end
        with shut_gate():
            pipeline.write(MAKE[what], failed)
            await asyncio.sleep(1)
        assert broker.store.written_end > stored, "stored, but no sender was notified"
        if store is SYNC_STORE:
            disk.flush(broker.store)
        await asyncio.sleep(10)
        assert not pipeline.answers

    burst_test(tmp_path, test, store)
