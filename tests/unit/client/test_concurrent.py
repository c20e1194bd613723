"""Concurrent delivery: every result of a listener, and what happens to its messages."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brokers import SMALL_STORE
from clusters import Cluster, Recorder, cluster
from consumers import Seen, always, committed, consuming, send, sleep_ms
from turbopump.client.delivery.results import (
    Answer,
    ConsumeContext,
    ConsumeOutcome,
    ConsumeResult,
    GiveUp,
    RetryLater,
)
from turbopump.client.push_config import FlowLimits, Pulling
from turbopump.errors import ConnectFailed
from turbopump.message import MessageQueue
from turbopump.testing import virtual_time, wait_until
from turbopump.wire.bodies import GroupConfig
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import Command
from turbopump.wire.headers import SendBack
from turbopump.wire.record import MessageView

QUEUE = MessageQueue("T", "a", 0)
LEVELS = (1000,) * 18
BACK = RequestCode.CONSUMER_SEND_MSG_BACK


def bodies(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def fail_first(times: int) -> Any:
    """Fail every message n times."""

    def decide(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        tried = messages[0].reconsume_times
        return ConsumeResult.RETRY_LATER if tried < times else ConsumeResult.SUCCESS

    return decide


@virtual_time()
async def test_a_failed_message_is_redelivered_after_ten_seconds(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"x"], to=QUEUE)
        seen = Seen(fail_first(1))
        async with consuming(world, seen):
            await wait_until(lambda: seen.count == 2, 60)
        first, second = seen.messages
        assert (first.topic, second.topic) == ("T", "T")
        assert second.reconsume_times == 1
        assert first.message_id == second.message_id
        assert 10_000 <= seen.times_ms[1] - seen.times_ms[0] < 12_000
        assert await committed(world) == 1
        assert await committed(world, topic="%RETRY%g") == 1


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("orderly", [False, True])
@virtual_time()
async def test_a_listener_may_change_its_list(
    tmp_path: Path, orderly: bool, is_async: bool
) -> None:
    bodies_seen: list[bytes] = []

    def plain(messages: list[MessageView], context: ConsumeContext) -> ConsumeResult:
        while messages:
            bodies_seen.append(messages.pop(0).body)
        return ConsumeResult.SUCCESS

    async def coroutine(messages: list[MessageView], context: ConsumeContext) -> ConsumeResult:
        return plain(messages, context)

    async with cluster(tmp_path) as world:
        await send(world, bodies(20), to=QUEUE)
        listener = coroutine if is_async else plain
        async with consuming(world, listener, orderly=orderly, batch_size=8):
            await wait_until(lambda: len(bodies_seen) == 20)
        assert sorted(bodies_seen) == sorted(bodies(20))
        assert await committed(world) == 20


@pytest.mark.parametrize("answer", ["none", "raise", "later"])
@virtual_time()
async def test_raising_or_returning_none_means_redelivery(
    tmp_path: Path, answer: str, caplog: pytest.LogCaptureFixture
) -> None:
    def decide(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult | None:
        if messages[0].reconsume_times:
            return ConsumeResult.SUCCESS
        if answer == "raise":
            raise RuntimeError("no")
        return None if answer == "none" else ConsumeResult.RETRY_LATER

    async with cluster(tmp_path) as world:
        await send(world, [b"x"], to=QUEUE)
        seen = Seen(decide)
        async with consuming(world, seen):
            await wait_until(lambda: seen.count == 2, 60)
        assert ("listener of g" in caplog.text) == (answer != "later")


@virtual_time()
async def test_a_plain_function_runs_in_threads(tmp_path: Path) -> None:
    got: list[bytes] = []

    def listen(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        got.extend(message.body for message in messages)
        assert context.queue.topic == "T"
        if messages[0].body == b"7" and not messages[0].reconsume_times:
            raise RuntimeError("seven")
        return ConsumeResult.SUCCESS

    async with cluster(tmp_path) as world:
        await send(world, bodies(20))
        async with consuming(world, listen) as consumer:
            await wait_until(lambda: len(got) == 21, 60)
            consumer.resize(3)
        assert sorted(got) == sorted([*bodies(20), b"7"])
        offsets = [await committed(world, number) or 0 for number in range(4)]
        assert sum(offsets) == 20


@virtual_time()
async def test_a_part_of_a_batch_can_succeed(tmp_path: Path) -> None:
    def decide(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        context.acknowledged = 3
        context.delay_level = 1
        return ConsumeResult.SUCCESS

    async with cluster(tmp_path) as world:
        await send(world, bodies(5), to=QUEUE)
        seen = Seen(decide)
        async with consuming(world, seen, batch_size=5):
            await wait_until(lambda: seen.count == 7, 60)
            await sleep_ms(60_000)
        assert seen.batches[0] == 5
        assert sorted(seen.bodies[5:]) == [b"3", b"4"]
        assert seen.times_ms[1] - seen.times_ms[0] < 3000


@pytest.mark.parametrize(("own_limit", "calls"), [(None, 2), (0, 1), (3, 4)])
@virtual_time()
async def test_the_limit_of_the_group_applies_unless_the_consumer_names_one(
    tmp_path: Path, own_limit: int | None, calls: int
) -> None:
    async with cluster(tmp_path) as world:
        await world.brokers["a"].state.groups.update(GroupConfig(group_name="g", retry_max_times=1))
        await send(world, [b"x"], to=QUEUE)
        seen = Seen(always(ConsumeResult.RETRY_LATER))
        async with consuming(world, seen, max_attempts=own_limit):
            await wait_until(lambda: dead_letters(world) == 1, 3600)
        assert seen.count == calls


@virtual_time()
async def test_giving_up_dead_letters_immediately(tmp_path: Path) -> None:
    def decide(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        context.delay_level = -1
        return ConsumeResult.RETRY_LATER

    async with cluster(tmp_path) as world:
        await send(world, [b"x"], to=QUEUE)
        seen = Seen(decide)
        async with consuming(world, seen):
            await wait_until(lambda: dead_letters(world) == 1, 60)
        assert seen.count == 1


@pytest.mark.parametrize("is_raised", [True, False])
@virtual_time()
async def test_retry_later_and_give_up_may_be_raised_or_returned(
    tmp_path: Path, *, is_raised: bool
) -> None:
    loop = asyncio.get_running_loop()
    times: dict[bytes, list[float]] = {b"later": [], b"never": []}

    def listen(messages: Sequence[MessageView], context: ConsumeContext) -> Answer:
        (message,) = messages
        times[message.body].append(loop.time())
        outcome = RetryLater(60) if message.body == b"later" else GiveUp()
        if message.reconsume_times:
            return ConsumeResult.SUCCESS
        if is_raised:
            raise outcome
        return outcome

    async with cluster(tmp_path) as world:
        await send(world, [b"later", b"never"], to=QUEUE)
        async with consuming(world, listen):
            await wait_until(lambda: len(times[b"later"]) == 2, 120)
            assert dead_letters(world) == 1
    assert len(times[b"never"]) == 1
    first, second = times[b"later"]
    assert 60 <= second - first < 62


def dead_letters(world: Cluster, group: str = "g") -> int:
    return world.brokers["a"].store.queue_range(f"%DLQ%{group}", 0)[1]


@pytest.mark.parametrize(("limit", "calls"), [(None, 17), (2, 3), (0, 1)])
@virtual_time()
async def test_a_message_is_retried_sixteen_times_then_dead_lettered(
    tmp_path: Path, limit: int | None, calls: int
) -> None:
    async with cluster(tmp_path, store=replace(SMALL_STORE, delay_levels=LEVELS)) as world:
        await send(world, [b"x"], to=QUEUE)
        seen = Seen(always(ConsumeResult.RETRY_LATER))
        async with consuming(world, seen, max_attempts=limit):
            await wait_until(lambda: dead_letters(world) == 1, 300)
            await sleep_ms(30_000)
        assert [message.reconsume_times for message in seen.messages] == list(range(calls))
        assert {message.topic for message in seen.messages} == {"T"}


@virtual_time()
async def test_the_lowest_unfinished_offset_is_committed(tmp_path: Path) -> None:
    held = asyncio.Event()

    async def listen(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        if messages[0].body == b"3":
            await held.wait()
        return ConsumeResult.SUCCESS

    async with cluster(tmp_path) as world:
        await send(world, bodies(10), to=QUEUE)
        async with consuming(world, listen) as consumer:
            await sleep_ms(20_000)
            assert await committed(world) == 3
            held.set()
            await sleep_ms(6000)
            assert await committed(world) == 10
            assert len(consumer.assignment()) == 5


@virtual_time()
async def test_a_stuck_message_stops_pulling_at_the_span(tmp_path: Path) -> None:
    held = asyncio.Event()
    seen: set[bytes] = set()

    async def listen(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        seen.add(messages[0].body)
        if messages[0].body == b"0":
            await held.wait()
        return ConsumeResult.SUCCESS

    async with cluster(tmp_path) as world:
        await send(world, bodies(200), to=QUEUE)
        async with consuming(world, listen, flow=FlowLimits(span=50)):
            await sleep_ms(60_000)
            # No pull asks for messages beyond the span.
            assert 50 < len(seen) <= 50 + 2
            held.set()
            await wait_until(lambda: len(seen) == 200)


@virtual_time()
async def test_memory_stays_bounded_while_the_listener_is_stuck(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(300), to=QUEUE)
        seen = Seen()
        seen.hold.clear()
        limits = FlowLimits(messages_per_queue=100)
        async with consuming(world, seen, flow=limits, concurrency=4) as consumer:
            await sleep_ms(300_000)
            info = await consumer.running_info(with_stacks=False)
            assert 100 < info.mq_table[QUEUE].cached_msg_count <= 132
            assert seen.running_max == 4
            assert seen.count == 4, "a queue that is intentionally full is not restarted"
            seen.hold.set()
            await wait_until(lambda: seen.count == 300)


@virtual_time()
async def test_the_limit_of_a_topic_is_shared_by_its_queues(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(400))
        seen = Seen()
        seen.hold.clear()
        async with consuming(world, seen, flow=FlowLimits(messages_per_topic=80)) as consumer:
            await sleep_ms(60_000)
            info = await consumer.running_info(with_stacks=False)
            counts = [each.cached_msg_count for each in info.mq_table.values()]
            assert max(counts) <= 20 + 32
            seen.hold.set()


@virtual_time()
async def test_a_message_stuck_for_fifteen_minutes_is_sent_back(tmp_path: Path) -> None:
    held = asyncio.Event()
    times: list[int] = []

    async def listen(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        times.append(messages[0].reconsume_times)
        if messages[0].body == b"0" and not messages[0].reconsume_times:
            await held.wait()
        return ConsumeResult.SUCCESS

    async with cluster(tmp_path) as world, consuming(world, listen):
        # Not when the consumer starts to check, or an interval of 15 minutes would do.
        await sleep_ms(5 * 60_000)
        await send(world, bodies(3), to=QUEUE)
        await wait_until(lambda: len(times) == 3)
        await sleep_ms(14 * 60_000)
        assert await committed(world) == 0
        await sleep_ms(2 * 60_000 + 15_000)
        assert sorted(times) == [0, 0, 0, 1]
        assert await committed(world) == 3
        held.set()


@virtual_time()
async def test_a_message_that_fails_after_it_was_sent_back_is_redelivered_once(
    tmp_path: Path,
) -> None:
    held = asyncio.Event()
    times: list[int] = []

    async def listen(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        times.append(messages[0].reconsume_times)
        if messages[0].reconsume_times:
            return ConsumeResult.SUCCESS
        await held.wait()
        return ConsumeResult.RETRY_LATER

    async with cluster(tmp_path) as world, consuming(world, listen):
        await send(world, [b"x"], to=QUEUE)
        await wait_until(lambda: len(times) == 2, 20 * 60)
        held.set()
        await sleep_ms(5 * 60_000)
        assert times == [0, 1]


class Failing(Recorder):
    """Rejects some codes."""

    def __init__(self, *codes: int) -> None:
        super().__init__()
        self.codes = set(codes)

    def before_request(self, address: str, command: Command) -> Command:
        super().before_request(address, command)
        if command.code in self.codes:
            raise ConnectFailed("as the test wants it")
        return command


@virtual_time()
async def test_a_message_that_cannot_be_sent_back_is_resent(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"x"], to=QUEUE)
        seen, failing = Seen(fail_first(1)), Failing(BACK)
        session = world.session(hooks=[failing])
        async with consuming(world, seen, session=session):
            await wait_until(lambda: seen.count == 2, 60)
        first, second = seen.messages
        assert (second.topic, second.reconsume_times, second.body) == ("T", 1, b"x")
        assert second.properties["ORIGIN_MESSAGE_ID"] == first.message_id
        assert 10_000 <= seen.times_ms[1] - seen.times_ms[0] < 12_000
        assert await committed(world) == 1


@virtual_time()
async def test_a_message_no_broker_accepts_is_retried_locally_after_five_seconds(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"x"], to=QUEUE)
        seen, failing = Seen(fail_first(2)), Failing(BACK, RequestCode.SEND_MESSAGE_V2)
        async with consuming(world, seen, session=world.session(hooks=[failing])):
            await wait_until(lambda: seen.count == 3, 60)
        assert [message.reconsume_times for message in seen.messages] == [0, 1, 2]
        gaps = [seen.times_ms[1] - seen.times_ms[0], seen.times_ms[2] - seen.times_ms[1]]
        assert all(5000 <= gap < 5100 for gap in gaps)
        assert await committed(world) == 1


@virtual_time()
async def test_send_back_requests_name_the_position_and_the_limit(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"x"], to=QUEUE)
        seen, recorder = Seen(fail_first(1)), Recorder()
        session = world.session(hooks=[recorder])
        async with consuming(world, seen, session=session, max_attempts=5):
            await wait_until(lambda: seen.count == 2, 60)
        (asked,) = [SendBack.from_ext_fields(each.ext_fields) for each in recorder.of(BACK)]
        assert (asked.group, asked.origin_topic, asked.max_reconsume_times) == ("g", "T", 5)
        assert asked.offset == seen.messages[0].physical_offset
        assert asked.origin_msg_id == seen.messages[0].message_id


class Hook:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.outcomes: list[ConsumeOutcome | None] = []

    def before_consume(self, messages: Sequence[MessageView], context: ConsumeContext) -> None:
        self.events.append(f"before {len(messages)}")
        raise RuntimeError("a hook's failure is only logged")

    def after_consume(
        self, messages: Sequence[MessageView], context: ConsumeContext, result: ConsumeResult
    ) -> None:
        self.events.append(f"after {result.name}")
        self.outcomes.append(context.outcome)


@virtual_time()
async def test_hooks_see_every_call(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"x"], to=QUEUE)
        seen, hook = Seen(fail_first(1)), Hook()
        async with consuming(world, seen, hooks=[hook]):
            await wait_until(lambda: seen.count == 2, 60)
            await sleep_ms(10)
        assert hook.events == ["before 1", "after RETRY_LATER", "before 1", "after SUCCESS"]
        assert hook.outcomes == [ConsumeOutcome.FAILED, ConsumeOutcome.SUCCESS]


@virtual_time()
async def test_hooks_see_exceptions_missing_results_and_timeouts(tmp_path: Path) -> None:
    async def listen(messages: list[MessageView], _: ConsumeContext) -> Any:
        if messages[0].reconsume_times:
            return ConsumeResult.SUCCESS
        match messages[0].body:
            case b"none":
                return None
            case b"slow":
                await asyncio.sleep(16 * 60)
                return ConsumeResult.SUCCESS
            case _:
                raise ValueError

    found = {}
    for body in (b"none", b"slow", b"error"):
        async with cluster(tmp_path / body.decode()) as world:
            await send(world, [body], to=QUEUE)
            hook = Hook()
            async with consuming(world, listen, hooks=[hook]):
                await sleep_ms(17 * 60_000)
            found[body] = set(hook.outcomes)
    assert found == {
        b"none": {ConsumeOutcome.NONE_RETURNED, ConsumeOutcome.SUCCESS},
        b"slow": {ConsumeOutcome.TIMED_OUT, ConsumeOutcome.SUCCESS},
        b"error": {ConsumeOutcome.EXCEPTION, ConsumeOutcome.SUCCESS},
    }


class OnlyOdd:
    def keeps(self, group: str, message: MessageView, queue: MessageQueue) -> bool:
        assert group == "g"
        assert queue == QUEUE
        if message.body == b"exit":
            sys.exit("not today")
        # Fails for "bad", which is delivered.
        return int(message.body) % 2 == 1


@pytest.mark.parametrize("orderly", [False, True])
@virtual_time()
async def test_a_filter_hook_chooses_among_pulled_messages(tmp_path: Path, orderly: bool) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"0", b"1", b"bad", b"2", b"3", b"exit", b"4"], to=QUEUE)
        seen = Seen()
        async with consuming(world, seen, hooks=[OnlyOdd()], orderly=orderly):
            await wait_until(lambda: seen.count == 4)
            await sleep_ms(25_000)
            assert await committed(world) == 7
        assert seen.bodies == [b"1", b"bad", b"3", b"exit"]


@virtual_time()
async def test_a_backlog_that_a_filter_hook_skips_is_committed_meanwhile(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"0"] * 40, to=QUEUE)
        seen, pulling = Seen(), Pulling(batch_size=1, interval=1)
        async with consuming(world, seen, hooks=[OnlyOdd()], pulling=pulling):
            await sleep_ms(20_000)
            assert 10 <= (await committed(world) or 0) < 40
        assert seen.bodies == []


@virtual_time()
async def test_batches_hold_up_to_the_configured_number(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(40), to=QUEUE)
        seen = Seen()
        async with consuming(world, seen, batch_size=10):
            await wait_until(lambda: seen.count == 40)
        assert max(seen.batches) == 10
        assert seen.bodies == bodies(40)
