"""What tasks send back reaches its broker with the delay that the function requested."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from clusters import Recorder, cluster
from consumers import send
from turbopump.client.calls import Found
from turbopump.client.config import ClientConfig
from turbopump.client.pull_consumer import PullConsumer
from turbopump.message import MessageQueue
from turbopump.spark.consuming import group_limit
from turbopump.spark.consuming.group_limit import GroupLimit
from turbopump.spark.consuming.handler_runner import DEAD, Returned, SendBack
from turbopump.spark.consuming.message_rows import Delivered
from turbopump.testing import virtual_time
from turbopump.wire.bodies import GroupConfig
from turbopump.wire.codes import RequestCode
from turbopump.wire.names import SCHEDULE_TOPIC

QUEUE = MessageQueue("T", "a", 0)


@virtual_time()
async def test_the_requested_delay_reaches_the_broker(tmp_path: Path) -> None:
    levels = {b"grows": 0, b"first": 1, b"seventh": 7, b"hopeless": DEAD}
    async with cluster(tmp_path) as world:
        await send(world, list(levels), to=QUEUE)
        hook = Recorder()
        session = world.session(hooks=[hook])
        async with PullConsumer("g", session=session) as consumer:
            found = await consumer.pull(QUEUE, 0)
            assert isinstance(found, Found)
            returned = [
                Returned(Delivered(message, "a"), levels[message.body])
                for message in found.messages
            ]
            assert await SendBack(session.config, "g", None)._all(session, returned) == []
            assert all(
                "maxReconsumeTimes" not in (command.ext_fields or {})
                for command in hook.of(RequestCode.CONSUMER_SEND_MSG_BACK)
            ), "the limit of the group holds"
            asked = [
                (command.ext_fields or {})["delayLevel"]
                for command in hook.of(RequestCode.CONSUMER_SEND_MSG_BACK)
            ]
            assert sorted(asked) == sorted(map(str, levels.values()))
            # An increasing delay starts with the third; each level waits in its own queue.
            for body, level in ((b"grows", 3), (b"first", 1), (b"seventh", 7)):
                waiting = await consumer.pull(MessageQueue(SCHEDULE_TOPIC, "a", level - 1), 0)
                assert isinstance(waiting, Found)
                assert [message.body for message in waiting.messages] == [body]
            dead = await consumer.pull(MessageQueue("%DLQ%g", "a", 0), 0)
            assert isinstance(dead, Found)
            assert [message.body for message in dead.messages] == [b"hopeless"]


@virtual_time()
async def test_the_limit_of_a_group_is_that_of_its_brokers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tmp_path, "ab") as world:
        limit = GroupLimit(ClientConfig(world.nameserver), "g")
        assert await limit.read(world.session("10.0.1.2")) == 16, "no broker has the group"
        for broker, most in (("a", 3), ("b", 4)):
            groups = world.brokers[broker].state.groups
            await groups.update(GroupConfig(group_name="g", retry_max_times=most))
        assert await limit.read(world.session("10.0.1.3")) == 4
        away = world.session("10.0.1.4", nameserver="10.9.9.9:9876")
        assert await limit.read(away) == 16
        assert "limit of group g is unknown, 16 assumed" in caplog.text


def test_the_limit_of_a_group_is_asked_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    now_s = 0.0

    def run(_: object) -> int:
        asked.append(1)
        return 7

    known: dict[GroupLimit, tuple[int, float]] = {}
    monkeypatch.setattr(group_limit, "_known", known)
    monkeypatch.setattr(group_limit, "shared_session", lambda _: SimpleNamespace(run=run))
    monkeypatch.setattr(group_limit, "time", SimpleNamespace(monotonic=lambda: now_s))
    limit = GroupLimit(ClientConfig("ns:9876"), "g")
    assert [limit(), limit(), len(asked)] == [7, 7, 1]
    now_s = 61.0
    assert [limit(), len(asked)] == [7, 2]
