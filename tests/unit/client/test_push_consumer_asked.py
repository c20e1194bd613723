"""What operators may query from a push consumer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from clusters import Cluster, cluster
from consumers import Seen, always, consuming, make_topic, send, sleep_ms
from turbopump.client.delivery.results import ConsumeContext, ConsumeResult
from turbopump.message import MessageQueue
from turbopump.testing import virtual_time, wait_until
from turbopump.wire import headers
from turbopump.wire.bodies import ConsumerStatus, DirectConsumption, RunningInfo
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import Command, request, whole_body
from turbopump.wire.record import MessageView
from turbopump.wire.schema import Header

QUEUE = MessageQueue("T", "a", 0)


async def ask(world: Cluster, code: int, header: Header) -> Command:
    async with world.session("10.0.9.6") as session:
        return await session.request(world.brokers["a"].address, request(code, header), 15_000)


@virtual_time()
async def test_the_internal_state_can_be_queried(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"0", b"1", b"2", b"3"])
        seen = Seen()
        async with consuming(world, seen):
            await wait_until(lambda: seen.count == 4)
            await sleep_ms(30_000)
            header = headers.RunningInfoOf(
                consumer_group="g", client_id="10.0.1.1@test", jstack_enable=True
            )
            answer = await ask(world, RequestCode.GET_CONSUMER_RUNNING_INFO, header)
            info = RunningInfo.decode(whole_body(answer))
        assert info.mq_table[QUEUE].commit_offset == 1
        assert info.mq_table[QUEUE].last_pull_timestamp > 1_700_000_000_000
        assert info.properties["PROP_CONSUMEORDERLY"] == "false"
        work = info.properties["backgroundWork"].split(", ")
        assert {"heartbeat", "rebalance", "offset commits", "calls of the listener"} <= set(work)
        assert info.properties["backgroundFailures"] == ""
        assert info.properties["concurrency"] == "(20, 64)"
        assert info.properties["Listening.timeout"] == "900.0"
        assert {each.topic for each in info.subscription_set} == {"T", "%RETRY%g"}
        assert info.status_table["T"].consume_ok_tps > 0
        assert info.jstack is not None
        assert "MainThread" in info.jstack


@pytest.mark.parametrize(
    ("decide", "expected"),
    [
        (always(ConsumeResult.SUCCESS), "CR_SUCCESS"),
        (always(ConsumeResult.RETRY_LATER), "CR_LATER"),
        (always(ConsumeResult.COMMIT), "CR_COMMIT"),
        (always(ConsumeResult.ROLLBACK), "CR_ROLLBACK"),
        (always(None), "CR_RETURN_NULL"),
        (None, "CR_THROW_EXCEPTION"),
    ],
)
@pytest.mark.parametrize("in_thread", [False, True])
@virtual_time()
async def test_one_message_can_be_consumed_directly(
    tmp_path: Path, decide: Any, expected: str, in_thread: bool
) -> None:
    def answer_of(messages: Sequence[MessageView], context: ConsumeContext) -> Any:
        if decide is None:
            raise RuntimeError("no")
        return decide(messages, context)

    async with cluster(tmp_path) as world:
        await send(world, [b"x"], topic="Other")
        await make_topic(world)
        listener = answer_of if in_thread else Seen(answer_of)
        async with consuming(world, listener):
            message = await message_of(world, "Other")
            header = headers.ConsumeDirectly(
                consumer_group="g",
                client_id="10.0.1.1@test",
                msg_id=message.offset_id,
                broker_name="a",
            )
            answer = await ask(world, RequestCode.CONSUME_MESSAGE_DIRECTLY, header)
            result = DirectConsumption.decode(whole_body(answer))
        assert (result.consume_result, result.order) == (expected, False)
        assert (result.remark is not None) == (decide is None)


async def message_of(world: Cluster, topic: str) -> MessageView:
    seen = Seen()
    async with consuming(world, seen, "10.0.1.9", group="look", subscriptions={topic: "*"}):
        await wait_until(lambda: seen.count == 1)
    return seen.messages[0]


@virtual_time()
async def test_offsets_in_memory_can_be_queried(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"0", b"1", b"2", b"3"])
        seen = Seen()
        async with consuming(world, seen):
            await wait_until(lambda: seen.count == 4)
            await sleep_ms(10)
            header = headers.ConsumerStatusOf(topic="T", group="g")
            answer = await ask(world, RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, header)
            status = ConsumerStatus.decode(whole_body(answer))
        (table,) = status.consumer_table.values()
        assert table == {MessageQueue("T", "a", number): 1 for number in range(4)}
