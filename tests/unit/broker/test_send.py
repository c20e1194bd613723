from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from brokers import BROKER_HOST, pulled, running_broker, send_header, views
from turbopump.broker.config import AccessConfig, LimitsConfig, TopicsConfig
from turbopump.testing import virtual_loop, virtual_time
from turbopump.wire.batch import BatchEntry, encode_batch
from turbopump.wire.bodies import GroupConfig
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, Serialize, request
from turbopump.wire.headers import SendMessage, SendMessageAnswer
from turbopump.wire.ids import parse_offset_id


@virtual_time()
async def test_a_message_is_stored_as_it_was_sent(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        named = {"TAGS": "a", "KEYS": "k", "colour": "red", "WAIT": "true"}
        answer = await client.send(b"hello", named=named, flag=7, queue_id=2)
        assert answer.code == ResponseCode.SUCCESS
        stored = SendMessageAnswer.from_ext_fields(answer.ext_fields)
        assert (stored.queue_id, stored.queue_offset) == (2, 0)
        assert (stored.region, stored.trace_on) == ("DefaultRegion", True)
        host, offset = parse_offset_id(stored.msg_id)
        assert (str(host), offset) == (f"{BROKER_HOST}:10911", 0)
        [message] = await client.messages(queue_id=2)
        assert (message.body, message.flag, message.queue_id) == (b"hello", 7, 2)
        assert message.offset_id == stored.msg_id
        assert str(message.born_host).startswith("10.0.0.9:")
        assert 0 <= virtual_loop().clock.now_ms() - message.store_timestamp_ms < 10
        expected = {"TAGS": "a", "KEYS": "k", "colour": "red", "CLUSTER": "DefaultCluster"}
        assert message.properties == expected, "WAIT is only between sender and broker"


class Observer:
    """Records the responses it sees."""

    def __init__(self) -> None:
        self.seen: list[Command] = []

    def before_request(self, address: str, command: Command) -> Command:
        return command

    def after_response(self, address: str, request: Command, response: Command) -> None:
        self.seen.append(response)


@pytest.mark.parametrize("is_observed", [False, True])
@virtual_time()
async def test_the_answer_is_the_same_for_hooks_and_in_binary(
    tmp_path: Path, is_observed: bool
) -> None:
    async with running_broker(tmp_path) as (broker, client):
        observer = Observer()
        if is_observed:
            broker._router.hooks = (observer,)
        command = request(RequestCode.SEND_MESSAGE_V2, send_header(), b"hello")
        answers = [
            await client.pool.request(client.address, replace(command, serialize=form), 1000)
            for form in Serialize
        ]
        assert [answer.serialize for answer in answers] == list(Serialize)
        assert observer.seen == (answers if is_observed else [])
        stored = [SendMessageAnswer.from_ext_fields(answer.ext_fields) for answer in answers]
        assert [one.queue_offset for one in stored] == [0, 1]
        assert [message.offset_id for message in await client.messages()] == [
            one.msg_id for one in stored
        ]


@virtual_time()
async def test_long_names_and_old_code(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        short = send_header(queue_id=1)
        header = SendMessage(**{name: getattr(short, name) for name in short.__struct_fields__})
        assert (await client.ask(RequestCode.SEND_MESSAGE, header, b"old")).code == 0
        assert [message.body for message in await client.messages(queue_id=1)] == [b"old"]


@virtual_time()
async def test_an_unknown_topic_is_created_from_its_template(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await client.send(topic="New", default_topic_queue_nums=3)
        topic = broker.state.topics.find("New")
        assert topic is not None
        assert (topic.read_queue_nums, topic.write_queue_nums, topic.perm) == (3, 3, 6)


@virtual_time()
async def test_no_topics_are_created_automatically_when_disabled(tmp_path: Path) -> None:
    topics = TopicsConfig(auto_create=False)
    async with running_broker(tmp_path, topics=topics) as (broker, client):
        answer = await client.send(topic="New")
        assert answer.code == ResponseCode.TOPIC_NOT_EXIST
        assert "topic[New] not exist" in (answer.remark or "")
        assert answer.ext_fields == {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}
        assert broker.state.topics.find("New") is None


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"topic": ""}, ResponseCode.SYSTEM_ERROR, "blank"),
        ({"topic": "../../etc"}, ResponseCode.SYSTEM_ERROR, "illegal characters"),
        ({"topic": ".."}, ResponseCode.SYSTEM_ERROR, "illegal characters"),
        ({"topic": "a/b"}, ResponseCode.SYSTEM_ERROR, "illegal characters"),
        ({"topic": "a\x00b"}, ResponseCode.SYSTEM_ERROR, "illegal characters"),
        ({"topic": "t" * 128}, ResponseCode.SYSTEM_ERROR, "longer than"),
        ({"topic": "SCHEDULE_TOPIC_XXXX"}, ResponseCode.NO_PERMISSION, "is forbidden"),
        ({"queue_id": 99}, ResponseCode.SYSTEM_ERROR, r"queueId[99] is illegal"),
        ({"default_topic": "Nope"}, ResponseCode.TOPIC_NOT_EXIST, "template 'Nope'"),
        ({"named": {"p": "x" * 40_000}}, ResponseCode.MESSAGE_ILLEGAL, "at most 32767"),
        (
            {"body": b"x" * 1001},
            ResponseCode.MESSAGE_ILLEGAL,
            "at most 1000 bytes",
        ),
        ({"body": b"xx", "batch": True}, ResponseCode.MESSAGE_ILLEGAL, "batch"),
        ({"body": b"", "batch": True}, ResponseCode.MESSAGE_ILLEGAL, "must have messages"),
    ],
)
def test_rejected_sends_and_their_reasons(
    tmp_path: Path, fields: dict[str, Any], code: ResponseCode, words: str
) -> None:
    @virtual_time()
    async def run() -> None:
        limits = LimitsConfig(message_bytes_max=1000)
        async with running_broker(tmp_path, limits=limits) as (_, client):
            answer = await client.send(**fields)
            assert (answer.code, words in (answer.remark or "")) == (code, True), answer
            assert await client.messages() == []
            assert (await client.send()).code == ResponseCode.SUCCESS

    run()


@virtual_time()
async def test_sends_do_not_create_reserved_topics(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        answer = await client.send(topic="RMQ_SYS_TRANS_HALF_TOPIC")
        assert answer.code == ResponseCode.NO_PERMISSION
        assert broker.state.topics.find("RMQ_SYS_TRANS_HALF_TOPIC") is None


@virtual_time()
async def test_missing_and_wrong_fields_are_named(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        answer = await client.ask(RequestCode.SEND_MESSAGE_V2)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert "missing required field `a`" in (answer.remark or "")


@virtual_time()
async def test_any_queue_will_do(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        queues = {
            SendMessageAnswer.from_ext_fields((await client.send(queue_id=-1)).ext_fields).queue_id
            for _ in range(40)
        }
        assert queues == {0, 1, 2, 3}


@virtual_time()
async def test_a_batch_is_stored_message_by_message(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        await client.send(b"before")
        entries = [
            BatchEntry(b"one", b"TAGS\x01a\x02WAIT\x01true", 1),
            BatchEntry(b"two", b"TAGS\x01b\x02", 2),
            BatchEntry(b"three"),
        ]
        answer = await client.send(encode_batch(entries), named={"WAIT": "true"}, batch=True)
        stored = SendMessageAnswer.from_ext_fields(answer.ext_fields)
        assert stored.queue_offset == 1
        messages = (await client.messages())[1:]
        assert [message.body for message in messages] == [b"one", b"two", b"three"]
        assert [message.flag for message in messages] == [1, 2, 0]
        assert stored.msg_id == ",".join(message.offset_id for message in messages)
        assert messages[0].properties["WAIT"] == "true"
        assert [message.tags for message in messages] == ["a", "b", None]
        assert all(message.properties["CLUSTER"] == "DefaultCluster" for message in messages)


@pytest.mark.parametrize("is_even", [True, False])
@virtual_time()
async def test_a_large_batch_is_stored_message_by_message(tmp_path: Path, is_even: bool) -> None:
    async with running_broker(tmp_path) as (_, client):
        entries = [
            BatchEntry(b"%d" % number + b"x" * 2000, b"TAGS\x01a\x02KEYS\x01k%d" % number)
            for number in range(10 if is_even else 1, 50)
        ]
        answer = await client.send(encode_batch(entries), named={"WAIT": "true"}, batch=True)
        stored = SendMessageAnswer.from_ext_fields(answer.ext_fields)
        messages = await client.messages()
        assert [message.body for message in messages] == [entry.body for entry in entries]
        assert stored.msg_id == ",".join(message.offset_id for message in messages)
        assert messages[0].keys == ["k10" if is_even else "k1"]
        assert messages[-1].keys == ["k49"]


@virtual_time()
async def test_a_large_damaged_batch_is_rejected(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        body = encode_batch([BatchEntry(b"x" * 2000, b"TAGS\x01a")] * 50)
        answer = await client.send(body[:-1], batch=True)
        assert answer.code == ResponseCode.MESSAGE_ILLEGAL
        assert await client.messages() == []


@virtual_time()
async def test_a_batch_whose_ids_exceed_the_response_is_rejected_as_a_whole(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        answer = await client.send(encode_batch([BatchEntry(b"x", b"")] * 40_000), batch=True)
        assert answer.code == ResponseCode.MESSAGE_ILLEGAL
        assert "a batch must have at most 316" in (answer.remark or "")
        assert await client.messages() == []


@virtual_time()
async def test_a_message_retried_too_often_is_dead_lettered(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await broker.state.groups.update(GroupConfig(group_name="g", retry_max_times=2))
        for times in (0, 1, 2):
            await client.send(b"%d" % times, topic="%RETRY%g", reconsume_times=times)
        await client.send(b"own", topic="%RETRY%g", reconsume_times=1, max_reconsume_times=1)
        retried = [message.body for message in await client.messages("%RETRY%g")]
        dead = [message.body for message in await client.messages("%DLQ%g")]
        assert (retried, dead) == ([b"0", b"1"], [b"2", b"own"])


@virtual_time()
async def test_the_delay_of_a_message_retried_too_often_delays_no_dead_letter(
    tmp_path: Path,
) -> None:
    """Orderly clients of Apache RocketMQ send one with the delay of the next attempt."""
    async with running_broker(tmp_path) as (_, client):
        named = {"DELAY": "18"}
        retried: dict[str, Any] = {"topic": "%RETRY%g", "named": named, "reconsume_times": 1}
        await client.send(b"dead", max_reconsume_times=1, **retried)
        (letter,) = await client.messages("%DLQ%g")
        assert (letter.body, "DELAY" in letter.properties) == (b"dead", False)


@virtual_time()
async def test_a_broker_that_does_not_accept_messages_yet(tmp_path: Path) -> None:
    clock = virtual_loop().clock
    access = AccessConfig(sends_from_ms=clock.now_ms() + 60_000)
    async with running_broker(tmp_path, access=access) as (_, client):
        answer = await client.send()
        assert answer.code == ResponseCode.SYSTEM_ERROR
        clock.jump_wall(60)
        assert (await client.send()).code == ResponseCode.SUCCESS


@virtual_time()
async def test_the_region_can_be_changed_while_the_broker_runs(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        await client.send()
        settings = b"regionId=Elsewhere\ntraceOn=false\n"
        assert (await client.ask(RequestCode.UPDATE_BROKER_CONFIG, body=settings)).code == 0
        answer = SendMessageAnswer.from_ext_fields((await client.send()).ext_fields)
        assert (answer.region, answer.trace_on) == ("Elsewhere", False)


@virtual_time()
async def test_messages_survive_a_restart(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        await client.send(b"one")
    async with running_broker(tmp_path) as (_, client):
        answer = await client.send(b"two")
        assert SendMessageAnswer.from_ext_fields(answer.ext_fields).queue_offset == 1
        assert [message.body for message in await client.messages()] == [b"one", b"two"]


@virtual_time()
async def test_one_way_sends_are_stored_and_not_answered(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        connection = await client.pool.connection(client.address)
        connection.oneway(request(RequestCode.SEND_MESSAGE_V2, send_header(), b"one-way"))
        assert (await client.send(b"asked")).opaque > 0
        assert [message.body for message in await client.messages()] == [b"one-way", b"asked"]


@virtual_time()
async def test_pulled_bodies_are_the_stored_bytes(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        for number in range(5):
            await client.send(b"%d" % number)
        answer = await client.pull(0)
        assert pulled(answer).next_begin_offset == 5
        assert [view.body for view in views(answer)] == [b"0", b"1", b"2", b"3", b"4"]
