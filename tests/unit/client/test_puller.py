"""Pulling: which requests go where, and how long to wait after errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from clusters import Cluster, Recorder, cluster
from consumers import Seen, consuming, make_topic, send, sleep_ms
from turbopump.client.delivery.results import ConsumeContext, ConsumeResult
from turbopump.client.push_config import FlowLimits, Listening
from turbopump.client.push_consumer import PushConsumer
from turbopump.errors import ConnectFailed, RemoteError
from turbopump.message import Message, MessageQueue
from turbopump.testing import Cluster as Whole
from turbopump.testing import virtual_time, wait_until
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command
from turbopump.wire.headers import PullMessage
from turbopump.wire.record import MessageView
from turbopump.wire.sysflag import PULL_COMMIT_OFFSET, PULL_SUSPEND

QUEUE = MessageQueue("T", "a", 0)


class PullTimes(Recorder):
    """Records when the queue was pulled, and fails the first pulls."""

    def __init__(self, world: Cluster, *errors: Exception) -> None:
        super().__init__()
        self._clock = world.clock
        self._errors = list(errors)
        self.times_ms: list[int] = []
        self.pulls: list[PullMessage] = []

    def before_request(self, address: str, command: Command) -> Command:
        if command.code == RequestCode.PULL_MESSAGE:
            asked = PullMessage.from_ext_fields(command.ext_fields)
            if (asked.topic, asked.queue_id) == ("T", 0):
                self.times_ms.append(self._clock.monotonic_ms())
                self.pulls.append(asked)
                if self._errors:
                    raise self._errors.pop(0)
        return command


@pytest.mark.parametrize(
    ("error", "pause_ms"),
    [(RemoteError(215, "slower"), 20), (RemoteError(1, "no"), 1000), (ConnectFailed("no"), 1000)],
    ids=["flow-control", "other-code", "network"],
)
@virtual_time()
async def test_how_long_to_wait_after_an_error(
    tmp_path: Path, error: Exception, pause_ms: int
) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"x"], to=QUEUE)
        seen, pulls = Seen(), PullTimes(world, error, error)
        async with consuming(world, seen, session=world.session(hooks=[pulls])):
            await wait_until(lambda: seen.count == 1)
        first, second, third = pulls.times_ms[:3]
        assert (second - first, third - second) == (pause_ms, pause_ms)


@virtual_time()
async def test_a_broker_that_is_down_is_one_warning_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tmp_path) as world:
        session = world.session(instance="shared")
        first, second = (
            consuming(world, Seen(), group=group, session=session) for group in ("g", "h")
        )
        await send(world, [b"x"])
        async with first, second:
            await sleep_ms(30_000)
            caplog.set_level(logging.WARNING, "turbopump.client")
            await world.crash("a")
            caplog.clear()
            await sleep_ms(240_000)
            down = [record.message for record in caplog.records]
            await world.start_broker("a")
    assert down
    assert all("connection refused" in text for text in down if "logged once" in text)
    assert 1 <= sum("logged once a minute for each broker" in text for text in down) <= 4, down
    assert not [text for text in down if "logged once" not in text and "10.0.0" in text]


@virtual_time()
async def test_a_failing_pull_is_one_warning_a_minute_and_queue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"x"], to=QUEUE)
        pulls = PullTimes(world, *[RemoteError(1, "no")] * 65)
        async with consuming(world, Seen(), session=world.session(hooks=[pulls])):
            await sleep_ms(70_000)
    logged = [each for each in caplog.records if "pulling" in each.message]
    assert [(each.levelname, each.message) for each in logged] == [
        ("WARNING", f"pulling {QUEUE} for g: code 1: no")
    ] * 2


LIMITS = {
    "unfinished messages (limit 5)": FlowLimits(messages_per_queue=5),
    "unfinished bytes (limit 1048576)": FlowLimits(mebibytes_per_queue=1),
    "offsets after the oldest unfinished message (limit 5)": FlowLimits(span=5),
}


@pytest.mark.parametrize("said", LIMITS)
@virtual_time()
async def test_flow_control_is_logged_once_a_minute_and_queue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, said: str
) -> None:
    caplog.set_level(logging.INFO, "turbopump.client.puller")
    async with cluster(tmp_path) as world:
        await send(world, [Random(1).randbytes(300_000)] * 10, to=QUEUE)
        seen = Seen()
        seen.hold.clear()
        async with consuming(world, seen, flow=LIMITS[said]) as consumer:
            await sleep_ms(10_000)
            for _ in range(2):
                # Each time, the puller finds no room again.
                consumer.suspend()
                await sleep_ms(20_000)
                consumer.resume()
                await sleep_ms(20_000)
            seen.hold.set()
    logged = [each.message for each in caplog.records if "pauses" in each.message]
    assert 1 <= len(logged) <= 2, logged
    assert f"pulling {QUEUE} for g pauses: " in logged[0]
    assert said in logged[0]


@virtual_time()
async def test_flow_control_by_the_broker_is_logged_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "turbopump.client.puller")
    async with cluster(tmp_path) as world:
        await send(world, [b"x"], to=QUEUE)
        pulls = PullTimes(world, *[RemoteError(ResponseCode.FLOW_CONTROL, "slower")] * 50)
        async with consuming(world, Seen(), session=world.session(hooks=[pulls])):
            await sleep_ms(20_000)
    assert [each.message for each in caplog.records if "pauses" in each.message] == [
        f"pulling {QUEUE} for g pauses: slower; logged once a minute for each queue"
    ]


@virtual_time()
async def test_one_pull_is_held_at_a_time(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"x"], to=QUEUE)
        pulls = PullTimes(world)
        async with consuming(world, Seen(), session=world.session(hooks=[pulls])):
            await sleep_ms(61_000)
        assert pulls.pulls[0].suspend_timeout_millis == 15_000
        assert all(each.sys_flag & PULL_SUSPEND for each in pulls.pulls)
        waits = [pulls.times_ms[at + 1] - pulls.times_ms[at] for at in range(1, 4)]
        assert all(15_000 <= wait <= 20_100 for wait in waits)


@virtual_time()
async def test_pulls_carry_the_committed_offset(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"x"], to=QUEUE)
        seen, pulls = Seen(), PullTimes(world)
        async with consuming(world, seen, session=world.session(hooks=[pulls])):
            await wait_until(lambda: seen.count == 1)
            await send(world, [b"y"], to=QUEUE)
            await wait_until(lambda: seen.count == 2)
            last = pulls.pulls[-1]
            assert (last.sys_flag & PULL_COMMIT_OFFSET, last.commit_offset) == (1, 1)


@virtual_time()
async def test_listeners_are_called_before_a_pull_that_only_waits(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        pulls = PullTimes(world)
        pulls_before_call: list[int] = []

        async def listen(messages: Sequence[MessageView], _: ConsumeContext) -> ConsumeResult:
            if messages[0].queue_id == QUEUE.queue_id:
                pulls_before_call.append(len(pulls.pulls))
            return ConsumeResult.SUCCESS

        async with consuming(world, listen, session=world.session(hooks=[pulls])):
            await wait_until(lambda: len(pulls.pulls) == 1)
            await send(world, [b"x"], to=QUEUE)
            await wait_until(lambda: len(pulls.pulls) == 2)
        assert pulls_before_call == [1]


@virtual_time()
async def test_a_broadcasting_consumer_commits_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"x"], to=QUEUE)
        seen, pulls = Seen(), PullTimes(world)
        session = world.session(hooks=[pulls])
        async with consuming(
            world, seen, session=session, broadcast=True, offsets_directory=tmp_path
        ):
            await wait_until(lambda: seen.count == 1)
            await send(world, [b"y"], to=QUEUE)
            await wait_until(lambda: seen.count == 2)
        assert not any(each.sys_flag & PULL_COMMIT_OFFSET for each in pulls.pulls)


@virtual_time()
async def test_a_queue_that_lost_its_end_is_continued_at_the_first_unfinished_message(
    tmp_path: Path,
) -> None:
    calls: list[bytes] = []

    async def listen(messages: Sequence[MessageView], _: ConsumeContext) -> ConsumeResult:
        body = messages[0].body
        calls.append(body)
        if body == b"2" and calls.count(body) == 1:
            await asyncio.sleep(600)
        return ConsumeResult.SUCCESS

    async with Whole(tmp_path) as world:
        await world.make_topic("T", queues=1)
        async with PushConsumer(
            "g", listen, subscriptions={"T": "*"}, start_from="first", session=world.session(),
            listening=Listening(close_wait=0),
        ):  # fmt: skip
            await world.send(*(Message("T", b"%d" % number) for number in range(5)))
            await world.advance(seconds=15)
            await world.send(Message("T", b"5"))
            await world.until(lambda: b"5" in calls)
            await world.crash(lose_unflushed=True)
            await world.start_broker()
            await world.until(lambda: calls.count(b"2") == 2)
            await world.until_consumed("g")
