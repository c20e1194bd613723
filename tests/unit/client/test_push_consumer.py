"""A push consumer from its start to its close."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import pytest
from msgspec.structs import replace

from clusters import Cluster, Recorder, cluster
from consumers import Seen, committed, consuming, make_topic, send, sleep_ms
from turbopump.broker.config import FiltersConfig
from turbopump.client.config import ClientConfig
from turbopump.client.delivery.results import ConsumeContext, ConsumeResult
from turbopump.client.push_config import FlowLimits, Listening, Pulling
from turbopump.client.push_consumer import PushConsumer
from turbopump.errors import InvalidArgument, NotRunning, RemoteError
from turbopump.message import MessageQueue
from turbopump.testing import virtual_time, wait_until
from turbopump.wire import headers
from turbopump.wire.bodies import Heartbeat
from turbopump.wire.codes import Language, RequestCode
from turbopump.wire.command import whole_body
from turbopump.wire.record import MessageView

QUEUE = MessageQueue("T", "a", 0)
EAST = timezone(timedelta(hours=9))


def bodies(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


# --- life cycle -----------------------------------------------------------------------------------


@virtual_time()
async def test_messages_are_delivered_to_the_listener_and_committed(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(20))
        seen = Seen()
        async with consuming(world, seen):
            await wait_until(lambda: seen.count == 20)
            await send(world, [b"later"])
            await wait_until(lambda: seen.count == 21)
        assert sorted(seen.bodies) == sorted([*bodies(20), b"later"])
        offsets = [await committed(world, queue_id) or 0 for queue_id in range(4)]
        assert sum(offsets) == 21


@virtual_time()
async def test_a_message_is_delivered_within_milliseconds(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        seen = Seen()
        async with consuming(world, seen):
            await wait_until(lambda: seen.count == 1)
            await sleep_ms(20_000)
            await send(world, [b"x"])
            sent_ms = world.clock.monotonic_ms()
            await wait_until(lambda: seen.count == 2)
            assert seen.times_ms[1] - sent_ms <= 2


@virtual_time()
async def test_gained_queues_are_pulled_even_if_the_heartbeat_before_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path) as world:
        seen, session = Seen(), world.session("10.0.1.1")
        async with consuming(world, seen, session=session) as consumer:
            failed_ms, working = 0, session.heartbeat

            async def heartbeat() -> None:
                nonlocal failed_ms
                if consumer._running is not None and consumer._running.owned and not failed_ms:
                    failed_ms = world.clock.monotonic_ms()
                    raise RuntimeError("a bug")
                await working()

            monkeypatch.setattr(session, "heartbeat", heartbeat)
            await make_topic(world)
            await wait_until(lambda: seen.count == 1)
            assert failed_ms
            assert world.clock.monotonic_ms() - failed_ms < 60_000


@virtual_time()
async def test_a_consumer_can_be_used_again_after_closing(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(3))
        seen = Seen()
        consumer = PushConsumer(
            "g", seen, session=world.session(), subscriptions={"T": "*"}, start_from="first"
        )
        how = "use it inside `async with`, or await start"
        with pytest.raises(NotRunning, match=f"consumer 'g' is not running: {how}"):
            consumer.suspend()
        await consumer.close()
        await consumer.start()
        await consumer.start()
        await wait_until(lambda: seen.count == 3)
        await consumer.close()
        await consumer.wait()
        await send(world, [b"later"])
        async with consumer:
            await wait_until(lambda: seen.count == 4)


@virtual_time()
async def test_closing_waits_for_listeners_and_leaves_the_group(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(2), to=QUEUE)
        seen, recorder = Seen(), Recorder()

        async def listen(
            messages: Sequence[MessageView], context: ConsumeContext
        ) -> ConsumeResult | None:
            await sleep_ms(5000)
            return await seen(messages, context)

        async with consuming(world, listen, session=world.session(hooks=[recorder])):
            await sleep_ms(1000)
        assert seen.count == 2
        assert await committed(world) == 2
        (left,) = recorder.of(RequestCode.UNREGISTER_CLIENT)
        assert left.ext_fields == {"clientID": "10.0.1.1@test", "consumerGroup": "g"}


@pytest.mark.parametrize("orderly", [False, True])
@virtual_time()
async def test_a_listener_may_close_its_consumer(tmp_path: Path, orderly: bool) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"1"], to=QUEUE)
        seen, recorder = Seen(), Recorder()

        async def listen(
            messages: Sequence[MessageView], context: ConsumeContext
        ) -> ConsumeResult | None:
            await consumer.close()
            await sleep_ms(100)
            return await seen(messages, context)

        session = world.session(hooks=[recorder])
        async with consuming(world, listen, session=session, orderly=orderly) as consumer:
            start_ms = world.clock.monotonic_ms()
            await consumer.wait()
            assert world.clock.monotonic_ms() - start_ms < 1000
        # It was awaited like any other: its message is finished.
        assert seen.count == 1
        assert await committed(world) == 1
        assert len(recorder.of(RequestCode.UNREGISTER_CLIENT)) == 1


@virtual_time()
async def test_closing_continues_when_its_caller_is_cancelled(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(2), to=QUEUE)
        seen, recorder = Seen(), Recorder()
        seen.hold.clear()
        async with consuming(world, seen, session=world.session(hooks=[recorder])) as consumer:
            await wait_until(lambda: seen.running == 2)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await consumer.close()
            seen.hold.set()
            await consumer.wait()
        assert await committed(world) == 2
        assert len(recorder.of(RequestCode.UNREGISTER_CLIENT)) == 1


@virtual_time()
async def test_a_close_that_fails_ends_wait_and_allows_another_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(3))
        seen, session = Seen(), world.session()
        async with session, consuming(world, seen, session=session) as consumer:
            await wait_until(lambda: seen.count == 3)
            with monkeypatch.context() as patched:
                patched.setattr(session, "close", AsyncMock(side_effect=OSError("broken")))
                with pytest.raises(OSError, match="broken"):
                    await consumer.close()
                with pytest.raises(OSError, match="broken"):
                    await consumer.wait()
            await consumer.start()
            await send(world, [b"later"])
            await wait_until(lambda: seen.count == 4)


@virtual_time()
async def test_waiting_for_a_consumer_that_does_not_run_is_an_error(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        session = world.session()
        consumer = PushConsumer("g", Seen(), subscriptions={"T": "*"}, session=session)
        how = "use it inside `async with`, or await start"
        with pytest.raises(NotRunning, match=f"this PushConsumer is not running: {how}"):
            await consumer.wait()
        broken = AsyncMock(side_effect=OSError("broken"))
        with patch.object(session, "join", broken), pytest.raises(OSError, match="broken"):
            await consumer.start()
        with pytest.raises(NotRunning, match="this PushConsumer is not running"):
            await consumer.wait()
        async with consumer:
            pass
        await consumer.wait()


@virtual_time()
async def test_a_start_that_fails_ends_waiting(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        session = world.session()
        consumer = PushConsumer("g", Seen(), subscriptions={"T": "*"}, session=session)
        waiting: list[asyncio.Task[None]] = []

        async def fail(_: object) -> None:
            waiting.append(asyncio.create_task(consumer.wait()))
            await asyncio.sleep(0)
            raise OSError("broken")

        with patch.object(session, "join", fail), pytest.raises(OSError, match="broken"):
            await consumer.start()
        await asyncio.wait_for(waiting[0], 1)


@virtual_time()
async def test_closing_need_not_wait(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"x"], to=QUEUE)
        seen = Seen()
        seen.hold.clear()
        async with consuming(world, seen, listening=Listening(close_wait=0)):
            await wait_until(lambda: seen.running == 1)
            start_ms = world.clock.monotonic_ms()
        assert world.clock.monotonic_ms() - start_ms < 100
        assert await committed(world) == 0


@virtual_time()
async def test_a_topic_that_does_not_exist_yet_is_consumed_once_it_does(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        seen = Seen()
        async with consuming(world, seen, start_from="last"):
            await sleep_ms(5000)
            await send(world, [b"x"])
            await wait_until(lambda: seen.count == 1, 60)


@virtual_time()
async def test_two_consumers_of_a_group_need_two_clients(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        session = world.session()
        async with consuming(world, Seen(), session=session):
            with pytest.raises(InvalidArgument, match="has a consumer of group 'g' already"):
                async with consuming(world, Seen(), session=session):
                    pass
            assert session.is_running


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"group": "no blanks"}, "group must .* got 'no blanks'"),
        ({"listener": "x"}, "listener must be a function"),
        ({"start_from": "middle"}, "start_from must be .* got 'middle'"),
        ({"start_from": datetime.min.replace(tzinfo=EAST)}, "a time that UTC can express"),
        ({"subscriptions": {"a b": "*"}}, "topic must .* got 'a b'"),
        (
            {"subscriptions": {"T": "||"}},
            r"tag expression of topic 'T' is '\|\|', which has no tag",
        ),
        ({"subscriptions": {"T": " "}}, "tag expression of topic 'T' is ' ', which has no tag"),
    ],
)
def test_invalid_arguments_are_named(changes: dict[str, Any], text: str) -> None:
    settings: dict[str, Any] = {"group": "g", "listener": Seen(), "nameserver": "ns:1", **changes}
    with pytest.raises(InvalidArgument, match=text):
        PushConsumer(settings.pop("group"), settings.pop("listener"), **settings)


def test_a_broadcasting_consumer_keeps_its_client_id(tmp_path: Path) -> None:
    consumer = PushConsumer("g", Seen(), nameserver="127.0.0.1:1", broadcast=True)
    assert consumer._client.instance == "DEFAULT"
    own = ClientConfig("127.0.0.1:1", instance="mine")
    assert PushConsumer("g", Seen(), client=own, broadcast=True)._client.instance == "mine"


# --- subscriptions --------------------------------------------------------------------------------


@virtual_time()
async def test_only_subscribed_tags_are_delivered_even_when_hashes_collide(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        for tags in ("Aa", "BB", "C", None):
            await send(world, [(tags or "none").encode()], tags=tags, to=QUEUE)
        seen = Seen()
        async with consuming(world, seen, subscriptions={"T": "Aa || C"}):
            await sleep_ms(25_000)
        assert seen.bodies == [b"Aa", b"C"]
        assert await committed(world) == 4, "messages filtered out are finished too"


@virtual_time()
async def test_subscribing_and_unsubscribing_while_running(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        await make_topic(world, "T2")
        seen = Seen()
        async with consuming(world, seen) as consumer:
            await wait_until(lambda: seen.count == 1)
            await consumer.subscribe("T2")
            await wait_until(lambda: seen.count == 2)
            await consumer.unsubscribe("T")
            topics = {queue.topic for queue in consumer.assignment()}
            assert topics == {"T2", "%RETRY%g"}
            await send(world, [b"unwanted"])
            await send(world, [b"wanted"], topic="T2")
            await sleep_ms(30_000)
            assert seen.bodies[2:] == [b"wanted"]


@virtual_time()
async def test_a_subscription_changed_while_closing_is_that_of_the_next_start(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        await make_topic(world, "T2")
        seen = Seen()
        async with world.session() as session, consuming(world, seen, session=session) as consumer:
            await wait_until(lambda: seen.count == 1)
            changes = consumer.subscribe("T2"), consumer.unsubscribe("T")
            changing = [asyncio.create_task(change) for change in changes]
            await asyncio.sleep(0)
            await consumer.close()
            await asyncio.gather(*changing)
            await consumer.start()
            await wait_until(lambda: seen.count == 2)
            assert {queue.topic for queue in consumer.assignment()} == {"T2", "%RETRY%g"}


@virtual_time()
async def test_other_tags_while_running(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world, tags="A")
        seen = Seen()
        async with consuming(world, seen, subscriptions={"T": "A"}) as consumer:
            await wait_until(lambda: seen.count == 1)
            await consumer.subscribe("T", "B")
            await send(world, [b"a"], tags="A")
            await send(world, [b"b"], tags="B")
            await wait_until(lambda: seen.count == 2)
            await sleep_ms(5000)
        assert seen.bodies == [b"first", b"b"]


@virtual_time()
async def test_an_expression_rejected_by_brokers_fails_the_start(tmp_path: Path) -> None:
    async with cluster(tmp_path, filters=FiltersConfig(sql_enabled=False)) as world:
        await make_topic(world)
        session = world.session()
        consumer = PushConsumer("g", Seen(), session=session)
        await consumer.subscribe("T", "a > 3", "SQL92")
        with pytest.raises(RemoteError):
            await consumer.start()
        assert not session.is_running
        async with consuming(world, Seen(), session=world.session()) as running:
            with pytest.raises(RemoteError):
                await running.subscribe("T", "a > 3", "SQL92")
            assert running._expressions["T"] == "*"
        with pytest.raises(InvalidArgument, match="kind must be TAG or SQL92, got 'LUA'"):
            await consumer.subscribe("T", "a", "LUA")
        with pytest.raises(InvalidArgument, match="found '<' "):
            await consumer.subscribe("T", "a >< 3", "SQL92")


@virtual_time()
async def test_the_first_retry_of_a_new_group_is_not_late(tmp_path: Path) -> None:
    def fail_soon(_: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        context.delay_level = 1
        return ConsumeResult.RETRY_LATER

    async with cluster(tmp_path) as world:
        await make_topic(world)
        seen = Seen(fail_soon)
        async with consuming(world, seen):
            await wait_until(lambda: seen.count >= 2)
            assert 1000 <= seen.times_ms[1] - seen.times_ms[0] < 2000


@virtual_time()
async def test_heartbeats_include_the_retry_topic_and_all_settings(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        recorder = Recorder()
        moment = datetime.fromtimestamp(world.clock.now_ms() / 1000, UTC)
        async with consuming(
            world,
            Seen(),
            session=world.session(hooks=[recorder]),
            subscriptions={"T": "a || b"},
            start_from=moment,
        ):
            beat = Heartbeat.decode(whole_body(recorder.of(RequestCode.HEART_BEAT)[-1]))
        (data,) = beat.consumer_data_set
        assert (data.group_name, data.consume_type) == ("g", "CONSUME_PASSIVELY")
        assert (data.message_model, data.consume_from_where) == (
            "CLUSTERING",
            "CONSUME_FROM_TIMESTAMP",
        )
        wanted = {each.topic: each for each in data.subscription_data_set}
        assert wanted.keys() == {"T", "%RETRY%g"}
        assert wanted["T"].tags_set == ["a", "b"]
        assert wanted["%RETRY%g"].sub_string == "*"


@virtual_time()
async def test_pulls_can_carry_the_subscription(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        seen, recorder = Seen(), Recorder()
        session = world.session(hooks=[recorder])
        pulling = Pulling(carries_subscription=True, batch_size=7, interval=0.1)
        async with consuming(world, seen, session=session, pulling=pulling):
            await wait_until(lambda: seen.count == 1)
        pulls = [
            headers.PullMessage.from_ext_fields(each.ext_fields)
            for each in recorder.of(RequestCode.PULL_MESSAGE)
        ]
        assert {(each.subscription, each.max_msg_nums) for each in pulls} == {("*", 7)}
        assert all(each.sys_flag & 0b110 == 0b110 for each in pulls)


@virtual_time()
async def test_pulls_ask_for_as_much_as_the_flow_limits_leave_room_for(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(300), to=QUEUE)
        seen, recorder = Seen(), Recorder()
        seen.hold.clear()
        flow = FlowLimits(messages_per_queue=280)
        async with consuming(world, seen, session=world.session(hooks=[recorder]), flow=flow):
            await sleep_ms(10_000)
            seen.hold.set()
            await wait_until(lambda: seen.count == 300)
        asked = [(each.max_msg_nums, each.bulk_pull) for each in pulls_of(QUEUE, recorder)]
        # The second one exceeds the limit by one message, as everywhere in the protocol.
        assert asked[:2] == [(256, True), (25, None)]


@pytest.mark.parametrize(
    ("pulling", "asked"),
    [
        (None, (32, None)),
        (Pulling(batch_size=32), (32, None)),
        (Pulling(batch_size=99), (99, True)),
    ],
)
@virtual_time()
async def test_apache_brokers_are_asked_for_thirty_two_unless_told_otherwise(
    tmp_path: Path, pulling: Pulling | None, asked: tuple[int, bool | None]
) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(300), to=QUEUE)
        seen, recorder = Seen(), Recorder()
        session = world.session(hooks=[recorder])
        request = session.request

        async def answered_by_apache(*arguments: Any) -> Any:
            return replace(await request(*arguments), language=Language.JAVA)

        with patch.object(session, "request", answered_by_apache):
            async with consuming(world, seen, session=session, pulling=pulling):
                await wait_until(lambda: seen.count == 300)
        assert {(each.max_msg_nums, each.bulk_pull) for each in pulls_of(QUEUE, recorder)} == {
            asked
        }


@virtual_time()
async def test_a_broker_that_replaces_one_of_apache_is_asked_for_more(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        seen, recorder, language = Seen(), Recorder(), Language.JAVA
        session = world.session(hooks=[recorder])
        request = session.request

        async def answered(*arguments: Any) -> Any:
            return replace(await request(*arguments), language=language)

        with patch.object(session, "request", answered):
            async with consuming(world, seen, session=session):
                await wait_until(lambda: seen.count == 1)
                language = Language.PYTHON
                await sleep_ms(60_000)
        asked = [each.max_msg_nums for each in pulls_of(QUEUE, recorder)]
        assert (asked[0], asked[-1]) == (32, 256)


@virtual_time()
async def test_a_full_cache_is_refilled_by_large_pulls(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(1500), to=QUEUE)
        recorder, seen = Recorder(), list[object]()

        async def take_a_while(messages: Sequence[MessageView], _: object) -> ConsumeResult:
            await sleep_ms(10)
            seen.extend(messages)
            return ConsumeResult.SUCCESS

        session, flow = world.session(hooks=[recorder]), FlowLimits(messages_per_queue=400)
        async with consuming(world, take_a_while, session=session, flow=flow):
            await wait_until(lambda: len(seen) == 1500)
        refills = [
            each.max_msg_nums for each in pulls_of(QUEUE, recorder) if each.queue_offset < 1400
        ]
        # Not 20, as many as finish at a time.
        assert min(refills) >= 100


def pulls_of(queue: MessageQueue, recorder: Recorder) -> list[headers.PullMessage]:
    found = (
        headers.PullMessage.from_ext_fields(each.ext_fields)
        for each in recorder.of(RequestCode.PULL_MESSAGE)
    )
    return [pull for pull in found if (pull.topic, pull.queue_id) == (queue.topic, queue.queue_id)]


# --- where to start -------------------------------------------------------------------------------


async def begin_in_an_old_queue(world: Cluster) -> datetime:
    """Return a timestamp between two messages of a queue whose first one is no longer young."""
    await send(world, [b"old"], to=QUEUE)
    await sleep_ms(60_000)
    moment_ms = world.clock.now_ms()
    await sleep_ms(60_000)
    await send(world, [b"new"], to=QUEUE)
    return datetime.fromtimestamp(moment_ms / 1000, UTC)


@virtual_time()
async def test_starting_with_the_first_message_or_at_a_timestamp(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        moment = await begin_in_an_old_queue(world)
        first, since = Seen(), Seen()
        async with consuming(world, first, group="g1", start_from="first"):
            await wait_until(lambda: first.count == 2)
        # This broker counts all its messages as young, and then answers with offset 0 itself.
        async with consuming(world, since, group="g2", start_from=moment):
            await sleep_ms(5000)
        assert since.bodies in ([b"new"], [b"old", b"new"])


@virtual_time()
async def test_a_committed_offset_overrides_the_start_position(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(3), to=QUEUE)
        seen, again = Seen(), Seen()
        async with consuming(world, seen):
            await wait_until(lambda: seen.count == 3)
        await send(world, [b"later"], to=QUEUE)
        async with consuming(world, again, start_from="first"):
            await sleep_ms(5000)
        assert again.bodies == [b"later"]


# --- pausing and resizing -------------------------------------------------------------------------


@virtual_time()
async def test_suspending_stops_pulling_until_resumed(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        seen = Seen()
        async with consuming(world, seen) as consumer:
            await wait_until(lambda: seen.count == 1)
            consumer.suspend()
            await sleep_ms(21_000)
            await send(world, bodies(4))
            await sleep_ms(300_000)
            assert seen.count == 1
            consumer.resume()
            await wait_until(lambda: seen.count == 5)


@virtual_time()
async def test_the_number_of_concurrent_calls_can_change(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(40), to=QUEUE)
        seen = Seen()
        seen.hold.clear()
        async with consuming(world, seen, concurrency=2) as consumer:
            await sleep_ms(1000)
            assert seen.running == 2
            consumer.resize(5)
            await send(world, [b"one more"], to=QUEUE)
            await sleep_ms(1000)
            assert seen.running == 5
            with pytest.raises(InvalidArgument, match="concurrency must be 1–1000, got 0"):
                consumer.resize(0)
            with pytest.raises(
                InvalidArgument, match="maximum of concurrency must be 9–1000, got 8"
            ):
                consumer.resize((9, 8))
            consumer.resize((6, 7))
            await sleep_ms(500)
            assert seen.running == 6
            await sleep_ms(1000)
            assert seen.running == 7
            seen.hold.set()
            await wait_until(lambda: seen.count == 41)


@virtual_time()
async def test_calls_grow_from_twenty_to_sixty_four_while_messages_wait(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(100))
        seen = Seen()
        seen.hold.clear()
        async with consuming(world, seen) as consumer:
            await wait_until(lambda: seen.running == 20)
            await sleep_ms(500)
            assert seen.running == 20
            await wait_until(lambda: seen.running == 64, 3)
            info = await consumer.running_info(with_stacks=False)
            assert info.properties["PROP_THREADPOOL_CORE_SIZE"] == "64"
            assert info.properties["concurrency"] == "(20, 64)"
            await sleep_ms(60_000)
            assert seen.running_max == 64
            seen.hold.set()
            await wait_until(lambda: seen.count == 100)
            await sleep_ms(120_000)
            info = await consumer.running_info(with_stacks=False)
            assert info.properties["PROP_THREADPOOL_CORE_SIZE"] == "20"


@virtual_time()
async def test_orderly_calls_grow_while_queues_wait(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(12))
        seen = Seen()
        seen.hold.clear()
        async with consuming(world, seen, orderly=True, concurrency=(1, 3)):
            await wait_until(lambda: seen.running == 1)
            await sleep_ms(500)
            assert seen.running == 1
            await wait_until(lambda: seen.running == 3, 3)
            await sleep_ms(60_000)
            assert seen.running_max == 3, "the fourth queue waits"
            seen.hold.set()
            await wait_until(lambda: seen.count == 12)


# --- namespace ------------------------------------------------------------------------------------


@virtual_time()
async def test_a_namespace_is_not_shown_to_the_user(tmp_path: Path) -> None:
    def decide(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        tried = messages[0].reconsume_times
        return ConsumeResult.SUCCESS if tried else ConsumeResult.RETRY_LATER

    async with cluster(tmp_path) as world:
        await send(world, [b"x"], topic="staging%T")
        await send(world, [b"other"], topic="T")
        seen = Seen(decide)
        session = world.session(namespace="staging")
        async with consuming(world, seen, session=session) as consumer:
            await wait_until(lambda: seen.count == 2, 60)
            assert consumer.group == "staging%g"
        assert [(each.topic, each.body) for each in seen.messages] == [("T", b"x")] * 2
        assert seen.messages[1].reconsume_times == 1


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
@pytest.mark.parametrize("orderly", [False, True])
def test_whatever_a_listener_raises_the_others_are_consumed(
    tmp_path: Path, error: type[BaseException], orderly: bool
) -> None:
    @virtual_time()
    async def run() -> None:
        raised: list[bytes] = []

        async def listen(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
            if messages[0].body == b"50" and not raised:
                raised.append(b"50")
                raise error("not today")
            seen.append(messages[0].body)
            return ConsumeResult.SUCCESS

        seen: list[bytes] = []
        async with cluster(tmp_path) as world:
            await send(world, [b"%d" % number for number in range(100)])
            async with consuming(world, listen, orderly=orderly):
                await wait_until(lambda: len(set(seen)) == 100, 60)

    run()


@virtual_time()
async def test_two_broadcasting_consumers_do_not_share_offsets(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        settings: dict[str, Any] = {"broadcast": True, "offsets_directory": tmp_path / "offsets"}
        async with consuming(world, Seen(), **settings):
            with pytest.raises(InvalidArgument, match="another broadcasting consumer"):
                async with consuming(world, Seen(), **settings):
                    pass
        async with consuming(world, Seen(), **settings):
            pass


@virtual_time()
async def test_hooks_may_be_proxies(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        seen, hook = Seen(), Mock()
        async with consuming(world, seen, hooks=[hook]):
            await wait_until(lambda: hook.after_consume.called)
        assert seen.count == 1
        hook.keeps.assert_called_once()
        hook.before_consume.assert_called_once()
