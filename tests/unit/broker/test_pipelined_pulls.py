"""Pulls that arrive in one chunk are answered like those that arrive one by one."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from functools import partialmethod
from pathlib import Path

import pytest
from msgspec.structs import replace

from brokers import BROKER_HOST, running_broker
from netkit import RawPeer
from turbopump.broker.broker import Broker
from turbopump.net.router import Router
from turbopump.testing import LinkQuality, MemoryNetwork, virtual_time
from turbopump.wire.bodies import GroupConfig
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import FLAG_ONEWAY, Command, Serialize, request
from turbopump.wire.framing import FrameDecoder, encode
from turbopump.wire.headers import PullMessage, PullMessageAnswer
from turbopump.wire.sysflag import PULL_COMMIT_OFFSET, PULL_SUBSCRIPTION

HEADER = PullMessage(
    consumer_group="g",
    topic="T",
    queue_id=0,
    queue_offset=0,
    max_msg_nums=3,
    sys_flag=PULL_SUBSCRIPTION,
    commit_offset=0,
    suspend_timeout_millis=0,
    subscription="*",
    sub_version=0,
)


def pulls(*offsets: int, first: int = 100, **changes: object) -> list[Command]:
    """Return requests for messages from some offsets on."""
    return [
        replace(
            request(
                RequestCode.PULL_MESSAGE,
                replace(HEADER, **{"queue_offset": offset, **changes}),
            ),
            opaque=first + number,
        )
        for number, offset in enumerate(offsets)
    ]


async def answers(network: MemoryNetwork, chunks: Sequence[bytes]) -> bytes:
    """Return all responses to some chunks."""
    peer = await network.host("10.0.0.8").connect(BROKER_HOST, 10911, RawPeer)
    for chunk in chunks:
        peer.transport.write(chunk)
        await asyncio.sleep(1)
    peer.transport.close()
    return peer.received


def read(received: bytes) -> list[Command]:
    return list(FrameDecoder().feed(received))


def following(command: Command) -> int:
    return PullMessageAnswer.from_ext_fields(command.ext_fields).next_begin_offset


CASES: dict[str, list[Command]] = {
    "one after the other": pulls(0, 3, 6, 9),
    "from anywhere": pulls(5, 1, 5, 8, 2, 0),
    "up to the end": pulls(0, 3, 6, 9, 12, 15, 18, 21),
    "up to the last": pulls(2, 4, 6, 8, max_msg_nums=2),
    "before the first": pulls(1, -1, 2, -9, 3),
    "none at a time": pulls(0, 1, 2, max_msg_nums=0),
    "less than none": pulls(0, 1, 2, max_msg_nums=-1),
    "as many as there may be": pulls(0, 1, 2, 3, max_msg_nums=1000),
    "more than there may be": pulls(0, 1, 2, max_msg_nums=99, bulk_pull=True),
    "of other queues": pulls(0) + pulls(0, queue_id=1) + pulls(3),
    "of none": pulls(0, 3, queue_id=9),
    "with tags": pulls(0, 3, 6, subscription="a"),
    "with offsets to commit": pulls(0, 3, 6, sys_flag=PULL_SUBSCRIPTION | PULL_COMMIT_OFFSET),
    "with numbers that get longer": pulls(0, 3, 6, 9, first=98),
    "as others write them": [
        replace(each, serialize=Serialize.ROCKETMQ) for each in pulls(0, 3, 6)
    ],
    "that nobody waits for": [replace(each, flag=FLAG_ONEWAY) for each in pulls(0, 3, 6)],
    "among others": [
        *pulls(0, 3),
        Command(RequestCode.GET_BROKER_CONFIG, opaque=7),
        *pulls(0, 3, 6),
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_answers_are_the_same_as_one_by_one(tmp_path: Path, name: str) -> None:
    asked = CASES[name]

    @virtual_time()
    async def main() -> None:
        network = MemoryNetwork(LinkQuality(cut_chance=0))
        async with running_broker(tmp_path, network) as (broker, client):
            for number in range(10):
                await client.send(named={"TAGS": "ab"[number % 2]})
                await client.send(queue_id=1)
            frames = [encode(each) for each in asked]
            one_by_one = await answers(network, frames)
            counted = totals(broker)
            together = await answers(network, [b"".join(frames)])
            assert together == one_by_one
            assert totals(broker) == tuple(2 * each for each in counted)
            in_two = await answers(network, [b"".join(frames)[:-100], b"".join(frames)[-100:]])
            assert in_two == one_by_one

    main()


@virtual_time()
async def test_hooks_see_each_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Seeing:
        def before_request(self, address: str, command: Command) -> Command:
            return command

        def after_response(self, address: str, request: Command, response: Command) -> None:
            seen.append(response.opaque)

    network = MemoryNetwork(LinkQuality(cut_chance=0))
    monkeypatch.setattr(Router, "__init__", partialmethod(Router.__init__, hooks=(Seeing(),)))
    async with running_broker(tmp_path, network) as (_, client):
        for _ in range(10):
            await client.send()
        seen.clear()
        found = read(await answers(network, [b"".join(map(encode, pulls(0, 3, 6)))]))
        assert seen == [each.opaque for each in found] == [100, 101, 102]


@virtual_time()
async def test_numbers_of_any_length_are_answered_once(tmp_path: Path) -> None:
    network = MemoryNetwork(LinkQuality(cut_chance=0))
    async with running_broker(tmp_path, network) as (_, client):
        for _ in range(10):
            await client.send()
        fields = b'"extFields":{'
        longer = fields + b'"queueOffset":"' + b"1" * 5000 + b'",'
        headers = [encode(each)[8:].replace(fields, longer) for each in pulls(0, 3)]
        frames = [struct.pack(">ii", len(each) + 4, len(each)) + each for each in headers]
        found = read(await answers(network, [b"".join(frames)]))
        assert [(each.opaque, each.code, following(each)) for each in found] == [
            (100, ResponseCode.SUCCESS, 3),
            (101, ResponseCode.SUCCESS, 6),
        ]


def totals(broker: Broker) -> tuple[int, int, int]:
    gets = broker.state.stats.gets
    return gets.messages, gets.bytes, gets.times


@pytest.mark.parametrize("change", ["group", "topic"])
def test_changes_apply_to_the_next_chunk(tmp_path: Path, change: str) -> None:
    @virtual_time()
    async def main() -> None:
        network = MemoryNetwork(LinkQuality(cut_chance=0))
        async with running_broker(tmp_path, network) as (broker, client):
            for _ in range(10):
                await client.send()
            peer = await network.host("10.0.0.8").connect(BROKER_HOST, 10911, RawPeer)
            chunk = b"".join(encode(each) for each in pulls(0, 3, 6))
            peer.transport.write(chunk)
            await asyncio.sleep(1)
            if change == "group":
                await broker.state.groups.update(GroupConfig(group_name="g", consume_enable=False))
            else:
                await broker.state.topics.delete("T")
            peer.transport.write(chunk)
            await asyncio.sleep(1)
            refused = {"group": ResponseCode.NO_PERMISSION, "topic": ResponseCode.TOPIC_NOT_EXIST}
            codes = [each.code for each in read(peer.received)]
            assert codes == [ResponseCode.SUCCESS] * 3 + [refused[change]] * 3
            peer.transport.close()

    main()


@virtual_time()
async def test_a_client_that_does_not_read_gets_no_more_than_there_is_room_for(
    tmp_path: Path,
) -> None:
    network = MemoryNetwork(LinkQuality(cut_chance=0))
    async with running_broker(tmp_path, network) as (broker, client):
        for _ in range(9):
            await client.send(bytes(30_000))
        peer = await network.host("10.0.0.8").connect(BROKER_HOST, 10911, RawPeer)
        peer.transport.pause_reading()
        asked = pulls(*[0, 3, 6] * 10)
        peer.transport.write(b"".join(encode(each) for each in asked))
        await asyncio.sleep(10)
        (accepted,) = (each for each in broker.connections if "10.0.0.8" in each.peer_address)
        assert 256 * 1024 <= accepted.unwritten_bytes < 600 * 1024
        peer.transport.resume_reading()
        await asyncio.sleep(10)
        assert [each.opaque for each in read(peer.received)] == [each.opaque for each in asked]
        peer.transport.close()
