"""SQL92 subscriptions at the broker: registered by heartbeat, carried by a pull, and held."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

from brokers import BROKER_HOST, Client, client_of, pulled, running_broker, send_header, views
from netkit import RawPeer
from turbopump.testing import MemoryNetwork, virtual_loop, virtual_time, wait_until
from turbopump.wire.bodies import ConsumerData, Heartbeat, MessageModel, Subscription
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request
from turbopump.wire.framing import encode
from turbopump.wire.sysflag import PULL_SUSPEND

SQL92 = "SQL92"


async def send_orders(client: Client) -> None:
    for number, region in enumerate(["eu", "us", "eu", "asia", "us"]):
        named = {"amount": str(number * 50), "region": region}
        await client.send(b"order %d" % number, named=named)


def bodies(answer: Command) -> list[bytes]:
    return [view.body for view in views(answer)]


def heartbeat(expression: str, version: int = 1, topic: str = "T", kind: str = SQL92) -> Heartbeat:
    wanted = Subscription(
        topic=topic, sub_string=expression, expression_type=kind, sub_version=version
    )
    retries = Subscription(topic="%RETRY%g", sub_string="*", sub_version=1)
    data = ConsumerData(
        group_name="g",
        message_model=MessageModel.CLUSTERING,
        subscription_data_set=[wanted, retries],
    )
    return Heartbeat(client_id="c", consumer_data_set=[data])


async def beat(
    client: Client, expression: str, version: int = 1, topic: str = "T", kind: str = SQL92
) -> None:
    body = heartbeat(expression, version, topic, kind).encode()
    answer = await client.ask(RequestCode.HEART_BEAT, body=body)
    # Even for an invalid expression, as in RocketMQ: pulls report it.
    assert answer.code == ResponseCode.SUCCESS


@virtual_time()
async def test_a_pull_carries_its_expression(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        await send_orders(client)
        sql = "amount > 40 AND region IN ('eu', 'us')"
        answer = await client.pull(expression_type=SQL92, tags=sql)
        assert bodies(answer) == [b"order 1", b"order 2", b"order 4"]
        assert pulled(answer).next_begin_offset == 5


@virtual_time()
async def test_a_heartbeat_registers_the_expression(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        await send_orders(client)
        await beat(client, "amount BETWEEN 100 AND 150")
        assert bodies(await client.pull(sys_flag=0)) == [b"order 2", b"order 3"]
        # A newer version replaces it while the group runs.
        await beat(client, "region = 'asia'", version=2)
        assert bodies(await client.pull(sys_flag=0, sub_version=2)) == [b"order 3"]
        late = await client.pull(sys_flag=0, sub_version=3)
        assert late.code == ResponseCode.SUBSCRIPTION_NOT_LATEST


@virtual_time()
async def test_an_invalid_expression_is_reported_to_pulls(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        await send_orders(client)
        await beat(client, "amount >< 3")
        answer = await client.pull(sys_flag=0)
        assert answer.code == ResponseCode.FILTER_DATA_NOT_EXIST
        assert "(at character 9)" in (answer.remark or "")


@virtual_time()
async def test_the_error_of_a_long_expression_is_not_cut_off(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        await send_orders(client)
        for expression in ("(" * 5000, "amount > 5 AND " * 1000):
            answer = await client.pull(expression_type=SQL92, tags=expression)
            assert answer.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED
            assert "(at character " in (answer.remark or "")


@virtual_time()
async def test_an_unknown_expression_type(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        await send_orders(client)
        await beat(client, "amount > 5", kind="sql92")
        for fields in ({"expression_type": "sql92", "tags": "amount > 5"}, {"sys_flag": 0}):
            answer = await client.pull(**fields)
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert (
                answer.remark == "The broker does not support consumer to filter message by sql92"
            )
        # Clients may name none, as RocketMQ allows.
        assert len(bodies(await client.pull(expression_type="", tags="*"))) == 5


@virtual_time()
async def test_messages_that_cannot_be_compared_do_not_match(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        await client.send(b"text", named={"amount": "many"})
        await client.send(b"number", named={"amount": "7"})
        await client.send(b"none")
        answer = await client.pull(expression_type=SQL92, tags="amount > 5")
        assert bodies(answer) == [b"number"]


@virtual_time()
async def test_a_held_pull_wakes_for_a_match_only(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await client.send(b"old", named={"region": "us"})
        held = asyncio.create_task(
            client.pull(1, expression_type=SQL92, tags="region = 'eu'", hold_ms=15_000)
        )
        await asyncio.sleep(0.1)
        assert len(broker.path.arrivals) == 1
        start = virtual_loop().time()
        await client.send(b"not wanted", named={"region": "us"})
        await asyncio.sleep(1)
        assert not held.done()
        await client.send(b"wanted", named={"region": "eu"})
        assert bodies(await held) == [b"wanted"]
        assert virtual_loop().time() - start < 2


@virtual_time()
async def test_a_held_pull_follows_a_subscription_that_changes(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await client.send(b"old", named={"region": "us"})
        await beat(client, "region = 'eu'", version=1)

        def hold() -> asyncio.Task[Command]:
            return asyncio.create_task(
                client.pull(1, sys_flag=PULL_SUSPEND, sub_version=1, suspend_timeout_millis=15_000)
            )

        held = hold()
        await wait_until(lambda: len(broker.path.arrivals) == 1)
        start = virtual_loop().time()
        # The same expression in a newer version wakes no pull, another one does.
        await beat(client, "region = 'eu'", version=2)
        await asyncio.sleep(1)
        assert not held.done()
        await beat(client, "region = 'us'", version=3)
        assert (await held).code == ResponseCode.PULL_NOT_FOUND
        assert virtual_loop().time() - start < 2
        held = hold()
        await wait_until(lambda: len(broker.path.arrivals) == 1)
        await client.send(b"not wanted", named={"region": "eu"})
        await client.send(b"wanted", named={"region": "us"})
        assert bodies(await held) == [b"wanted"]


@virtual_time()
async def test_a_message_wakes_a_pull_after_a_change_of_its_subscription(tmp_path: Path) -> None:
    """The change and the message arrive together: what is delivered matches the newer one."""
    network = MemoryNetwork()
    async with running_broker(tmp_path, network) as (broker, client):
        await client.send(b"old", named={"region": "us"})
        await beat(client, "region = 'eu'", version=1)
        held = asyncio.create_task(
            client.pull(1, sys_flag=PULL_SUSPEND, sub_version=1, suspend_timeout_millis=15_000)
        )
        await wait_until(lambda: len(broker.path.arrivals) == 1)
        peer = await network.host("10.0.0.8").connect(BROKER_HOST, 10911, RawPeer)
        sent = send_header(named={"region": "eu"})
        changed = heartbeat("region = 'us'", version=2).encode()
        one = request(RequestCode.SEND_MESSAGE_V2, sent, b"matched before")
        other = request(RequestCode.HEART_BEAT, body=changed)
        peer.transport.write(encode(one) + encode(other))
        assert (await held).code != ResponseCode.SUCCESS


@virtual_time()
async def test_a_rare_match_is_found_in_bounded_steps(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        for number in range(2000):
            await client.send(b"%d" % number, named={"n": str(number)})
        offsets = [0]
        answer = None
        while answer is None or answer.code == ResponseCode.PULL_RETRY_IMMEDIATELY:
            answer = await client.pull(offsets[-1], expression_type=SQL92, tags="n = 1900")
            offsets.append(pulled(answer).next_begin_offset)
        assert bodies(answer) == [b"1900"]
        # The number of units examined per response is bounded (maxFilterMessageSize), in one file.
        steps = [after - before for before, after in pairwise(offsets)]
        assert steps[0] == 800
        assert max(steps) == 800


@virtual_time()
async def test_other_clients_are_served_during_the_search_for_a_rare_match(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with running_broker(tmp_path, network) as (broker, client):
        for number in range(3000):
            await client.send(b"%d" % number, named={"n": str(number)})
        pulls, has_begun = 0, asyncio.Event()

        async def search() -> None:
            nonlocal pulls
            offset = 0
            while offset < 3000:
                answer = await client.pull(
                    offset, max_msg_nums=1_000_000, expression_type=SQL92, tags="n = -1"
                )
                assert answer.code == ResponseCode.PULL_RETRY_IMMEDIATELY
                offset = pulled(answer).next_begin_offset
                pulls += 1
                has_begun.set()

        async with client_of(network, broker.address, "10.0.0.8") as other:
            await other.send(b"connected", topic="U")
            searching = asyncio.create_task(search())
            await has_begun.wait()
            before = pulls
            await other.send(b"meanwhile", topic="U")
            assert pulls - before <= 2
            await searching
            assert pulls > 2


@virtual_time()
async def test_sql_can_be_disabled(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        await send_orders(client)
        await beat(client, "amount > 5")
        await client.ask(RequestCode.UPDATE_BROKER_CONFIG, body=b"enablePropertyFilter=false")
        for answer in (
            await client.pull(sys_flag=0),
            await client.pull(expression_type=SQL92, tags="amount > 5"),
        ):
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert answer.remark == (
                "The broker does not support consumer to filter message by SQL92"
            )


@pytest.mark.parametrize("filters_retries", [False, True])
def test_retried_messages_match_again_only_if_configured(
    tmp_path: Path, filters_retries: bool
) -> None:
    @virtual_time()
    async def run() -> None:
        async with running_broker(tmp_path) as (_, client):
            setting = f"filterSupportRetry={str(filters_retries).lower()}"
            await client.ask(RequestCode.UPDATE_BROKER_CONFIG, body=setting.encode())
            await send_orders(client)
            await beat(client, "amount > 60")
            for message in await client.messages():
                await client.send_back(message, delay_level=1)
            await asyncio.sleep(2)
            again = await client.pull(topic="%RETRY%g", sys_flag=PULL_SUSPEND)
            wanted = [2, 3, 4] if filters_retries else range(5)
            assert sorted(bodies(again)) == [b"order %d" % number for number in wanted]

    run()
