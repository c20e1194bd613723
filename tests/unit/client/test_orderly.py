"""Orderly delivery: the queue's order across retries, under the broker's lock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from clusters import Cluster, Recorder, cluster
from consumers import Seen, always, committed, consuming, send, sleep_ms
from turbopump.client.delivery.results import (
    Answer,
    ConsumeContext,
    ConsumeResult,
    GiveUp,
    RetryLater,
)
from turbopump.client.push_config import Listening
from turbopump.errors import ConnectFailed, RemoteError, TurbopumpError
from turbopump.message import MessageQueue
from turbopump.testing import virtual_time, wait_until
from turbopump.wire.bodies import LockQueues
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request, whole_body
from turbopump.wire.record import MessageView

QUEUE = MessageQueue("T", "a", 0)
LATER = ConsumeResult.RETRY_LATER


def bodies(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def dead_letters(world: Cluster) -> int:
    return world.brokers["a"].store.queue_range("%DLQ%g", 0)[1]


async def lock_as_another(world: Cluster, queue: MessageQueue = QUEUE) -> None:
    """Take the lock of a queue for a client that does not exist."""
    body = LockQueues(client_id="another", consumer_group="g", queues=[queue]).encode()
    async with world.session("10.0.9.7") as session:
        command = request(RequestCode.LOCK_BATCH_MQ, body=body)
        await session.request(world.brokers["a"].address, command, 3000)


@pytest.mark.parametrize("batch_size", [1, 3])
@virtual_time()
async def test_messages_of_a_queue_are_delivered_in_order_one_call_at_a_time(
    tmp_path: Path, batch_size: int
) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(200), to=QUEUE)
        seen = Seen()
        async with consuming(world, seen, orderly=True, batch_size=batch_size):
            await wait_until(lambda: seen.count == 200)
        assert seen.bodies == bodies(200)
        assert seen.running_max == 1
        assert max(seen.batches) == batch_size
        assert await committed(world) == 200


@virtual_time()
async def test_plain_functions_see_the_order_too(tmp_path: Path) -> None:
    got: list[bytes] = []
    failed: list[bytes] = []

    def listen(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        if messages[0].body == b"50" and not failed:
            failed.append(b"50")
            return LATER
        got.append(messages[0].body)
        return ConsumeResult.SUCCESS

    async with cluster(tmp_path) as world:
        await send(world, bodies(100), to=QUEUE)
        async with consuming(world, listen, orderly=True):
            await wait_until(lambda: len(got) == 100, 60)
        assert got == bodies(100)
        assert await committed(world) == 100


@virtual_time()
async def test_a_failed_message_suspends_its_queue(tmp_path: Path) -> None:
    def decide(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        if messages[0].body == b"2" and messages[0].reconsume_times < 3:
            context.suspend = 5 if messages[0].reconsume_times == 2 else None
            return LATER
        return ConsumeResult.SUCCESS

    async with cluster(tmp_path) as world:
        await send(world, bodies(5), to=QUEUE)
        seen = Seen(decide)
        async with consuming(world, seen, orderly=True):
            await wait_until(lambda: seen.count == 8, 60)
        assert seen.bodies == [b"0", b"1", b"2", b"2", b"2", b"2", b"3", b"4"]
        assert [message.reconsume_times for message in seen.messages[2:6]] == [0, 1, 2, 3]
        gaps = [seen.times_ms[at + 1] - seen.times_ms[at] for at in (2, 3, 4)]
        assert gaps[:2] == [1000, 1000]
        assert 5000 <= gaps[2] < 5010


@virtual_time()
async def test_other_queues_continue_while_one_is_suspended(tmp_path: Path) -> None:
    def decide(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        return LATER if context.queue.queue_id == 0 else ConsumeResult.SUCCESS

    async with cluster(tmp_path) as world:
        for number in range(4):
            await send(world, bodies(3), to=MessageQueue("T", "a", number))
        seen = Seen(decide)
        async with consuming(world, seen, orderly=True):
            await sleep_ms(10_000)
        assert await committed(world, 0) == 0
        assert [await committed(world, number) for number in (1, 2, 3)] == [3, 3, 3]


@pytest.mark.parametrize("is_raised", [True, False])
@virtual_time()
async def test_retry_later_pauses_the_queue_and_give_up_dead_letters_at_once(
    tmp_path: Path, *, is_raised: bool
) -> None:
    loop = asyncio.get_running_loop()
    calls: list[tuple[bytes, float]] = []

    async def listen(messages: Sequence[MessageView], context: ConsumeContext) -> Answer:
        (message,) = messages
        calls.append((message.body, loop.time()))
        outcomes: dict[bytes, RetryLater | GiveUp] = {b"0": RetryLater(7), b"1": GiveUp("wrong")}
        outcome = None if message.reconsume_times else outcomes.get(message.body)
        if outcome is not None and is_raised:
            raise outcome
        return outcome or ConsumeResult.SUCCESS

    async with cluster(tmp_path) as world:
        await send(world, bodies(3), to=QUEUE)
        async with consuming(world, listen, orderly=True):
            await wait_until(lambda: len(calls) == 4, 60)
            assert dead_letters(world) == 1
    assert [body for body, _ in calls] == [b"0", b"0", b"1", b"2"]
    assert 7 <= calls[1][1] - calls[0][1] < 8


@virtual_time()
async def test_a_message_retried_too_often_is_dead_lettered_and_the_queue_continues(
    tmp_path: Path,
) -> None:
    def decide(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        return LATER if messages[0].body == b"1" else ConsumeResult.SUCCESS

    async with cluster(tmp_path) as world:
        await send(world, bodies(3), to=QUEUE)
        seen = Seen(decide)
        settings: dict[str, Any] = {
            "max_attempts": 2,
            "listening": Listening(suspend=0.1),
        }
        async with consuming(world, seen, orderly=True, **settings):
            await wait_until(lambda: seen.count == 5, 60)
            # At once, as soon as the message after it is delivered.
            assert dead_letters(world) == 1
        assert seen.bodies == [b"0", b"1", b"1", b"1", b"2"]
        assert await committed(world) == 3


@virtual_time()
async def test_in_a_batch_only_messages_with_retries_left_are_redelivered(tmp_path: Path) -> None:
    calls: list[list[bytes]] = []

    async def listen(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        calls.append([message.body for message in messages])
        return LATER if len(calls) < 2 else ConsumeResult.SUCCESS

    async with cluster(tmp_path) as world:
        await send(world, bodies(2), to=QUEUE)
        settings: dict[str, Any] = {
            "batch_size": 2,
            "max_attempts": 0,
        }
        async with consuming(world, listen, orderly=True, **settings):
            await wait_until(lambda: dead_letters(world) == 2, 60)
            await sleep_ms(6000)
        assert calls == [[b"0", b"1"]]
        assert await committed(world) == 2


@virtual_time()
async def test_manual_commits(tmp_path: Path) -> None:
    def decide(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        context.auto_commit = False
        return ConsumeResult.COMMIT if messages[0].body == b"2" else ConsumeResult.SUCCESS

    async with cluster(tmp_path) as world:
        await send(world, bodies(5), to=QUEUE)
        seen = Seen(decide)
        async with consuming(world, seen, orderly=True):
            await wait_until(lambda: seen.count == 5)
        assert await committed(world) == 3, "messages after the commit are not finished"


@virtual_time()
async def test_rolling_back_redelivers_everything_since_the_last_commit(tmp_path: Path) -> None:
    rolled: list[bytes] = []

    def decide(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        context.auto_commit = False
        body = messages[0].body
        if body == b"1":
            return ConsumeResult.COMMIT
        if body == b"4" and not rolled:
            rolled.append(body)
            return ConsumeResult.ROLLBACK
        return ConsumeResult.COMMIT if body == b"4" else ConsumeResult.SUCCESS

    async with cluster(tmp_path) as world:
        await send(world, bodies(5), to=QUEUE)
        seen = Seen(decide)
        async with consuming(world, seen, orderly=True):
            await wait_until(lambda: seen.count == 8)
            await sleep_ms(10)
        assert seen.bodies == [b"0", b"1", b"2", b"3", b"4", b"2", b"3", b"4"]
        assert seen.times_ms[5] - seen.times_ms[4] == 1000
        assert await committed(world) == 5


@virtual_time()
async def test_rolling_back_with_automatic_commits_acknowledges_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(3), to=QUEUE)
        seen = Seen(always(ConsumeResult.ROLLBACK))
        async with consuming(world, seen, orderly=True) as consumer:
            await wait_until(lambda: seen.count == 3)
            await sleep_ms(10_000)
            rates = (await consumer.running_info(with_stacks=False)).status_table["T"]
        assert (seen.count, await committed(world)) == (3, 3)
        assert (rates.consume_failed_msgs, rates.consume_ok_tps > 0) == (0, True)
        assert caplog.text.count("returned ROLLBACK for T@a:0, which acknowledges") == 1


@virtual_time()
async def test_a_queue_locked_by_another_member_is_awaited(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(3), to=QUEUE)
        await lock_as_another(world)
        seen = Seen()
        async with consuming(world, seen, orderly=True):
            await sleep_ms(55_000)
            assert seen.count == 0
            # The other does not renew: after 60 s the lock is free for the next rebalance.
            await wait_until(lambda: seen.count == 3, 30)


@virtual_time()
async def test_locks_are_renewed_every_twenty_seconds(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(1), to=QUEUE)
        recorder = Recorder()
        session = world.session(hooks=[recorder])
        async with consuming(world, Seen(), orderly=True, session=session):
            recorder.requests.clear()
            await sleep_ms(100_000)
            assert len(recorder.of(RequestCode.LOCK_BATCH_MQ)) == 5
        unlocks = recorder.of(RequestCode.UNLOCK_BATCH_MQ)
        given_back = {
            queue for each in unlocks for queue in LockQueues.decode(whole_body(each)).queues
        }
        assert len(given_back) == 5, "closing releases all locks"


@virtual_time()
async def test_without_a_fresh_lock_nothing_is_consumed(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(1), to=QUEUE)
        seen, recorder = Seen(), Recorder()

        def refuse(address: str, command: Command) -> None:
            if command.code == RequestCode.LOCK_BATCH_MQ:
                raise ConnectFailed("as the test wants it")

        session = world.session(hooks=[recorder])
        async with consuming(world, seen, orderly=True, session=session):
            await wait_until(lambda: seen.count == 1)
            recorder.refuse = refuse
            await sleep_ms(31_000)
            await send(world, [b"later"], to=QUEUE)
            await sleep_ms(30_000)
            assert seen.count == 1
            recorder.refuse = None
            await wait_until(lambda: seen.count == 2, 25)


@virtual_time()
async def test_a_lost_queue_waits_for_its_running_listener(tmp_path: Path) -> None:
    """The other member starts only when the lock is released: order holds across members."""
    async with cluster(tmp_path) as world:
        for number in range(4):
            await send(world, bodies(3), to=MessageQueue("T", "a", number))
        first, second = Seen(), Seen()
        first.hold.clear()
        async with consuming(world, first, "10.0.1.1", orderly=True) as one:
            await wait_until(lambda: first.running == 4)
            async with consuming(world, second, "10.0.1.2", orderly=True) as two:
                await sleep_ms(30_000)
                assert second.count == 0
                assert two.assignment() == []
                first.hold.set()
                await wait_until(lambda: second.count == 6, 120)
                shares = [one.assignment(), two.assignment()]
                topics = [[queue for queue in share if queue.topic == "T"] for share in shares]
                assert [len(share) for share in topics] == [2, 2]


@virtual_time()
async def test_a_broadcasting_orderly_consumer_needs_no_lock(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(5), to=QUEUE)
        seen, recorder = Seen(), Recorder()
        async with consuming(
            world,
            seen,
            session=world.session(hooks=[recorder]),
            orderly=True,
            broadcast=True,
            offsets_directory=tmp_path / "offsets",
        ):
            await wait_until(lambda: seen.count == 5)
        assert seen.bodies == bodies(5)
        assert not recorder.of(RequestCode.LOCK_BATCH_MQ)


@virtual_time()
async def test_closing_waits_for_the_running_call(tmp_path: Path) -> None:
    done: list[bytes] = []

    async def listen(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        await asyncio.sleep(3)
        done.append(messages[0].body)
        return ConsumeResult.SUCCESS

    async with cluster(tmp_path) as world:
        await send(world, bodies(2), to=QUEUE)
        async with consuming(world, listen, orderly=True):
            await sleep_ms(1000)
        assert done == [b"0"]
        assert await committed(world) == 1


@pytest.mark.parametrize(
    "error",
    [
        ConnectFailed("as the test wants it"),
        RemoteError(ResponseCode.SERVICE_NOT_AVAILABLE, "this broker was promoted"),
    ],
)
@virtual_time()
async def test_an_error_does_not_count_as_a_rejected_renewal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: TurbopumpError
) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(1), to=QUEUE)
        seen, recorder = Seen(), Recorder()

        def refuse(address: str, command: Command) -> None:
            if command.code == RequestCode.LOCK_BATCH_MQ:
                raise error

        session = world.session(hooks=[recorder])
        async with consuming(world, seen, orderly=True, session=session):
            await sleep_ms(2000)
            recorder.refuse = refuse
            await sleep_ms(25_000)
            await send(world, [b"later"], to=QUEUE)
            await wait_until(lambda: seen.count == 2, 1)
        assert f"no locks for g on a: {error}; without a lock" in caplog.text


@virtual_time()
async def test_a_lock_taken_by_another_member_stops_pulling(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(1), to=QUEUE)
        seen = Seen()
        async with consuming(world, seen, orderly=True) as consumer:
            await wait_until(lambda: seen.count == 1)
            world.network.partition("10.0.1.1", "10.0.0.1")
            await sleep_ms(61_000)
            await lock_as_another(world)
            world.network.heal()
            await sleep_ms(22_000)
            running = consumer._running
            assert running is not None
            assert running.owned[QUEUE].locked_ms is None
            await send(world, [b"later"], to=QUEUE)
            await sleep_ms(10_000)
            assert seen.count == 1
            await wait_until(lambda: seen.count == 2, 60)
