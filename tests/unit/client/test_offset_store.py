"""Offsets in a store of the application: what reaches it, when, and what its failures cost."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

import turbopump
from clusters import Cluster, Recorder, cluster
from consumers import Seen, always, committed, consuming, send, sleep_ms
from offset_store import Billing
from turbopump import aio
from turbopump.client.config import ClientConfig
from turbopump.client.delivery.results import ConsumeContext, ConsumeResult
from turbopump.client.handlers import consumer as decorate
from turbopump.client.offset_store import OffsetStore
from turbopump.client.push_config import Listening
from turbopump.client.push_consumer import PushConsumer
from turbopump.client.worker import Worker
from turbopump.errors import InvalidArgument
from turbopump.message import MessageQueue, QueueOffset
from turbopump.testing import virtual_time, wait_until
from turbopump.wire import headers
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request
from turbopump.wire.record import MessageView

QUEUE = MessageQueue("T", "a", 0)


class Failed(Exception):
    """What the store raises here."""


class Kept:
    """A store in memory, which fails where the test wants it."""

    def __init__(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        self.offsets: dict[MessageQueue, Any] = dict(offsets or {})
        self.calls: list[tuple[str, Any]] = []
        self.failing: set[str] = set()
        self.threads: set[str] = set()
        self.running = self.running_max = 0
        self._removed: list[MessageQueue] = []
        self._advanced: dict[MessageQueue, int] = {}

    def _called(self, method: str, given: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls.append((method, given))
        if method in self.failing:
            raise Failed(method)

    def load(self, queue: MessageQueue) -> int | None:
        self._called("load", queue)
        return self.offsets.get(queue)

    def advance(self, queue: MessageQueue, offset: int) -> None:
        self._advanced[queue] = offset

    def remove(self, queue: MessageQueue) -> None:
        self._removed.append(queue)

    def commit(self) -> None:
        removed, advanced = self._removed, self._advanced
        self._removed, self._advanced = [], {}
        for queue in removed:
            if queue in advanced:
                self._called("reset", (queue, advanced[queue]))
            else:
                self._called("remove", queue)
            self.offsets.pop(queue, None)
        if not removed:
            self._called("advance", advanced)
        for queue, offset in advanced.items():
            self.offsets[queue] = max(offset, self.offsets.get(queue, 0))

    def of(self, method: str) -> list[Any]:
        return [given for called, given in self.calls if called == method]


class AsyncKept:
    """The same with coroutine functions, each of which waits."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept

    async def load(self, queue: MessageQueue) -> int | None:
        await self._turn()
        return self.kept.load(queue)

    async def advance(self, queue: MessageQueue, offset: int) -> None:
        await self._turn()
        self.kept.advance(queue, offset)

    async def remove(self, queue: MessageQueue) -> None:
        await self._turn()
        self.kept.remove(queue)

    async def commit(self) -> None:
        await self._turn()
        self.kept.commit()

    async def _turn(self) -> None:
        self.kept.running += 1
        self.kept.running_max = max(self.kept.running, self.kept.running_max)
        await asyncio.sleep(0.01)
        self.kept.running -= 1


@pytest.fixture(params=["plain", "async"])
def stores(request: pytest.FixtureRequest) -> tuple[Kept, OffsetStore]:
    """A store, and what consumers get: the store itself or its asynchronous twin."""
    kept = Kept()
    return kept, kept if request.param == "plain" else AsyncKept(kept)


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def commits_to_brokers(recorder: Recorder) -> list[Command]:
    pulls = recorder.of(RequestCode.PULL_MESSAGE)
    by_pulls = [each for each in pulls if int((each.ext_fields or {})["commitOffset"])]
    return [*recorder.of(RequestCode.UPDATE_CONSUMER_OFFSET), *by_pulls]


def has(seen: Seen, count: int) -> bool:
    return seen.count == count


def owned(consumer: PushConsumer) -> int:
    return sum(queue.topic == "T" for queue in consumer.assignment())


# --- starting, committing, closing ----------------------------------------------------------------


@pytest.mark.parametrize("orderly", [False, True])
@virtual_time()
async def test_a_consumer_starts_where_the_store_says_and_stores_its_progress(
    tmp_path: Path, orderly: bool, stores: tuple[Kept, OffsetStore]
) -> None:
    kept, store = stores
    kept.offsets[QUEUE] = 7
    async with cluster(tmp_path) as world:
        await send(world, numbers(10), to=QUEUE)
        world.broker().state.offsets.commit("g", "T", 0, 3)
        seen = Seen()
        async with consuming(world, seen, offset_store=store, orderly=orderly):
            await wait_until(lambda: seen.count == 3)
            await wait_until(lambda: kept.offsets[QUEUE] == 10, 15)
            await wait_until(lambda: world.broker().state.offsets.of_topic("g", "T")[0] == 10)
            await send(world, [b"last"], to=QUEUE)
            await wait_until(lambda: seen.count == 4)
        assert seen.bodies == [b"7", b"8", b"9", b"last"]
        assert kept.offsets[QUEUE] == await committed(world) == 11, "stored on closing"
        if kept is store:
            assert kept.threads == {"turbopump-offsets_0"}
        else:
            assert kept.threads == {"MainThread"}
            assert kept.running_max == 1, "one call at a time"


@virtual_time()
async def test_without_a_stored_offset_the_group_continues_as_without_a_store(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as world:
        await send(world, numbers(5), to=QUEUE)
        world.broker().state.offsets.commit("g", "T", 0, 3)
        seen, kept = Seen(), Kept()
        async with consuming(world, seen, offset_store=kept):
            await wait_until(lambda: seen.count == 2)
        assert seen.bodies == [b"3", b"4"]
        assert kept.offsets[QUEUE] == 5


@virtual_time()
async def test_brokers_get_offsets_only_after_the_store(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, numbers(5), to=QUEUE)
        kept, seen, recorder = Kept(), Seen(), Recorder()
        kept.failing = {"advance"}
        session = world.session(hooks=[recorder])
        async with consuming(world, seen, session=session, offset_store=kept):
            await wait_until(lambda: seen.count == 5)
            for _ in range(4):
                await send(world, [b"x"], to=QUEUE)
                await sleep_ms(10_000)
            assert not commits_to_brokers(recorder)
            kept.failing = set()
            await wait_until(lambda: kept.offsets.get(QUEUE) == 9)
            await send(world, [b"x"], to=QUEUE)
            await wait_until(lambda: bool(commits_to_brokers(recorder)))


@virtual_time()
async def test_unchanged_offsets_are_not_stored_again(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, numbers(5), to=QUEUE)
        kept, seen = Kept(), Seen()
        async with consuming(world, seen, offset_store=kept):
            await wait_until(lambda: seen.count == 5)
            await sleep_ms(120_000)
        assert [each[QUEUE] for each in kept.of("advance") if QUEUE in each] == [5]


@virtual_time()
async def test_a_queue_that_moves_is_stored_before_its_next_owner_loads_it(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as world:
        await send(world, numbers(40))
        kept, one, two = Kept(), Seen(), Seen()
        how: dict[str, Any] = {"offset_store": kept, "orderly": True}
        async with consuming(world, one, **how) as first:
            await wait_until(lambda: one.count == 40)
            async with consuming(world, two, host="10.0.1.2", **how) as second:
                await wait_until(lambda: owned(first) == owned(second) == 2, 120)
                await send(world, numbers(40))
                await wait_until(lambda: one.count + two.count == 80)
                assert two.count
        moved = [call for call in kept.calls if call[0] in ("load", "advance")]
        lost = {queue for method, queue in moved[5:] if method == "load" and queue.topic == "T"}
        assert len(lost) == 2
        for queue in lost:
            last = max(at for at, call in enumerate(moved) if call == ("load", queue))
            assert any(queue in given for method, given in moved[:last] if method == "advance")


@virtual_time()
async def test_broadcasting_consumers_may_have_stores_of_their_own(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, numbers(3), to=QUEUE)
        kept, other, one, two, recorder = Kept(), Kept({QUEUE: 1}), Seen(), Seen(), Recorder()
        for store, seen, host in ((kept, one, "10.0.1.1"), (other, two, "10.0.1.2")):
            session = world.session(host, hooks=[recorder])
            how: dict[str, Any] = {"offset_store": store, "broadcast": True, "session": session}
            async with consuming(world, seen, **how):
                await wait_until(partial(has, seen, 2 if store is other else 3))
        assert (one.bodies, two.bodies) == (numbers(3), numbers(3)[1:])
        assert kept.offsets[QUEUE] == other.offsets[QUEUE] == 3
        assert not commits_to_brokers(recorder)


@virtual_time()
async def test_the_store_of_functions(tmp_path: Path) -> None:
    kept, seen = Kept({QUEUE: 1}), list[bytes]()

    @decorate("T", group="g", start_from="first", orderly=True, offset_store=kept)
    def consume(body: bytes) -> None:
        seen.append(body)

    async with cluster(tmp_path) as world:
        await send(world, numbers(3), to=QUEUE)
        async with Worker(consume, client=ClientConfig(world.nameserver)):
            await wait_until(lambda: len(seen) == 2)
        assert seen == [b"1", b"2"]
        assert kept.offsets[QUEUE] == 3


# --- exactly once ---------------------------------------------------------------------------------


@asynccontextmanager
async def killed(world: Cluster, listener: Any, **how: Any) -> AsyncIterator[PushConsumer]:
    """Run a consumer of which brokers get no offset, and which ends without storing any."""
    recorder = Recorder()

    def lose(_: str, command: Command) -> None:
        if command.code == RequestCode.UPDATE_CONSUMER_OFFSET:
            raise turbopump.ConnectionLost("as the test wants it")

    recorder.refuse = lose
    session = world.session("10.0.1.1", hooks=[recorder])
    how |= {"orderly": True, "listening": Listening(close_wait=0)}
    async with consuming(world, listener, session=session, **how) as consumer:
        yield consumer
        assert consumer._running is not None
        consumer._running.owned.clear()
    assert not commits_to_brokers(recorder)


@virtual_time()
async def test_a_kill_between_work_and_commit_repeats_nothing(tmp_path: Path) -> None:
    billing, calls = Billing(tmp_path / "billing.db"), list[int]()
    stuck = asyncio.Event()

    async def listen(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        billing(messages, context)
        calls.append(messages[0].queue_offset)
        if len(calls) == 5:
            # Committed in the database, and that is all that the world ever hears.
            stuck.set()
            await asyncio.Event().wait()
        return ConsumeResult.SUCCESS

    def resume(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        calls.append(messages[0].queue_offset)
        return billing(messages, context)

    async with cluster(tmp_path) as world:
        await send(world, numbers(20), to=QUEUE)
        async with killed(world, listen, offset_store=billing):
            await stuck.wait()
        assert billing.load(QUEUE) == 5
        assert world.broker().state.offsets.of_topic("g", "T").get(0) is None
        how: dict[str, Any] = {"offset_store": billing, "orderly": True, "host": "10.0.1.2"}
        async with consuming(world, resume, **how):
            await wait_until(lambda: len(billing.bills()) == 20, 120)
        assert calls == list(range(20)), "not even delivered twice"
        assert billing.bills() == list(range(20))
        assert await committed(world) == 20


@virtual_time()
async def test_a_message_that_fails_after_its_transaction_is_done_once(tmp_path: Path) -> None:
    billing, offsets = Billing(tmp_path / "billing.db"), list[int]()

    def listen(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        billing(messages, context)
        offsets.append(messages[0].queue_offset)
        is_first = offsets.count(1) == 1 and offsets[-1] == 1
        return ConsumeResult.RETRY_LATER if is_first else ConsumeResult.SUCCESS

    async with cluster(tmp_path) as world:
        await send(world, numbers(3), to=QUEUE)
        async with consuming(world, listen, offset_store=billing, orderly=True):
            await wait_until(lambda: len(offsets) == 4)
        assert offsets == [0, 1, 1, 2]
        assert billing.bills() == [0, 1, 2]


@virtual_time()
async def test_the_owner_of_a_queue_and_a_former_one_do_nothing_twice(tmp_path: Path) -> None:
    """A listener that outlives its lock writes nothing that the next owner has done."""
    billing, late = Billing(tmp_path / "billing.db"), list[tuple[Any, Any]]()

    async def hang(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        late.append((messages, context))
        await asyncio.Event().wait()
        return ConsumeResult.SUCCESS

    async with cluster(tmp_path) as world:
        await send(world, numbers(3), to=QUEUE)
        async with killed(world, hang, offset_store=billing):
            await wait_until(lambda: bool(late))
        how: dict[str, Any] = {"offset_store": billing, "orderly": True, "host": "10.0.1.2"}
        async with consuming(world, billing, **how):
            await wait_until(lambda: len(billing.bills()) == 3, 120)
        billing(*late[0])
        assert billing.bills() == [0, 1, 2]


# --- resets, lost messages, deleted topics --------------------------------------------------------


@pytest.mark.parametrize("orderly", [False, True])
@virtual_time()
async def test_a_reset_reaches_the_store_before_anything_is_redelivered(
    tmp_path: Path, orderly: bool, stores: tuple[Kept, OffsetStore]
) -> None:
    kept, store = stores
    async with cluster(tmp_path) as world:
        await send(world, numbers(10), to=QUEUE)
        seen = Seen()
        stored: list[int] = []

        def note(messages: Sequence[MessageView], _: ConsumeContext) -> ConsumeResult:
            stored.append(kept.offsets.get(QUEUE, 0))
            return ConsumeResult.SUCCESS

        seen.decide = note
        async with consuming(world, seen, offset_store=store, orderly=orderly) as consumer:
            await wait_until(lambda: seen.count == 10)
            await consumer.commit()
            assert kept.offsets[QUEUE] == 10
            kept.failing = {"reset"}
            resetting = asyncio.create_task(consumer.reset_offsets("T", {QUEUE: QueueOffset(4)}))
            await sleep_ms(30_000)
            assert (seen.count, kept.offsets[QUEUE]) == (10, 10), "not yet"
            assert len(kept.of("reset")) > 3
            kept.failing = set()
            await resetting
            await wait_until(lambda: seen.count == 16)
            assert stored[10:] == [4] * 6
        assert seen.bodies[10:] == numbers(10)[4:]
        assert kept.offsets[QUEUE] == await committed(world) == 10


@virtual_time()
async def test_the_later_of_two_resets_that_wait_for_the_store_applies(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, numbers(10), to=QUEUE)
        seen, kept = Seen(), Kept()
        async with consuming(world, seen, offset_store=kept) as consumer:
            await wait_until(lambda: seen.count == 10)
            kept.failing = {"reset"}
            async with asyncio.TaskGroup() as group:
                for target in (2, 8):
                    offsets = {QUEUE: QueueOffset(target)}
                    group.create_task(consumer.reset_offsets("T", offsets))
                    await sleep_ms(15_000)
                kept.failing = set()
            await wait_until(lambda: seen.count == 12)
            await sleep_ms(30_000)
            assert seen.bodies[10:] == [b"8", b"9"]
            assert kept.offsets[QUEUE] == 10


@virtual_time()
async def test_a_reset_that_fails_while_an_earlier_one_ends_is_retried(tmp_path: Path) -> None:
    class Slow(AsyncKept):
        async def remove(self, queue: MessageQueue) -> None:
            await sleep_ms(20_000)
            await super().remove(queue)

        async def commit(self) -> None:
            resets = len(self.kept.of("reset"))
            await super().commit()
            if len(self.kept.of("reset")) > resets:
                # Only the next one fails.
                self.kept.failing ^= {"reset"}

    async with cluster(tmp_path) as world:
        await send(world, numbers(10), to=QUEUE)
        seen, kept = Seen(), Kept()
        async with consuming(world, seen, offset_store=Slow(kept)) as consumer:
            await wait_until(lambda: seen.count == 10)
            async with asyncio.TaskGroup() as group:
                for target in (2, 8):
                    offsets = {QUEUE: QueueOffset(target)}
                    group.create_task(consumer.reset_offsets("T", offsets))
                    await sleep_ms(15_000)
                await wait_until(lambda: len(kept.of("reset")) == 2, 60)
                assert kept.offsets[QUEUE] == 2
                kept.failing = set()
            assert kept.offsets[QUEUE] == 8
            await wait_until(lambda: seen.count == 12)
        assert seen.bodies[10:] == [b"8", b"9"]


@virtual_time()
async def test_an_operator_resets_the_store_through_the_broker(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, numbers(6), to=QUEUE)
        seen, kept = Seen(), Kept()
        async with consuming(world, seen, offset_store=kept) as consumer:
            await wait_until(lambda: seen.count == 6)
            await sleep_ms(20_000)
            await consumer.commit()
            async with world.session("10.0.9.7") as session:
                header = headers.ResetOffset(topic="T", group="g", timestamp=0, is_force=True)
                command = request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)
                answer = await session.request(world.broker().address, command, 5000)
                assert answer.code == 0, answer
            await wait_until(lambda: seen.count == 12, 60)
            assert (QUEUE, 0) in kept.of("reset")
        assert kept.offsets[QUEUE] == 6


@virtual_time()
async def test_an_offset_beyond_the_queue_is_corrected_in_the_store(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, numbers(3), to=QUEUE)
        seen, kept = Seen(), Kept({QUEUE: 1000})
        async with consuming(world, seen, offset_store=kept):
            await wait_until(lambda: kept.offsets[QUEUE] < 1000, 60)
            await send(world, [b"later"], to=QUEUE)
            await wait_until(lambda: b"later" in seen.bodies, 60)
        assert kept.offsets[QUEUE] == 4


@virtual_time()
async def test_the_offsets_of_a_deleted_topic_are_removed(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, numbers(5), to=QUEUE)
        seen, kept = Seen(), Kept()
        async with (
            aio.Admin(session=world.session("10.0.9.7")) as admin,
            consuming(world, seen, offset_store=kept) as consumer,
        ):
            await wait_until(lambda: seen.count == 5)
            await consumer.commit()
            kept.failing = {"remove"}
            await admin.topics.delete("T")
            await wait_until(lambda: len(kept.of("remove")) > 4, 60)
            assert kept.offsets[QUEUE] == 5
            kept.failing = set()
            await wait_until(lambda: QUEUE not in kept.offsets, 60)
            await send(world, numbers(10), to=QUEUE)
            await wait_until(lambda: seen.count == 15, 120)
        assert seen.bodies == numbers(5) + numbers(10)
        assert kept.offsets[QUEUE] == 10


@virtual_time()
async def test_a_topic_that_name_servers_list_was_not_deleted(tmp_path: Path) -> None:
    recorder = Recorder()

    def refuse(_: str, command: Command) -> None:
        if command.code == RequestCode.PULL_MESSAGE:
            raise turbopump.RemoteError(ResponseCode.TOPIC_NOT_EXIST, "as the test wants it")

    async with cluster(tmp_path) as world:
        await send(world, numbers(3), to=QUEUE)
        seen, kept = Seen(), Kept({QUEUE: 1})
        session = world.session(hooks=[recorder])
        recorder.refuse = refuse
        async with consuming(world, seen, session=session, offset_store=kept):
            await sleep_ms(30_000)
            recorder.refuse = None
            await wait_until(lambda: seen.count == 2)
        assert not kept.of("remove")


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [Failed(), "5", -1, True, 1.5, StopIteration()])
@virtual_time()
async def test_a_queue_without_a_loaded_offset_waits_for_it(
    tmp_path: Path, wrong: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept()

    class Wrong(Kept):
        def load(self, queue: MessageQueue) -> int | None:
            if isinstance(wrong, Exception):
                raise wrong
            return cast(int, wrong)

    store = Wrong()
    async with cluster(tmp_path) as world:
        await send(world, numbers(5), to=QUEUE)
        seen = Seen()
        async with consuming(world, seen, offset_store=store, start_from="last") as consumer:
            await sleep_ms(45_000)
            assert (seen.count, consumer.assignment()) == (0, [])
            store.load = kept.load  # type: ignore[method-assign]
            kept.offsets[QUEUE] = 2
            await wait_until(lambda: seen.count == 3, 30)
        assert seen.bodies == [b"2", b"3", b"4"]
    assert "offset_store.load()" in caplog.text


@pytest.mark.parametrize("error", [Failed(), SystemExit(), asyncio.CancelledError()])
@virtual_time()
async def test_progress_that_could_not_be_stored_is_redelivered(
    tmp_path: Path,
    error: BaseException,
    stores: tuple[Kept, OffsetStore],
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept, store = stores

    def fail(queue: MessageQueue, offset: int) -> None:
        kept.calls.append(("advance", {queue: offset}))
        raise error

    right, kept.advance = kept.advance, fail  # type: ignore[method-assign]
    async with cluster(tmp_path) as world:
        await send(world, numbers(5), to=QUEUE)
        seen = Seen()
        async with consuming(world, seen, offset_store=store):
            await wait_until(lambda: seen.count == 5)
            await sleep_ms(75_000)
            assert len(kept.of("advance")) > 5, "tried again and again"
        assert QUEUE not in kept.offsets
        kept.advance = right  # type: ignore[method-assign]
        async with consuming(world, seen, host="10.0.1.2", offset_store=store):
            await wait_until(lambda: seen.count == 10)
        assert seen.bodies == numbers(5) * 2
        assert kept.offsets[QUEUE] == 5
    logged = [each for each in caplog.records if "offset_store.advance() failed" in each.message]
    levels = [each.levelno for each in logged]
    assert levels.count(logging.WARNING) == 2, "once a minute"


@virtual_time()
async def test_a_store_that_hangs_stops_neither_consuming_nor_closing(tmp_path: Path) -> None:
    class Hanging(AsyncKept):
        async def commit(self) -> None:
            await asyncio.Event().wait()

    async with cluster(tmp_path) as world:
        await send(world, numbers(5), to=QUEUE)
        seen = Seen()
        async with consuming(world, seen, offset_store=Hanging(Kept())):
            await sleep_ms(60_000)
            await send(world, [b"x"], to=QUEUE)
            await wait_until(lambda: seen.count == 6)
            start_ms = world.clock.monotonic_ms()
        assert world.clock.monotonic_ms() - start_ms < 65_000


# --- arguments ------------------------------------------------------------------------------------


class Incomplete:
    def load(self, queue: MessageQueue) -> None: ...
    def advance(self, queue: MessageQueue, offset: int) -> None: ...


@pytest.mark.parametrize(
    ("store", "error"),
    [
        (Incomplete(), "with load, advance, remove, commit, got .* without remove, commit"),
        ("offsets.db", "got 'offsets.db' without load, advance, remove, commit"),
        (Kept, "must be an object, got <class .*; pass an instance"),
    ],
)
@pytest.mark.parametrize("kind", [turbopump.PushConsumer, aio.PushConsumer, turbopump.consumer])
def test_other_stores_are_refused(kind: Any, store: Any, error: str) -> None:
    is_function = kind is turbopump.consumer
    given = {"group": "g"} if is_function else {"listener": always(None), "nameserver": "ns:9876"}
    with pytest.raises(InvalidArgument, match=error):
        kind("T" if is_function else "g", offset_store=store, **given)


def test_a_store_replaces_the_file_of_a_broadcasting_consumer(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="pass offset_store or offsets_directory, not both"):
        turbopump.PushConsumer(
            "g",
            Seen(),
            nameserver="ns:9876",
            broadcast=True,
            offset_store=Kept(),
            offsets_directory=tmp_path,
        )


def test_a_subclass_must_have_all_methods() -> None:
    class Half(OffsetStore):
        def load(self, queue: MessageQueue) -> int | None: ...

    with pytest.raises(TypeError, match="abstract"):
        Half()  # type: ignore[abstract]
