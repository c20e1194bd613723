"""Tables that are empty, missing or damaged beside a store that has messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appending import append
from brokers import Client, running_broker
from turbopump.errors import StoreDamaged
from turbopump.testing import Disk, virtual_loop, virtual_time
from turbopump.wire import properties
from turbopump.wire.bodies import TopicConfig
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.headers import TopicName, UpdateConsumerOffset
from turbopump.wire.names import TRANSACTION_TOPICS
from unit.store.support import record

Damage = Callable[[Path], object]

DAMAGES: dict[str, Damage] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_text(""),
    "blank": lambda path: path.write_text(" \n"),
    "{}": lambda path: path.write_text("{}"),
}


async def commit(client: Client, offset: int) -> None:
    header = UpdateConsumerOffset(consumer_group="g", topic="T", queue_id=0, commit_offset=offset)
    answer = await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, header)
    assert answer.code == ResponseCode.SUCCESS


async def live(directory: Path) -> None:
    """Run a broker that has a topic with three queues, a group, an offset and a delayed message."""
    async with running_broker(directory) as (broker, client):
        topic = TopicConfig(topic_name="T", read_queue_nums=3, write_queue_nums=3, perm=6)
        await broker.state.topics.update(topic)
        for queue_id in range(3):
            assert (await client.send(queue_id=queue_id)).code == ResponseCode.SUCCESS
        await client.send(named={properties.DELAY: "1"})
        await commit(client, 1)
        await asyncio.sleep(3)


def damage(directory: Path, name: str, how: Damage, *, with_backup: bool) -> None:
    path = directory / "config" / name
    how(path)
    if with_backup:
        path.with_name(name + ".bak").unlink(missing_ok=True)


@pytest.mark.parametrize("how", DAMAGES)
def test_topics_are_recovered_from_their_queues(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    @virtual_time()
    async def check() -> None:
        await live(tmp_path)
        damage(tmp_path, "topics.json", DAMAGES[how], with_backup=True)
        async with running_broker(tmp_path) as (broker, client):
            topic = broker.state.topics.find("T")
            assert topic == TopicConfig(
                topic_name="T", read_queue_nums=3, write_queue_nums=3, perm=6
            )
            assert [each.body for each in await client.messages("T", 2)] == [b"hello"]
            await asyncio.sleep(1)
            saved = json.loads((tmp_path / "config" / "topics.json").read_text())
            assert "T" in saved["topicConfigTable"]

    check()
    assert "topics.json is missing or empty, and so is its backup, although" in caplog.text
    assert "recovered topics from their messages" in caplog.text
    assert "T (3)" in caplog.text


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("consumerOffset.json", "all groups start where"),
        ("subscriptionGroup.json", "limits of retries"),
        ("delayOffset.json", "whose delivered copies are not found"),
    ],
)
@pytest.mark.parametrize("how", DAMAGES)
def test_the_consequences_of_a_lost_table_are_logged(
    tmp_path: Path, name: str, meaning: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    @virtual_time()
    async def check() -> None:
        await live(tmp_path)
        assert not caplog.records, [record.getMessage() for record in caplog.records]
        damage(tmp_path, name, DAMAGES[how], with_backup=True)
        async with running_broker(tmp_path) as (_, client):
            assert (await client.send()).code == ResponseCode.SUCCESS
            await asyncio.sleep(1)
            assert (tmp_path / "config" / name).stat().st_size > 2

    check()
    (said,) = [each.getMessage() for each in caplog.records if meaning in each.getMessage()]
    assert f"{name} is missing or empty" in said


@pytest.mark.parametrize("how", [*DAMAGES, "garbage"])
def test_the_backup_is_used_first_and_the_damaged_file_is_preserved(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    @virtual_time()
    async def check() -> None:
        await live(tmp_path)
        path = tmp_path / "config" / "consumerOffset.json"
        path.with_name("consumerOffset.json.bak").write_bytes(path.read_bytes())
        (DAMAGES | {"garbage": lambda path: path.write_text('{"offsetTable": {')})[how](path)
        async with running_broker(tmp_path) as (broker, client):
            assert broker.state.offsets.find("g", "T", 0) == 1
            await commit(client, 2)
        assert json.loads(path.read_text())["offsetTable"]["T@g"] == {"0": 2}
        aside = path.with_name("consumerOffset.json.damaged")
        assert aside.exists() == (how != "missing")
        if how == "garbage":
            assert aside.read_text() == '{"offsetTable": {'

    check()
    assert "consumerOffset.json.bak instead" in caplog.text


@virtual_time()
async def test_garbage_without_a_backup_is_a_clear_error(tmp_path: Path) -> None:
    await live(tmp_path)
    path = tmp_path / "config" / "topics.json"
    damage(tmp_path, "topics.json", lambda path: path.write_text("{ no json"), with_backup=True)
    with pytest.raises(StoreDamaged, match=r"topics\.json is damaged .* restore it from a copy"):
        await live(tmp_path)
    assert path.read_text() == "{ no json"


@virtual_time()
async def test_a_new_broker_logs_nothing_and_writes_its_tables(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_broker(tmp_path):
        await asyncio.sleep(1)
    names = {path.name for path in (tmp_path / "config").iterdir()}
    assert {"topics.json", "consumerOffset.json", "delayOffset.json"} < names
    assert not caplog.records
    async with running_broker(tmp_path):
        pass
    assert not caplog.records


@virtual_time()
async def test_a_topic_missing_from_the_table_after_a_crash_is_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await live(tmp_path)
    path = tmp_path / "config" / "topics.json"
    table = json.loads(path.read_text())
    del table["topicConfigTable"]["T"]
    path.write_text(json.dumps(table))
    async with running_broker(tmp_path) as (broker, _):
        topic = broker.state.topics.find("T")
        assert topic is not None
        assert topic.write_queue_nums == 4, "as many as clients ask for"
    assert "recovered topics from their messages" in caplog.text


@virtual_time()
async def test_transaction_topics_missing_from_the_table_are_restored_silently(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Apache's brokers never enter the topic of operations there."""
    topics_file = tmp_path / "config" / "topics.json"
    async with running_broker(tmp_path) as (broker, client):
        await asyncio.sleep(1)
        before = topics_file.read_bytes()
        for name in TRANSACTION_TOPICS:
            broker.state.topics.create_internal(name, queues=1)
            append(broker.store, [record(topic=name)]).durable.result()
    topics_file.write_bytes(before)
    async with running_broker(tmp_path) as (broker, client):
        for name in TRANSACTION_TOPICS:
            topic = broker.state.topics.find(name)
            assert topic is not None
            assert topic.read_queue_nums == 1
            assert len(await client.messages(name, 0)) == 1
    assert not caplog.records


async def send_delayed(client: Client, topic: str, **fields: Any) -> None:
    """Send a message that is due after a second."""
    answer = await client.send(topic=topic, named={properties.DELAY: "1"}, **fields)
    assert answer.code == ResponseCode.SUCCESS


async def delete_topic(client: Client, topic: str) -> None:
    answer = await client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, TopicName(topic=topic))
    assert answer.code == ResponseCode.SUCCESS


async def bodies(client: Client, topic: str, queue_id: int = 0) -> list[bytes]:
    return [message.body for message in await client.messages(topic, queue_id)]


@virtual_time()
async def test_a_delayed_message_restores_a_topic_that_a_crash_left_out_of_the_table(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    topics_file = tmp_path / "config" / "topics.json"
    async with running_broker(tmp_path) as (_, client):
        await asyncio.sleep(1)
        before = topics_file.read_bytes()
        await send_delayed(client, "Later", queue_id=1)
    topics_file.write_bytes(before)
    async with running_broker(tmp_path) as (broker, client):
        announced: list[TopicConfig] = []
        broker.state.topics.listen(announced.append)
        assert broker.state.topics.find("Later") is None
        await asyncio.sleep(2)
        assert await bodies(client, "Later", 1) == [b"hello"]
        topic = broker.state.topics.find("Later")
        assert topic is not None
        assert topic.write_queue_nums == 4, "as many as clients ask for"
        assert announced == [topic]
    assert "Later" in json.loads(topics_file.read_text())["topicConfigTable"]
    assert "recovered topics from their messages" in caplog.text


@virtual_time()
async def test_delayed_messages_of_queues_that_no_longer_exist_are_delivered_to_others(
    tmp_path: Path,
) -> None:
    topics_file = tmp_path / "config" / "topics.json"
    async with running_broker(tmp_path) as (_, client):
        await asyncio.sleep(1)
        before = topics_file.read_bytes()
        for queue_id in (2, 7):
            await send_delayed(client, "Later", queue_id=queue_id, default_topic_queue_nums=8)
    topics_file.write_bytes(before)
    async with running_broker(tmp_path) as (broker, client):
        await asyncio.sleep(2)
        topic = broker.state.topics.find("Later")
        assert topic is not None
        assert topic.read_queue_nums == 4
        assert await bodies(client, "Later", 2) == [b"hello"]
        assert await bodies(client, "Later", 7 % 4) == [b"hello"]


@virtual_time()
async def test_a_deleted_topic_is_not_restored_by_its_delayed_messages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await send_delayed(client, "Later")
        await delete_topic(client, "Later")
    async with running_broker(tmp_path) as (broker, client):
        await asyncio.sleep(2)
        assert broker.state.topics.find("Later") is None
        assert "dropped 1 delayed messages of topic Later: it was deleted" in caplog.text
        # Messages that are stored after the deletion belong to a new topic.
        await send_delayed(client, "Later", body=b"new")
        await asyncio.sleep(2)
        assert await bodies(client, "Later") == [b"new"]
    async with running_broker(tmp_path) as (_, client):
        assert await bodies(client, "Later") == [b"new"]


@virtual_time()
async def test_a_topic_re_created_in_time_gets_the_delayed_messages_of_the_deleted_one(
    tmp_path: Path,
) -> None:
    async with running_broker(tmp_path) as (_, client):
        await send_delayed(client, "Later")
        await delete_topic(client, "Later")
        await client.send(topic="Later", body=b"new")
        await asyncio.sleep(2)
        assert await bodies(client, "Later") == [b"new", b"hello"]


@virtual_time()
async def test_a_message_due_during_the_deletion_does_not_undo_it() -> None:
    disk = Disk(virtual_loop())
    async with running_broker(Path("/"), files=disk) as (broker, client):
        await asyncio.sleep(1)
        await send_delayed(client, "Later")
        await asyncio.sleep(0.5)
        disk.sync_time = 0.3
        deletion = asyncio.create_task(delete_topic(client, "Later"))
        await asyncio.sleep(0.6)
        assert not deletion.done()
        assert broker.queue_end("Later", 0) == 1, "stored while the deletion is being saved"
        assert broker.state.topics.find("Later") is None
        await deletion
        assert broker.state.topics.find("Later") is None
        assert broker.queue_end("Later", 0) == 0


@virtual_time()
async def test_a_deleted_topic_does_not_reappear(tmp_path: Path) -> None:
    await live(tmp_path)
    async with running_broker(tmp_path) as (broker, _):
        await broker.state.topics.delete("T")
        broker.store.remove_topic("T")
    async with running_broker(tmp_path) as (broker, _):
        assert broker.state.topics.find("T") is None


@virtual_time()
async def test_groups_do_not_skip_messages_after_a_power_failure_has_cut_their_queue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Offsets are flushed when they are saved, messages later: the file may be ahead of the log."""
    await live(tmp_path)
    path = tmp_path / "config" / "consumerOffset.json"
    saved = json.loads(path.read_text())
    saved["offsetTable"] = {"T@g": {"0": 9, "1": 1, "2": 0}, "T@other": {"3": 2}}
    path.write_text(json.dumps(saved))
    async with running_broker(tmp_path) as (broker, client):
        end = broker.queue_end("T", 0)
        assert end < 9
        # A second failure before the next save must not restore the old offset.
        assert json.loads(path.read_text())["offsetTable"]["T@g"]["0"] == end
        for _ in range(10):
            await client.send(queue_id=0)
        assert broker.state.offsets.of_topic("g", "T") == {0: end, 1: 1, 2: 0}
        assert broker.state.offsets.of_topic("other", "T") == {3: 0}
    assert json.loads(path.read_text())["offsetTable"]["T@g"]["0"] == end
    assert "2 offsets were beyond the end of their queues" in caplog.text
    assert f"queue 0 of T by g: 9, now {end}" in caplog.text
