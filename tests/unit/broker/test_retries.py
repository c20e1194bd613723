from __future__ import annotations

import asyncio
from pathlib import Path

from brokers import Client, running_broker
from turbopump.broker.broker import Broker
from turbopump.testing import virtual_loop, virtual_time
from turbopump.wire.bodies import GroupConfig, TopicConfig
from turbopump.wire.codes import ResponseCode
from turbopump.wire.record import MessageView

RETRY_DELAYS_S = [10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200]
"""How long a message that always fails waits before each of its 16 retries."""


def retries_stored(broker: Broker) -> int:
    return broker.queue_end("%RETRY%g", 0)


async def failing_message(client: Client) -> MessageView:
    await client.send(b"fails", named={"TAGS": "a", "KEYS": "k", "UNIQ_KEY": "U"})
    [message] = await client.messages()
    return message


@virtual_time()
async def test_a_failed_message_is_redelivered_after_its_delay(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        failed = await failing_message(client)
        assert (await client.send_back(failed)).code == ResponseCode.SUCCESS
        await asyncio.sleep(9.9)
        assert retries_stored(broker) == 0
        await asyncio.sleep(0.2)
        [again] = await client.messages("%RETRY%g")
        assert (again.body, again.reconsume_times) == (b"fails", 1)
        assert again.born_timestamp_ms == failed.born_timestamp_ms
        assert again.properties["RETRY_TOPIC"] == "T"
        assert again.properties["ORIGIN_MESSAGE_ID"] == failed.offset_id
        assert (again.tags, again.keys, again.unique_key) == ("a", ["k"], "U")


@virtual_time()
async def test_sixteen_retries_take_4_hours_46_minutes_and_end_in_the_dead_letters(
    tmp_path: Path,
) -> None:
    async with running_broker(tmp_path) as (broker, client):
        loop = virtual_loop()
        message = await failing_message(client)
        started_s, waits = loop.time(), []
        for times in range(16):
            sent_ms = loop.clock.now_ms()
            assert (await client.send_back(message)).code == ResponseCode.SUCCESS
            await asyncio.sleep(RETRY_DELAYS_S[times] + 1)
            message = (await client.messages("%RETRY%g"))[-1]
            assert message.reconsume_times == times + 1
            waits.append((message.store_timestamp_ms - sent_ms) / 1000)
        late = [wait - delay for wait, delay in zip(waits, RETRY_DELAYS_S, strict=True)]
        assert all(0 <= extra < 0.2 for extra in late), late
        assert sum(RETRY_DELAYS_S) == 4 * 3600 + 45 * 60 + 40
        assert loop.time() - started_s < sum(RETRY_DELAYS_S) + 20
        await client.send_back(message)
        [dead] = await client.messages("%DLQ%g")
        assert (dead.body, dead.reconsume_times) == (b"fails", 17)
        assert dead.properties["RETRY_TOPIC"] == "T"
        await asyncio.sleep(10_000)
        assert retries_stored(broker) == 16, "nothing comes after the dead-letter topic"


@virtual_time()
async def test_send_backs_count_as_puts_and_for_the_original_topic(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        message = await failing_message(client)
        for _ in range(2):
            await client.send_back(message, delay_level=1)
            await asyncio.sleep(1.2)
            message = (await client.messages("%RETRY%g"))[-1]
        await client.send_back(message, delay_level=-1)
        await asyncio.sleep(11)
        stats = broker.state.stats
        for name, key, total in (
            ("SNDBCK_PUT_NUMS", "T@g", 3),
            ("SNDBCK_PUT_NUMS", "g", 3),
            ("TOPIC_PUT_NUMS", "T", 1),
            ("TOPIC_PUT_NUMS", "%RETRY%g", 2),
            ("TOPIC_PUT_NUMS", "%DLQ%g", 1),
            ("QUEUE_PUT_NUMS", "%DLQ%g@0", 1),
            ("BROKER_PUT_NUMS", "DefaultCluster", 4),
        ):
            counted = stats.view(name, key)
            assert counted is not None, (name, key)
            assert counted.stats_minute.sum == total, (name, key)
        assert stats.view("SNDBCK_PUT_NUMS", "%RETRY%g@g") is None


@virtual_time()
async def test_the_original_topic_of_a_send_back_counts_only_if_it_exists(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await client.send(b"fails", named={"RETRY_TOPIC": "Nowhere"})
        [message] = await client.messages()
        await client.send_back(message)
        assert broker.state.stats.view("SNDBCK_PUT_NUMS", "Nowhere@g") is None
        assert broker.state.stats.view("SNDBCK_PUT_NUMS", "%RETRY%g@g") is not None


@virtual_time()
async def test_dead_lettering_immediately(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        failed = await failing_message(client)
        assert (await client.send_back(failed, delay_level=-1)).code == ResponseCode.SUCCESS
        assert [message.body for message in await client.messages("%DLQ%g")] == [b"fails"]
        assert retries_stored(broker) == 0


@virtual_time()
async def test_the_consumer_may_choose_level_and_limit(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        failed = await failing_message(client)
        await client.send_back(failed, delay_level=1)
        await asyncio.sleep(1.2)
        assert retries_stored(broker) == 1
        await client.send_back(failed, max_reconsume_times=0)
        assert len(await client.messages("%DLQ%g")) == 1


@virtual_time()
async def test_groups_may_limit_or_disable_retries(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        failed = await failing_message(client)
        await broker.state.groups.update(GroupConfig(group_name="none", retry_queue_nums=0))
        for origin in ("T", "Nowhere", None):
            answer = await client.send_back(failed, "none", origin_topic=origin)
            assert answer.code == ResponseCode.SUCCESS
        assert broker.state.topics.find("%RETRY%none") is None
        await asyncio.sleep(11)
        stats = broker.state.stats
        for key, total in (("none", 3), ("T@none", 1), ("%RETRY%none@none", 2)):
            counted = stats.view("SNDBCK_PUT_NUMS", key)
            assert counted is not None, key
            assert counted.stats_minute.sum == total, key
        assert stats.view("SNDBCK_PUT_NUMS", "Nowhere@none") is None
        await broker.state.groups.update(GroupConfig(group_name="g", retry_max_times=0))
        await client.send_back(failed)
        assert len(await client.messages("%DLQ%g")) == 1


@virtual_time()
async def test_a_different_message_at_the_failed_ones_offset_is_not_retried(
    tmp_path: Path,
) -> None:
    async with running_broker(tmp_path) as (_, client):
        failed = await failing_message(client)
        other = "7F" * 16
        refused = await client.send_back(failed, origin_msg_id=other)
        assert refused.code == ResponseCode.SYSTEM_ERROR
        expected = f"look message by offset failed, {failed.physical_offset}: found "
        assert refused.remark == f"{expected}{failed.message_id}, expected {other}"
        assert await client.messages("%RETRY%g") == []
        for known in (failed.message_id, failed.offset_id, failed.offset_id.lower(), "x", ""):
            answer = await client.send_back(failed, origin_msg_id=known)
            assert answer.code == ResponseCode.SUCCESS


@virtual_time()
async def test_messages_that_cannot_be_sent_back(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        failed = await failing_message(client)
        nowhere = await client.send_back(failed, offset=10**9)
        assert nowhere.code == ResponseCode.SYSTEM_ERROR
        assert "look message by offset failed, 1000000000" in (nowhere.remark or "")
        inside = await client.send_back(failed, offset=5)
        assert inside.code == ResponseCode.SYSTEM_ERROR
        hostile = await client.send_back(failed, "../../etc")
        assert hostile.code != ResponseCode.SUCCESS
        assert not (tmp_path / "etc").exists()


@virtual_time()
async def test_a_retry_topic_without_queues(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        failed = await failing_message(client)
        await broker.state.topics.update(TopicConfig(topic_name="%RETRY%g", write_queue_nums=0))
        answer = await client.send_back(failed)
        assert answer.code == ResponseCode.NO_PERMISSION
        assert "the topic[%RETRY%g] sending message is forbidden" in (answer.remark or "")
