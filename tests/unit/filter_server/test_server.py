"""A filter server beside a broker, in virtual time: uploads, and pulls through filters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from brokers import Client, client_of, pulled, running_broker, views
from plain_filters import PlainSandbox, filter_server, plain_filters
from turbopump.broker.broker import Broker
from turbopump.broker.config import FiltersConfig
from turbopump.filter_server import pulls, uploads
from turbopump.filter_server.sandbox import FilterStopped, Sandbox
from turbopump.filter_server.server import FilterServer
from turbopump.filters.code import SOURCE_BYTES_MAX
from turbopump.filters.server_config import CodeLimits
from turbopump.testing import MemoryNetwork, virtual_loop, virtual_time
from turbopump.wire.bodies import ConsumerData, Heartbeat
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command
from turbopump.wire.hashing import body_crc
from turbopump.wire.headers import ConsumerGroup, RegisterFilterClass
from turbopump.wire.sysflag import PULL_CLASS_FILTER, PULL_SUBSCRIPTION, PULL_SUSPEND

FILTERS = FiltersConfig(servers=1)
EVEN = "def matches(message): return int(message.body) % 2 == 0"
NOTHING = "def matches(message): return False"


@pytest.fixture(autouse=True)
def in_process() -> Iterator[None]:
    with plain_filters():
        yield


class World:
    """A broker, a filter server, and a client of each."""

    def __init__(
        self,
        network: MemoryNetwork,
        broker: Broker,
        client: Client,
        server: FilterServer,
        own: Client,
    ) -> None:
        self.network = network
        self.broker = broker
        self.client = client
        self.server = server
        self._own = own

    async def join(self) -> None:
        """Make the clients' host that of a member of the group."""
        data = ConsumerData(group_name="g", subscription_data_set=[])
        beat = Heartbeat(client_id="c", consumer_data_set=[data])
        await self.client.ask(RequestCode.HEART_BEAT, body=beat.encode())

    async def upload(
        self, source: str | bytes, group: str = "g", topic: str = "T", name: str = "f", **wrong: Any
    ) -> Command:
        data = source if isinstance(source, bytes) else source.encode()
        fields: dict[str, Any] = {"class_name": name, "class_crc": body_crc(data), **wrong}
        header = RegisterFilterClass(consumer_group=group, topic=topic, **fields)
        return await self._own.ask(RequestCode.REGISTER_MESSAGE_FILTER_CLASS, header, data)

    async def pull(
        self, offset: int = 0, name: str | None = "f", hold_ms: int = 0, **fields: Any
    ) -> Command:
        sys_flag = PULL_CLASS_FILTER | (PULL_SUBSCRIPTION if name else 0)
        if hold_ms:
            sys_flag |= PULL_SUSPEND
        return await self._own.pull(
            offset, tags=name or "", hold_ms=hold_ms, sys_flag=sys_flag, **fields
        )


@asynccontextmanager
async def world(directory: Path, **limits: Any) -> AsyncIterator[World]:
    network = MemoryNetwork()
    async with (
        running_broker(directory, network, filters=FILTERS) as (broker, client),
        filter_server(network, broker.address, **limits) as server,
        client_of(network, server.address) as own,
    ):
        it = World(network, broker, client, server, own)
        await it.join()
        yield it


def numbers(answer: Command) -> list[int]:
    return [int(view.body) for view in views(answer)]


async def send(client: Client, count: int) -> None:
    for number in range(count):
        await client.send(b"%d" % number)


# --- pulls ----------------------------------------------------------------------------------------


@virtual_time()
async def test_answers_with_the_stored_records_that_match(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await send(it.client, 5)
        assert (await it.upload(EVEN)).code == ResponseCode.SUCCESS
        answer = await it.pull()
        assert numbers(answer) == [0, 2, 4]
        whole = await it.client.pull()
        assert pulled(answer) == pulled(whole)
        stored = {view.queue_offset: view for view in views(whole)}
        for view in views(answer):
            other = stored[view.queue_offset]
            assert (view.size, view.physical_offset) == (other.size, other.physical_offset)


@virtual_time()
async def test_the_offset_moves_on_when_nothing_matches(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await send(it.client, 100)
        await it.upload(NOTHING)
        answer = await it.pull()
        assert answer.code == ResponseCode.PULL_NOT_FOUND
        assert pulled(answer).next_begin_offset == 100


@virtual_time()
async def test_a_slice_is_bounded_by_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulls, "SLICE_MESSAGES", 100)
    async with world(tmp_path) as it:
        await send(it.client, 300)
        await it.upload(NOTHING)
        answer = await it.pull(hold_ms=20_000)
        assert answer.code == ResponseCode.PULL_RETRY_IMMEDIATELY
        # 32 at first, then more and more at a time.
        assert pulled(answer).next_begin_offset == 32 + 128


@virtual_time()
async def test_a_slice_is_bounded_by_time(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await send(it.client, 200)
        slow = "def matches(message):\n    clock.advance_ns(20_000_000)\n    return False"
        await it.upload(slow)
        answer = await it.pull(max_msg_nums=32)
        assert answer.code == ResponseCode.PULL_RETRY_IMMEDIATELY
        # A batch of 64 after the first 32 goes beyond a second.
        assert pulled(answer).next_begin_offset == 32 + 64


@virtual_time()
async def test_no_more_messages_than_requested(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await send(it.client, 200)
        await it.upload("def matches(message): return int(message.body) >= 40")
        answer = await it.pull(max_msg_nums=10)
        assert numbers(answer) == list(range(40, 50))
        assert pulled(answer).next_begin_offset == 50


@virtual_time()
async def test_a_held_pull_waits_for_a_match(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await send(it.client, 1)
        await it.upload(EVEN)
        pull = asyncio.ensure_future(it.pull(1, hold_ms=15_000))
        await asyncio.sleep(2)
        await it.client.send(b"1")
        await asyncio.sleep(2)
        assert not pull.done()
        await it.client.send(b"2")
        answer = await pull
        assert numbers(answer) == [2]
        assert pulled(answer).next_begin_offset == 3


@pytest.mark.slow
@virtual_time()
async def test_many_waiting_pulls_of_one_client_do_not_block_other_requests(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as it:
        await send(it.client, 1)
        await it.upload(EVEN)
        waiting = [asyncio.ensure_future(it.pull(1, hold_ms=15_000)) for _ in range(1100)]
        await asyncio.sleep(1)
        assert numbers(await it.pull()) == [0]
        assert not any(pull.done() for pull in waiting)
        await asyncio.gather(*waiting)


@virtual_time()
async def test_a_held_pull_ends_at_its_deadline_after_unmatched_messages(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await send(it.client, 1)
        await it.upload(NOTHING)
        start_s = virtual_loop().time()
        pull = asyncio.ensure_future(it.pull(1, hold_ms=15_000))
        await asyncio.sleep(10)
        await it.client.send(b"1")
        answer = await pull
        assert answer.code == ResponseCode.PULL_NOT_FOUND
        assert pulled(answer).next_begin_offset == 2
        assert 14 <= virtual_loop().time() - start_s <= 16


@virtual_time()
async def test_an_exception_stops_the_queue_at_its_message(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        for body in (b"0", b"1", b"x", b"2"):
            await it.client.send(body)
        await it.upload(EVEN)
        answer = await it.pull()
        assert numbers(answer) == [0]
        assert pulled(answer).next_begin_offset == 2
        answer = await it.pull(1)
        assert answer.code == ResponseCode.PULL_RETRY_IMMEDIATELY
        assert pulled(answer).next_begin_offset == 2
        answer = await it.pull(2)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        text = "filter f of group g for topic T failed at offset 2 of queue 0: ValueError"
        assert text in str(answer.remark)
        assert numbers(await it.pull(3)) == [2]


@virtual_time()
async def test_damaged_messages_reach_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path) as it:
        await send(it.client, 4)
        await it.upload(NOTHING)
        intact = pulls._is_intact
        monkeypatch.setattr(pulls, "_is_intact", lambda m: intact(m) and m.queue_offset != 2)
        answer = await it.pull()
        assert numbers(answer) == [2]
        assert pulled(answer).next_begin_offset == 4


@virtual_time()
async def test_rejections_by_the_broker_reach_the_client(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await send(it.client, 1)
        await it.upload(EVEN)
        await it.upload(EVEN, topic="Unknown")
        answer = await it.pull(queue_id=77)
        assert "queueId[77] is illegal" in str(answer.remark)
        answer = await it.pull(topic="Unknown")
        assert answer.code == ResponseCode.TOPIC_NOT_EXIST
        answer = await it.pull(50)
        assert answer.code == ResponseCode.PULL_OFFSET_MOVED
        assert pulled(answer).next_begin_offset == 1


@virtual_time()
async def test_other_requests_are_not_served(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        header = ConsumerGroup(consumer_group="g")
        answer = await it._own.ask(RequestCode.GET_CONSUMER_LIST_BY_GROUP, header)
        assert answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


# --- uploads --------------------------------------------------------------------------------------


@virtual_time()
async def test_members_with_different_filters_do_not_share_one(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await send(it.client, 4)
        await it.upload(EVEN, name="even")
        await it.upload(NOTHING, name="nothing")
        assert numbers(await it.pull(name="even")) == [0, 2]
        assert (await it.pull(name="nothing")).code == ResponseCode.PULL_NOT_FOUND
        # Clients whose pulls name no filter get the latest, as in RocketMQ.
        assert (await it.pull(name=None)).code == ResponseCode.PULL_NOT_FOUND


@virtual_time()
async def test_the_same_source_is_loaded_once_and_another_one_replaces_it(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await send(it.client, 4)
        started = PlainSandbox.started
        for _ in range(3):
            assert (await it.upload(EVEN)).code == ResponseCode.SUCCESS
        assert PlainSandbox.started == started + 1
        assert (await it.upload("syntax error")).code == ResponseCode.SYSTEM_ERROR
        assert numbers(await it.pull()) == [0, 2]
        await it.upload("def matches(message): return message.body == b'3'")
        assert numbers(await it.pull()) == [3]
        assert len(it.server.uploads._filters) == 1


@virtual_time()
async def test_only_a_member_of_the_group_replaces_its_filter(tmp_path: Path) -> None:
    async with world(tmp_path) as it, client_of(it.network, it.server.address, "10.0.0.8") as other:
        await send(it.client, 4)
        await it.upload(EVEN)
        stranger = World(it.network, it.broker, it.client, it.server, other)
        refused = await stranger.upload(NOTHING)
        assert refused.code == ResponseCode.NO_PERMISSION
        assert refused.remark is not None
        assert refused.remark.startswith(
            "filter f of group g for topic T can be replaced only by members of the group, and none"
            " is at 10.0.0.8:"
        )
        assert (await stranger.upload(EVEN)).code == ResponseCode.SUCCESS
        assert (await stranger.upload(NOTHING, name="own")).code == ResponseCode.SUCCESS
        for name in ("f", None):
            assert numbers(await it.pull(name=name)) == [0, 2]
        assert (await it.pull(name="own")).code == ResponseCode.PULL_NOT_FOUND
        assert (await it.upload(NOTHING)).code == ResponseCode.SUCCESS
        assert (await it.pull()).code == ResponseCode.PULL_NOT_FOUND


@virtual_time()
async def test_a_stranger_replaces_no_filter_that_loads_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path) as it, client_of(it.network, it.server.address, "10.0.0.8") as other:
        await send(it.client, 4)
        stranger = World(it.network, it.broker, it.client, it.server, other)
        start = PlainSandbox.start

        async def started(source: bytes, limits: CodeLimits) -> PlainSandbox:
            await asyncio.sleep(2 if b"False" in source else 1)
            return await start(source, limits)

        monkeypatch.setattr(Sandbox, "start", started)
        own, foreign = await asyncio.gather(it.upload(EVEN), stranger.upload(NOTHING))
        assert (own.code, foreign.code) == (ResponseCode.SUCCESS, ResponseCode.NO_PERMISSION)
        assert numbers(await it.pull()) == [0, 2]
        # As members do that start together, before their first heartbeats.
        both = await asyncio.gather(*(stranger.upload(EVEN, name="new") for _ in range(2)))
        assert [each.code for each in both] == [ResponseCode.SUCCESS] * 2


@virtual_time()
async def test_a_pull_without_an_upload(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.upload(EVEN)
        for fields in ({"name": "other"}, {"consumer_group": "h"}, {"topic": "Other"}):
            answer = await it.pull(**fields)  # type: ignore[arg-type]
            assert answer.code == ResponseCode.FILTER_DATA_NOT_EXIST
            assert "upload it with request 302" in str(answer.remark)


@pytest.mark.parametrize(
    ("wrong", "remark"),
    [
        ({"class_crc": 5}, "classCRC must be that of the body"),
        ({"source": b""}, f"must have 1 to {SOURCE_BYTES_MAX} bytes, got 0"),
        ({"source": b"#" * (SOURCE_BYTES_MAX + 1)}, f"at most {SOURCE_BYTES_MAX} bytes"),
        ({"source": b"x = '\xff'"}, "the source must be UTF-8"),
        ({"group": "a b"}, "consumerGroup must be"),
        ({"group": ""}, "consumerGroup must be"),
        ({"topic": "/etc"}, "topic must be"),
        ({"topic": "T" * 200}, "topic must be"),
        ({"name": ""}, "className must have 1 to 255 characters, got 0"),
        ({"name": "n" * 256}, "className must have 1 to 255 characters, got 256"),
        ({"name": "n\nforged"}, "className must have no control characters, got 'n\\nforged'"),
    ],
    ids=lambda value: None if isinstance(value, str) else ",".join(value),
)
def test_invalid_uploads_are_rejected_with_the_reason(
    tmp_path: Path, wrong: dict[str, Any], remark: str
) -> None:
    @virtual_time()
    async def main() -> None:
        async with world(tmp_path) as it:
            answer = await it.upload(**{"source": EVEN, **wrong})
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert remark in str(answer.remark)
            assert len(it.server.uploads._filters) == 0

    main()


@virtual_time()
async def test_a_stopped_filter_is_retried_after_a_while(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await send(it.client, 2)
        hostile = "def matches(message): raise MemoryError"
        await it.upload(hostile, name="hostile")
        await it.upload(EVEN, name="even")
        started = PlainSandbox.started
        for _ in range(3):
            answer = await it.pull(name="hostile")
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert "hostile of group g for topic T was stopped: it needs more" in str(answer.remark)
            assert (await it.upload(hostile, name="hostile")).remark == answer.remark
            assert numbers(await it.pull(name="even")) == [0]
        assert PlainSandbox.started == started
        await asyncio.sleep(uploads.STOPPED_MS / 1000)
        assert (await it.upload(hostile, name="hostile")).code == ResponseCode.SUCCESS
        assert PlainSandbox.started == started + 1


@virtual_time()
async def test_a_filter_stopped_while_loading_is_not_retried_immediately(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as it:
        hostile, started = "raise MemoryError", PlainSandbox.started
        first = await it.upload(hostile)
        assert "was stopped: it needs more memory; it is tried again after 60 s" in str(
            first.remark
        )
        assert (await it.upload(hostile)).remark == first.remark
        assert PlainSandbox.started == started + 1
        # A different source may be better; a different filter is unrelated.
        assert (await it.upload(EVEN, name="other")).code == ResponseCode.SUCCESS
        await asyncio.sleep(uploads.STOPPED_MS / 1000)
        await it.upload(hostile)
        assert PlainSandbox.started == started + 3
        assert (await it.upload(EVEN)).code == ResponseCode.SUCCESS


@virtual_time()
async def test_the_number_of_remembered_stopped_filters_is_bounded(tmp_path: Path) -> None:
    async with world(tmp_path, filters_max=2) as it:
        for number in range(5):
            await it.upload("raise MemoryError", name=f"f{number}")
        assert len(it.server.uploads._failed) == 2


@virtual_time()
async def test_a_filter_that_works_without_a_request_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path) as it:
        await send(it.client, 1)
        await it.upload(EVEN)

        async def check_idle(sandbox: PlainSandbox) -> None:
            sandbox.is_running = False
            raise FilterStopped("it used the processor")

        monkeypatch.setattr(PlainSandbox, "check_idle", check_idle)
        await asyncio.sleep(2)
        answer = await it.pull()
        assert "filter f of group g for topic T was stopped: it used" in str(answer.remark)


@virtual_time()
async def test_a_slow_filter_gets_fewer_messages_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path) as it:
        await send(it.client, 100)
        slow = "def matches(message):\n    clock.advance_ns(90_000_000)\n    return False"
        await it.upload(slow)
        monkeypatch.setattr(PlainSandbox, "batch_count", 2)
        answer = await it.pull()
        # Six batches take 1.08 s: the response is due, long before the 32 messages are decided.
        assert pulled(answer).next_begin_offset == 12


@virtual_time()
async def test_unused_filters_are_evicted(tmp_path: Path) -> None:
    async with world(tmp_path, filters_max=2) as it:
        for name in ("a", "b"):
            assert (await it.upload(EVEN, name=name)).code == ResponseCode.SUCCESS
        answer = await it.upload(EVEN, name="c")
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert "runs 2 filters already: raise filterCodesMax" in str(answer.remark)
        await send(it.client, 1)
        await asyncio.sleep(uploads.REPLACEABLE_MS / 1000)
        await it.pull(name="b")
        assert (await it.upload(EVEN, name="c")).code == ResponseCode.SUCCESS
        assert numbers(await it.pull(name="b")) == [0]
        assert (await it.pull(name="a")).code == ResponseCode.FILTER_DATA_NOT_EXIST
        await asyncio.sleep(2 * uploads.UNUSED_MS / 1000)
        assert len(it.server.uploads._filters) == 0
