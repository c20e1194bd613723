"""Our requests have the fields of the requests recorded from Apache RocketMQ's clients."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from clusters import Recorder, cluster
from turbopump.client import calls
from turbopump.client.lite_pull_consumer import LitePullConsumer
from turbopump.client.producer import Producer
from turbopump.client.pull_config import PullConfig
from turbopump.client.pull_consumer import PullConsumer
from turbopump.client.queue_locks import QueueLocks
from turbopump.errors import RemoteError
from turbopump.message import Message, MessageQueue
from turbopump.testing import run_virtual
from turbopump.wire import framing, lenient_json, properties
from turbopump.wire.batch import decode_batch
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import Command, whole_body
from turbopump.wire.headers import PullMessage
from vectors import Vector, frame, frames

QUEUE = MessageQueue("TopicTest", "broker-a", 0)
ADDED_BY_HOOKS = {"ReqT"}
OURS_ONLY = {"acceptStandardJsonOnly"}
"""Requests standard JSON from any name server, which 4.9.8 sends to its own clients by version."""


@pytest.mark.parametrize(
    "name",
    ["heartbeat_concurrent_consumer.response", "bin_heartbeat_consumer.HEART_BEAT.response"],
)
def test_recorded_responses_to_heartbeats_are_not_from_our_brokers(name: str) -> None:
    class Apache:
        async def request(self, address: str, command: Any, timeout_ms: int) -> Any:
            return framing.decode(frame(name))

        async def oneway(self, address: str, command: Command, timeout_ms: int) -> None:
            raise NotImplementedError

    assert asyncio.run(calls.heartbeat(Apache(), "a:1", b"{}", 3000)) is False


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """Every request that a producer and both pull consumers send."""
    recorder = Recorder()
    run_virtual(everything(tmp_path_factory.mktemp("golden"), recorder))
    return recorder


async def everything(directory: Path, recorder: Recorder) -> None:
    async with cluster(directory, ["broker-a"]) as world:
        session = world.session(hooks=[recorder])
        async with Producer("pg_test", session=session) as producer:
            message = Message(
                "TopicTest",
                b"with properties",
                tags="TagA",
                keys=["key1", "key2"],
                properties={"color": "red"},
                flag=7,
            )
            await producer.send(message, to=lambda queues: queues[0])
            await producer.send(Message("TopicTest", b"x" * 5000), to=QUEUE)
            await producer.send(Message("TopicTest", b"delayed", tags="TagD", delay_level=1))
            await producer.send_batch([Message("TopicTest", b"one"), Message("TopicTest", b"two")])
            limit = PullConfig(max_attempts=16)
            async with PullConsumer("cg_pull", session=session, config=limit) as consumer:
                found = await consumer.pull(QUEUE, 0, count_max=3)
                assert isinstance(found, calls.Found)
                await consumer.commit(QUEUE, 1)
                await consumer.committed(QUEUE)
                await consumer.max_offset(QUEUE)
                await consumer.min_offset(QUEUE)
                await consumer.send_back(found.messages[0], QUEUE, delay_level=2)
        async with LitePullConsumer("cg_lite", session=session, start_from="first") as lite:
            await lite.subscribe("TopicTest", "TagA || TagH")
            await lite.poll()
            await asyncio.sleep(1)
            locks = QueueLocks(session, "cg_free")
            await locks.lock([QUEUE])
            await locks.unlock([QUEUE], is_oneway=False)


SAME_FIELDS = [
    "send_keys_tags_properties.request",
    "send_compressed.request",
    "send_delayed.request",
    "send_batch.request",
    "pull_found.request",
    "lite_pull_consumer_start.request",
    "offset_max.request",
    "offset_min.request",
    "offset_update_sync.request",
    "offset_query.request",
    "send_back.request",
    "route_existing.request",
    "consumer_list.request",
    "producer_shutdown.request",
    "heartbeat_producer.request",
    "lock_batch_free.request",
    "unlock_batch_sync.request",
]


@pytest.mark.parametrize("name", SAME_FIELDS)
def test_requests_have_the_fields_of_the_recorded_ones(sent: Recorder, name: str) -> None:
    recorded = framing.decode(frame(name))
    wanted = set(recorded.ext_fields or {}) - ADDED_BY_HOOKS
    ours = sent.of(recorded.code)
    assert ours, "we never sent such a request"
    assert any(set(command.ext_fields or {}) - OURS_ONLY == wanted for command in ours)


def send_with(sent: Recorder, mark: str) -> Command:
    return next(
        command
        for command in sent.of(RequestCode.SEND_MESSAGE_V2)
        if mark in (command.ext_fields or {}).get("i", "")
    )


def test_a_send_has_the_values_of_the_recorded_one(sent: Recorder) -> None:
    ours = send_with(sent, "key1").ext_fields or {}
    theirs = framing.decode(frame("send_keys_tags_properties.request")).ext_fields or {}
    for letter in "abcdefhjkmn":
        assert ours[letter] == theirs[letter], letter
    own, recorded = properties.decode(ours["i"]), properties.decode(theirs["i"])
    for name in ("KEYS", "TAGS", "WAIT", "color"):
        assert own[name] == recorded[name]
    assert len(own["UNIQ_KEY"]) == len(recorded["UNIQ_KEY"])


def test_a_compressed_send_and_a_delayed_one(sent: Recorder) -> None:
    flags = {(command.ext_fields or {})["f"] for command in sent.of(RequestCode.SEND_MESSAGE_V2)}
    recorded = framing.decode(frame("send_compressed.request")).ext_fields or {}
    assert recorded["f"] in flags
    assert properties.decode((send_with(sent, "TagD").ext_fields or {})["i"])["DELAY"] == "1"


def test_a_batch_is_encoded_like_the_recorded_one(sent: Recorder) -> None:
    (ours,) = sent.of(RequestCode.SEND_BATCH_MESSAGE)
    recorded = framing.decode(frame("send_batch.request"))
    assert (ours.ext_fields or {})["i"] == (recorded.ext_fields or {})["i"]
    for command in (ours, recorded):
        for entry in decode_batch(whole_body(command)):
            named = properties.decode(entry.properties.decode())
            assert {"UNIQ_KEY", "WAIT"} <= set(named)


@pytest.mark.parametrize("name", ["heartbeat_producer.request", "lock_batch_free.request"])
def test_bodies_have_the_members_of_the_recorded_ones(sent: Recorder, name: str) -> None:
    recorded = framing.decode(frame(name))
    theirs = lenient_json.loads(whole_body(recorded))
    ours = lenient_json.loads(whole_body(sent.of(recorded.code)[0]))
    assert isinstance(theirs, dict)
    assert isinstance(ours, dict)
    assert set(ours) == set(theirs)


def answers_to(*codes: RequestCode) -> list[Vector]:
    names = {code.name for code in codes}
    return [
        vector
        for vector in frames()
        if vector["kind"] == "response" and vector.get("answers") in names
    ]


class Answering:
    """A caller whose peer is a recording."""

    def __init__(self, answer: Command) -> None:
        self._answer = answer

    async def request(self, address: str, command: Any, timeout_ms: int) -> Any:
        return self._answer

    async def oneway(self, address: str, command: Command, timeout_ms: int) -> None: ...


@pytest.mark.parametrize(
    "vector",
    answers_to(RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE),
    ids=lambda vector: vector["name"],
)
def test_recorded_answers_to_sends_are_understood(vector: Vector) -> None:
    answer = framing.decode(bytes.fromhex(vector["hex"]))
    if answer.code in {0, 10, 11, 12}:
        stored = calls.stored(answer)
        assert stored.status.value == answer.code
        assert stored.offset_id
        assert stored.queue_offset >= 0
    else:
        with pytest.raises(RemoteError) as caught:
            calls.stored(answer)
        assert caught.value.code == answer.code
        assert caught.value.remark


@pytest.mark.parametrize(
    "vector", answers_to(RequestCode.PULL_MESSAGE), ids=lambda vector: vector["name"]
)
def test_recorded_answers_to_pulls_are_understood(vector: Vector) -> None:
    answer = framing.decode(bytes.fromhex(vector["hex"]))
    header = PullMessage(
        consumer_group="g",
        topic="T",
        queue_id=0,
        queue_offset=0,
        max_msg_nums=32,
        sys_flag=0,
        commit_offset=0,
        suspend_timeout_millis=0,
        sub_version=0,
    )
    pull = calls.pull(Answering(answer), "a:1", header, 1000)
    kinds = {
        0: calls.Found,
        19: calls.NothingNew,
        20: calls.NothingMatched,
        21: calls.OffsetIllegal,
    }
    if answer.code not in kinds:
        with pytest.raises(RemoteError):
            asyncio.run(pull)
        return
    outcome = asyncio.run(pull)
    assert type(outcome) is kinds[answer.code]
    if isinstance(outcome, calls.Found):
        assert outcome.messages
        assert outcome.next_offset > 0
