"""Checks: brokers ask for the outcome of transactions, and the application's function answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from scripted_broker import Batch
from transaction_broker import RECORD_BYTES, World, named, settled, transaction_world
from turbopump.client.producer import Producer
from turbopump.client.transaction_checks import CHECKS_MAX
from turbopump.client.transaction_ends import TransactionEnd, TransactionState
from turbopump.client.transactions import TransactionProducer
from turbopump.message import Message
from turbopump.testing import virtual_time, wait_until
from turbopump.wire.headers import CheckTransactionState, EndTransaction
from turbopump.wire.record import MessageView

COMMIT, ROLLBACK, UNKNOWN = TransactionState
MESSAGE = Message("T", b"hello", keys=["42"])


@asynccontextmanager
async def left_open(
    world: World, check: Any, namespace: str = "", **settings: Any
) -> AsyncIterator[tuple[TransactionProducer, Batch]]:
    """Run a producer that has left one transaction to the checks."""
    session = world.session(namespace=namespace)
    async with TransactionProducer("pg", check=check, session=session, **settings) as producer:
        async with producer.transaction(MESSAGE) as transaction:
            await transaction.unknown()
        await settled()
        world.broker.ends.clear()
        yield producer, world.broker.batches[-1]


def plain(answer: Any) -> Callable[[MessageView], Any]:
    return lambda message: answer


def on_loop(answer: Any) -> Callable[[MessageView], Any]:
    async def check(message: MessageView) -> Any:
        await asyncio.sleep(0.1)
        return answer

    return check


@pytest.mark.parametrize("kind", [plain, on_loop])
@pytest.mark.parametrize("state", [COMMIT, ROLLBACK, UNKNOWN])
@virtual_time()
async def test_answers_name_the_checked_half_message(
    kind: Callable[[Any], Any], state: TransactionState
) -> None:
    async with transaction_world() as world, left_open(world, kind(state)) as (_, half):
        world.broker.check(half, moved_by=5)
        await settled()
        (end,) = world.broker.ends
        header = EndTransaction.from_ext_fields(end.ext_fields)
    unique = named(half)["UNIQ_KEY"]
    assert header == EndTransaction(
        producer_group="pg",
        tran_state_table_offset=5,
        commit_log_offset=5 * RECORD_BYTES,
        commit_or_rollback=state.value,
        from_transaction_check=True,
        msg_id=unique,
        transaction_id=unique,
    )


def failing(error: BaseException) -> Callable[[MessageView], Any]:
    def check(message: MessageView) -> Any:
        raise error

    return check


def failing_on_loop(error: BaseException) -> Callable[[MessageView], Any]:
    async def check(message: MessageView) -> Any:
        raise error

    return check


@pytest.mark.parametrize("kind", [failing, failing_on_loop])
@pytest.mark.parametrize("error", [ValueError("no database"), SystemExit(1)])
@virtual_time()
async def test_a_check_that_fails_is_logged_and_means_unknown(
    kind: Callable[[BaseException], Any], error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async with transaction_world() as world, left_open(world, kind(error)) as (_, half):
        for _ in range(2):
            world.broker.check(half)
            await settled()
        assert world.broker.ended == [(UNKNOWN.value, True)] * 2
    assert "check of pg failed for transaction" in caplog.text
    assert str(error) in caplog.text


@virtual_time()
async def test_a_check_that_waits_for_something_cancelled_means_unknown() -> None:
    async def check(message: MessageView) -> TransactionState:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future
        return COMMIT

    async with transaction_world() as world, left_open(world, check) as (_, half):
        world.broker.check(half)
        await settled()
        assert world.broker.ended == [(UNKNOWN.value, True)]


@pytest.mark.parametrize("kind", [plain, on_loop])
@pytest.mark.parametrize("answer", [None, True, False, "COMMIT", 8])
@virtual_time()
async def test_an_invalid_state_is_logged_and_means_unknown(
    kind: Callable[[Any], Any], answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with transaction_world() as world, left_open(world, kind(answer)) as (_, half):
        world.broker.check(half)
        await settled()
        assert world.broker.ended == [(UNKNOWN.value, True)]
    assert f"check returned {answer!r} for transaction {named(half)['UNIQ_KEY']}" in caplog.text
    assert "expected a TransactionState" in caplog.text


@virtual_time()
async def test_an_open_transaction_is_not_checked_and_its_end_names_the_newest_copy() -> None:
    """The function would not find it, and would roll back what is about to commit."""

    def check(message: MessageView) -> TransactionState:
        raise AssertionError("the transaction is open in this process")

    async with transaction_world() as world, left_open(world, check) as (producer, _):
        async with producer.transaction(MESSAGE):
            half = world.broker.batches[-1]
            world.broker.check(half, moved_by=3)
            await settled()
            world.broker.check(half, moved_by=7)
            await settled()
            assert world.broker.ended == [(UNKNOWN.value, True)] * 2
        await settled()
        last = EndTransaction.from_ext_fields(world.broker.ends[-1].ext_fields)
        assert (last.commit_or_rollback, last.from_transaction_check) == (COMMIT.value, False)
        assert last.tran_state_table_offset == half.number + 7
        assert last.commit_log_offset == (half.number + 7) * RECORD_BYTES


@virtual_time()
async def test_a_transaction_that_has_ended_is_checked() -> None:
    asked: list[str] = []

    def check(message: MessageView) -> TransactionState:
        asked.append(message.message_id)
        return COMMIT

    async with transaction_world() as world, left_open(world, check) as (producer, _):
        async with producer.transaction(MESSAGE) as transaction:
            pass
        await settled()
        # As if the end had been lost.
        world.broker.check(world.broker.batches[-1], moved_by=1)
        await settled()
        assert asked == [transaction.id]
        assert world.broker.ended == [(COMMIT.value, False), (COMMIT.value, True)]


@virtual_time()
async def test_a_transaction_whose_block_was_never_entered_is_checked() -> None:
    """Ctrl-C may occur between the broker's response and the block."""
    async with transaction_world() as world, left_open(world, plain(ROLLBACK)) as (producer, _):
        transaction = producer.transaction(MESSAGE)
        await transaction.begin()
        del transaction
        world.broker.check(world.broker.batches[-1])
        await settled()
        assert world.broker.ended == [(ROLLBACK.value, True)]


@virtual_time()
async def test_a_namespace_is_not_shown_to_the_function() -> None:
    seen: list[MessageView] = []

    def check(message: MessageView) -> TransactionState:
        seen.append(message)
        return COMMIT

    async with transaction_world() as world, left_open(world, check, "ns") as (_, half):
        assert named(half)["PGROUP"] == "ns%pg"
        world.broker.check(half, group="ns%pg")
        await settled()
        (end,) = world.broker.ends
        assert (end.ext_fields or {})["producerGroup"] == "ns%pg"
    (message,) = seen
    assert (message.topic, message.keys, message.body) == ("T", ["42"], b"hello")


@virtual_time()
async def test_bad_and_forged_checks_do_not_disturb_the_next_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with transaction_world() as world, left_open(world, plain(COMMIT)) as (_, half):
        header = CheckTransactionState(tran_state_table_offset=0, commit_log_offset=0)
        for bad, body in [(None, b""), (header, b""), (header, b"x" * 200), (None, b"x" * 200)]:
            world.broker.ask(bad, body)
        await settled()
        forged = Message("T", b"of another group")
        async with TransactionProducer(
            "other", check=plain(COMMIT), session=world.session("10.0.1.2")
        ) as other:
            async with other.transaction(forged):
                pass
            await settled()
            world.broker.ends.clear()
            world.broker.check(world.broker.batches[-1], group="pg")
            await settled()
            assert world.broker.ends == []
            assert "asks for a transaction of 'other': not here" in caplog.text
        world.broker.check(half)
        await settled()
        assert world.broker.ended == [(COMMIT.value, True)]


@virtual_time()
async def test_excess_checks_are_dropped_until_there_is_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    go_on = asyncio.Event()

    async def check(message: MessageView) -> TransactionState:
        await go_on.wait()
        return COMMIT

    async with transaction_world() as world, left_open(world, check) as (_, half):
        for number in range(CHECKS_MAX + 10):
            world.broker.check(half, moved_by=number)
            if number % 100 == 0:
                await settled()
        await settled()
        assert caplog.text.count("is not checked now") == 10
        go_on.set()
        await settled()
        assert len(world.broker.ends) == CHECKS_MAX
        world.broker.check(half)
        await settled()
        assert len(world.broker.ends) == CHECKS_MAX + 1


@virtual_time()
async def test_closing_answers_the_check_that_runs_and_drops_those_that_wait() -> None:
    begun = asyncio.Event()
    go_on = asyncio.Event()

    async def check(message: MessageView) -> TransactionState:
        begun.set()
        await go_on.wait()
        return COMMIT

    async with transaction_world() as world, left_open(world, check) as (producer, half):
        for number in range(3):
            world.broker.check(half, moved_by=number)
        await begun.wait()
        closing = asyncio.create_task(producer.close())
        await asyncio.sleep(0)
        world.broker.check(half, moved_by=3)
        await settled()
        go_on.set()
        await closing
        await settled()
        assert world.broker.ended == [(COMMIT.value, True)]


@virtual_time()
async def test_closing_waits_for_a_check_for_a_limited_time() -> None:
    async def check(message: MessageView) -> TransactionState:
        await asyncio.sleep(3600)
        return COMMIT

    async with transaction_world() as world:
        async with left_open(world, check) as (producer, half):
            world.broker.check(half)
            await settled()
            began_s = asyncio.get_running_loop().time()
            await producer.close()
            assert asyncio.get_running_loop().time() - began_s < 10
            await producer.start()
        await settled()
        assert world.broker.ends == []


@virtual_time()
async def test_an_answer_that_cannot_be_sent_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[TransactionEnd] = []

    class Hook:
        def before_send(self, group: str, sent: Any, queue: Any) -> None: ...

        def after_send(self, group: str, sent: Any, queue: Any, outcome: Any) -> None: ...

        def transaction_ended(self, end: TransactionEnd) -> None:
            seen.append(end)

    async def check(message: MessageView) -> TransactionState:
        world.network.refuse("10.0.0.1")
        world.network.cut("10.0.0.1")
        await asyncio.sleep(1)
        return COMMIT

    async with transaction_world() as world, left_open(world, check, hooks=[Hook()]) as (_, half):
        world.broker.check(half)
        await settled()
        await settled()
        world.network.accept("10.0.0.1")
    assert "COMMIT was not sent" in caplog.text
    first, last = seen
    assert (first.is_check, first.state, first.error) == (False, UNKNOWN, None)
    assert (last.is_check, last.state, type(last.message)) == (True, COMMIT, MessageView)
    assert last.error is not None


# --- which producer is asked ----------------------------------------------------------------------


@virtual_time()
async def test_brokers_know_the_group_before_anything_is_sent() -> None:
    async with (
        transaction_world() as world,
        TransactionProducer("pg", check=plain(COMMIT), session=world.session()),
    ):
        await wait_until(lambda: "pg" in world.broker.peers)
        assert world.broker.batches == []
        assert world.broker.topics == ["SELF_TEST_TOPIC"]


@virtual_time()
async def test_only_the_brokers_of_given_topics_get_heartbeats() -> None:
    async with (
        transaction_world() as world,
        TransactionProducer(
            "pg", check=plain(COMMIT), topics=["T", "U"], session=world.session(namespace="ns")
        ),
    ):
        await wait_until(lambda: "ns%pg" in world.broker.peers)
        assert world.broker.topics == ["ns%T", "ns%U"]


@virtual_time()
async def test_brokers_unreachable_at_the_start_get_heartbeats_later() -> None:
    async with transaction_world() as world:
        world.network.refuse("10.0.0.1")
        async with TransactionProducer("pg", check=plain(COMMIT), session=world.session()):
            await settled()
            assert world.broker.peers == {}
            world.network.accept("10.0.0.1")
            await asyncio.sleep(31)
            assert "pg" in world.broker.peers


@virtual_time()
async def test_a_start_that_is_cancelled_leaves_nothing_behind() -> None:
    async with transaction_world() as world:
        world.network.isolate("10.0.0.1")
        session = world.session()
        producer = TransactionProducer("pg", check=plain(COMMIT), session=session)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await producer.start()
        assert not session.is_running
        world.network.heal()
        async with producer:
            await wait_until(lambda: "pg" in world.broker.peers)


@virtual_time()
async def test_a_plain_producer_of_the_group_reports_that_it_cannot_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with transaction_world() as world, left_open(world, plain(COMMIT)) as (producer, half):
        await producer.close()
        async with Producer("pg", session=world.session("10.0.1.2")) as other:
            await other.send(MESSAGE)
            await settled()
            world.broker.check(half)
            await settled()
            assert world.broker.ends == []
    assert "all producers of group pg must be TransactionProducer" in caplog.text
