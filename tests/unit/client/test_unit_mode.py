"""Clients of a unit: their id, what they tell brokers, and which topics brokers then create."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusters import Cluster, Recorder, cluster
from consumers import Seen, always, consuming, sleep_ms
from turbopump.client.config import ClientConfig
from turbopump.client.delivery.results import ConsumeResult
from turbopump.client.lite_pull_consumer import LitePullConsumer
from turbopump.client.producer import Producer
from turbopump.client.pull_consumer import PullConsumer
from turbopump.client.session import Session
from turbopump.errors import ConnectFailed, InvalidArgument
from turbopump.message import Message
from turbopump.nameserver.routes import UNIT_FLAG, UNIT_SUBSCRIPTION_FLAG
from turbopump.testing import virtual_time, wait_until
from turbopump.wire import framing
from turbopump.wire.bodies import Heartbeat, TopicList
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import Command, request, whole_body
from vectors import frame

RETRY = always(ConsumeResult.RETRY_LATER)


def sys_flag(world: Cluster, topic: str) -> int:
    found = world.broker().state.topics.find(topic)
    assert found is not None
    return found.topic_sys_flag


async def listed(world: Cluster, code: RequestCode) -> list[str]:
    async with world.session("10.0.9.7") as session:
        answer = await session.request(world.nameserver, request(code), 3000)
        return TopicList.decode(whole_body(answer)).topic_list


def test_the_name_of_a_unit_ends_the_client_id() -> None:
    config = ClientConfig("ns:9876", host="10.0.0.5", instance="DEFAULT", unit_name="unit1")
    assert Session(config).client_id == "10.0.0.5@DEFAULT@unit1"


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"unit_name": "a@b"}, "unit_name must have no blanks and no @, got 'a@b'"),
        ({"unit_name": 1}, "unit_name must be a string, got 1"),
        ({"unit_mode": "yes"}, "unit_mode must be a bool, got 'yes'"),
    ],
)
def test_wrong_settings_of_units_are_refused(settings: Any, error: str) -> None:
    with pytest.raises(InvalidArgument, match=error):
        ClientConfig("ns:9876", **settings)


@pytest.mark.parametrize("unit_mode", [False, True])
@virtual_time()
async def test_topics_created_by_a_unit_are_marked(tmp_path: Path, unit_mode: bool) -> None:
    async with cluster(tmp_path) as world:
        recorder, seen = Recorder(), Seen(RETRY)
        settings: dict[str, Any] = {
            "hooks": [recorder],
            "unit_name": "unit1",
            "unit_mode": unit_mode,
        }
        async with Producer("p", session=world.session(**settings)) as producer:
            await producer.send(Message("T", b"x"))
            await producer.send_batch([Message("B", b"1"), Message("B", b"2")])
        async with consuming(world, seen, session=world.session("10.0.1.2", **settings)):
            await wait_until(lambda: seen.count == 2, 60)
        flags = [sys_flag(world, topic) for topic in ("T", "B", "%RETRY%g")]
        assert flags == ([UNIT_FLAG] * 2 + [UNIT_SUBSCRIPTION_FLAG] if unit_mode else [0] * 3)
        if unit_mode:
            assert await listed(world, RequestCode.GET_UNIT_TOPIC_LIST) == ["T", "B"]
            subscribed = await listed(world, RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST)
            assert subscribed == ["%RETRY%g"]
        told = recorder.of(RequestCode.CONSUMER_SEND_MSG_BACK)
        assert {(each.ext_fields or {})["unitMode"] for each in told} == {str(unit_mode).lower()}
        for code, name in (
            (RequestCode.SEND_MESSAGE_V2, "send_keys_tags_properties.request"),
            (RequestCode.SEND_BATCH_MESSAGE, "send_batch.request"),
        ):
            recorded = framing.decode(frame(name)).ext_fields or {}
            ours = recorder.of(code)[0].ext_fields or {}
            assert recorded["k"] == "false"
            assert ours["k"] == str(unit_mode).lower()
            assert ours.keys() >= recorded.keys() - {"ReqT"}


@virtual_time()
async def test_each_kind_of_consumer_says_in_heartbeats_that_it_is_in_unit_mode(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as world:
        recorder = Recorder()
        session = world.session(hooks=[recorder], unit_name="unit1", unit_mode=True)
        async with Producer("p", session=session) as producer:
            await producer.send(Message("T", b"x"))
            async with (
                PullConsumer("pull", session=session) as pulling,
                LitePullConsumer("lite", session=session, subscriptions={"T": "*"}),
                consuming(world, Seen(), group="push", session=session),
            ):
                await pulling.queues("T")
                await session.heartbeat()
        beats = [Heartbeat.decode(whole_body(each)) for each in recorder.of(RequestCode.HEART_BEAT)]
        assert {beat.client_id for beat in beats} == {"10.0.1.1@test@unit1"}
        found = {
            (data.group_name, data.unit_mode) for beat in beats for data in beat.consumer_data_set
        }
        assert found == {("pull", True), ("lite", True), ("push", True)}


@virtual_time()
async def test_a_message_that_is_sent_again_says_that_it_is_from_a_unit(tmp_path: Path) -> None:
    def refuse(_: str, command: Command) -> None:
        if command.code == RequestCode.CONSUMER_SEND_MSG_BACK:
            raise ConnectFailed("as the test wants it")

    async with cluster(tmp_path) as world:
        recorder, seen = Recorder(refuse=refuse), Seen(RETRY)
        async with Producer("p", session=world.session()) as producer:
            await producer.send(Message("T", b"x"))
        session = world.session("10.0.1.2", hooks=[recorder], unit_mode=True)
        async with consuming(world, seen, session=session):
            await wait_until(lambda: bool(recorder.of(RequestCode.SEND_MESSAGE_V2)))
            await sleep_ms(100)
        (sent,) = recorder.of(RequestCode.SEND_MESSAGE_V2)
        assert (sent.ext_fields or {})["k"] == "true"
