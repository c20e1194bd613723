"""Transactions of a producer: how they start and end, and the requests to brokers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from unittest.mock import Mock

import pytest

from clusters import Recorder
from scripted_broker import Batch, refused
from transaction_broker import (
    RECORD_BYTES,
    World,
    half_stored,
    named,
    settled,
    transaction_world,
)
from turbopump.client.producer_config import ProducerConfig
from turbopump.client.send_hooks import SendReceipt
from turbopump.client.transaction_ends import TransactionEnd, TransactionState
from turbopump.client.transactions import Transaction, TransactionProducer
from turbopump.errors import (
    ClientError,
    ConnectionLost,
    InvalidArgument,
    NotRunning,
    RemoteError,
    RequestTimeout,
    TransactionNotStarted,
)
from turbopump.message import Message
from turbopump.testing import virtual_time
from turbopump.wire import framing
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, whole_body
from turbopump.wire.headers import EndTransaction
from turbopump.wire.record import MessageView
from vectors import frame

COMMIT, ROLLBACK, UNKNOWN = TransactionState
MESSAGE = Message("T", b"hello", tags="TagT", keys=["tk1"])


async def never(message: MessageView) -> TransactionState:
    raise AssertionError(f"{message.message_id} was checked")


@asynccontextmanager
async def producing(
    world: World, *, group: str = "pg", namespace: str = "", **settings: Any
) -> AsyncIterator[TransactionProducer]:
    settings.setdefault("check", never)
    session = world.session(namespace=namespace)
    async with TransactionProducer(group, session=session, **settings) as producer:
        yield producer


def header_of(end: Command) -> EndTransaction:
    return EndTransaction.from_ext_fields(end.ext_fields)


# --- the wire -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "state"),
    [("tran_commit", COMMIT), ("tran_rollback", ROLLBACK), ("tran_unknown_checked", UNKNOWN)],
)
@virtual_time()
async def test_requests_are_like_the_recorded_ones(name: str, state: TransactionState) -> None:
    async with transaction_world() as world, producing(world, group="pg_tran") as producer:
        async with producer.transaction(MESSAGE) as transaction:
            await transaction.end(state)
        await settled()
        (half,) = world.broker.batches
        (end,) = world.broker.ends
    recorded = framing.decode(frame(f"{name}.SEND_MESSAGE_V2.request"))
    ours, theirs = half.request.ext_fields or {}, recorded.ext_fields or {}
    assert set(ours) == set(theirs)
    assert {letter: ours[letter] for letter in "acdfhjkm"} == {
        letter: theirs[letter] for letter in "acdfhjkm"
    }
    recorded_properties = named(Batch(0, "", 0, (), recorded, half.peer))
    assert set(named(half)) == set(recorded_properties)
    for key in ("TRAN_MSG", "PGROUP", "WAIT", "TAGS"):
        assert named(half)[key] == recorded_properties[key]
    recorded = framing.decode(frame(f"{name}.END_TRANSACTION.oneway"))
    ours, theirs = end.ext_fields or {}, recorded.ext_fields or {}
    assert (end.code, end.flag) == (recorded.code, recorded.flag)
    assert set(ours) == set(theirs)
    for key in ("producerGroup", "commitOrRollback", "fromTransactionCheck"):
        assert ours[key] == theirs[key]


@virtual_time()
async def test_the_end_names_the_position_the_broker_returned() -> None:
    async with transaction_world() as world, producing(world) as producer:
        for number in range(3):
            async with producer.transaction(MESSAGE) as transaction:
                assert transaction.state is None
                assert transaction.message is MESSAGE
                assert transaction.id == transaction.receipt.message_id
            assert transaction.state is COMMIT
            await settled()
            header = header_of(world.broker.ends[number])
            assert header.tran_state_table_offset == number
            assert header.commit_log_offset == number * RECORD_BYTES
            assert (
                header.msg_id == transaction.id == named(world.broker.batches[number])["UNIQ_KEY"]
            )
            assert header.broker_name == transaction.receipt.queue.broker


@virtual_time()
async def test_a_large_half_message_is_compressed_and_prepared() -> None:
    async with transaction_world() as world, producing(world) as producer:
        async with producer.transaction(Message("T", b"x" * 5000)):
            pass
        assert (world.broker.batches[0].request.ext_fields or {})["f"] == str(0x301 | 4)


@virtual_time()
async def test_a_recorded_check_is_answered_as_recorded() -> None:
    asked = framing.decode(frame("tran_unknown_checked.CHECK_TRANSACTION_STATE.oneway"))
    answer = framing.decode(frame("tran_unknown_checked.END_TRANSACTION.oneway#2"))
    seen: list[MessageView] = []

    async def check(message: MessageView) -> TransactionState:
        seen.append(message)
        return ROLLBACK

    async with (
        transaction_world() as world,
        producing(world, group="pg_tran", check=check),
    ):
        await settled()
        world.broker.peers["pg_tran"].oneway(asked)
        await settled()
        (end,) = world.broker.ends
    assert (end.ext_fields, end.flag, end.remark) == (answer.ext_fields, answer.flag, None)
    (message,) = seen
    assert (message.topic, message.body) == ("TranTopic", b"tran exception rollback")
    assert message.message_id == (asked.ext_fields or {})["msgId"]
    assert message.keys == ["tk3"]


# --- how a block ends -----------------------------------------------------------------------------


class Stop(BaseException):
    """As KeyboardInterrupt, which a test must not raise on the loop."""


@pytest.mark.parametrize(
    ("raised", "state"),
    [
        (ValueError("no stock\ud800"), ROLLBACK),
        (TimeoutError(), ROLLBACK),
        (asyncio.CancelledError(), UNKNOWN),
        (Stop(), UNKNOWN),
    ],
)
@virtual_time()
async def test_an_exception_rolls_back_and_an_interrupt_leaves_it_to_the_check(
    raised: BaseException, state: TransactionState
) -> None:
    async with transaction_world() as world, producing(world) as producer:
        with pytest.raises(type(raised)) as caught:
            async with producer.transaction(MESSAGE) as transaction:
                raise raised
        assert caught.value is raised
        assert transaction.state is state
        await settled()
        assert world.broker.ended == [(state.value, False)]
        (end,) = world.broker.ends
        assert end.remark is not None
        assert end.remark.startswith(type(raised).__name__)


@virtual_time()
async def test_a_cancelled_task_leaves_it_to_the_check() -> None:
    async with transaction_world() as world, producing(world) as producer:

        async def work() -> None:
            async with producer.transaction(MESSAGE):
                await asyncio.sleep(3600)

        task = asyncio.create_task(work())
        await settled()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settled()
        assert world.broker.ended == [(UNKNOWN.value, False)]


@pytest.mark.parametrize("state", TransactionState)
@virtual_time()
async def test_a_decision_inside_the_block_is_the_only_one(state: TransactionState) -> None:
    async def work() -> None:
        async with producer.transaction(MESSAGE) as transaction:
            await getattr(transaction, state.name.lower())()
            assert transaction.state is state
            for late in (transaction.commit, transaction.rollback, transaction.unknown):
                with pytest.raises(ClientError, match=f"ended already with {state.name}"):
                    await late()
            raise ValueError("afterwards")

    async with transaction_world() as world, producing(world) as producer:
        with pytest.raises(ValueError, match="afterwards"):
            await work()
        await settled()
        assert world.broker.ended == [(state.value, False)]


@virtual_time()
async def test_a_transaction_without_a_block() -> None:
    async with transaction_world() as world, producing(world) as producer:
        transaction = producer.transaction(MESSAGE)
        assert "not begun" in repr(transaction)
        for use in (transaction.commit, transaction.rollback):
            with pytest.raises(ClientError, match="has not begun"):
                await use()
        with pytest.raises(ClientError, match="has not begun: enter its block"):
            _ = transaction.id
        await transaction.begin()
        assert repr(transaction) == f"<Transaction {transaction.id} of topic T: open>"
        with pytest.raises(ClientError, match="has begun already"):
            await transaction.begin()
        not_a_state: Any = True
        with pytest.raises(InvalidArgument, match="must be a TransactionState, got True"):
            await transaction.end(not_a_state)
        await transaction.commit()
        await settled()
        assert world.broker.ended == [(COMMIT.value, False)]


@pytest.mark.parametrize("answer", [COMMIT, ROLLBACK, UNKNOWN])
@pytest.mark.parametrize("is_plain", [False, True])
@virtual_time()
async def test_a_function_says_how_its_transaction_ends(
    answer: TransactionState, is_plain: bool
) -> None:
    async def execute(transaction: Transaction) -> TransactionState:
        assert transaction.id
        return answer

    def plain(transaction: Transaction) -> TransactionState:
        return answer

    async with transaction_world() as world, producing(world) as producer:
        ended = await producer.send_in_transaction(MESSAGE, plain if is_plain else execute)
        assert (ended.state, ended.message) == (answer, MESSAGE)
        await settled()
        assert world.broker.ended == [(answer.value, False)]


@pytest.mark.parametrize("answer", [None, True, "COMMIT", 8])
@virtual_time()
async def test_a_function_that_returns_no_state_leaves_it_to_the_check(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def execute(transaction: Transaction) -> Any:
        return answer

    async with transaction_world() as world, producing(world) as producer:
        ended = await producer.send_in_transaction(MESSAGE, execute)
        assert ended.state is UNKNOWN
        await settled()
        assert world.broker.ended == [(UNKNOWN.value, False)]
    assert f"execute returned {answer!r}" in caplog.text


@virtual_time()
async def test_a_function_may_raise_or_decide_by_itself() -> None:
    async def fail(transaction: Transaction) -> TransactionState:
        raise ValueError("no stock")

    async def decide(transaction: Transaction) -> TransactionState:
        await transaction.rollback()
        return COMMIT

    async with transaction_world() as world, producing(world) as producer:
        with pytest.raises(ValueError, match="no stock"):
            await producer.send_in_transaction(MESSAGE, fail)
        assert (await producer.send_in_transaction(MESSAGE, decide)).state is ROLLBACK
        await settled()
        assert world.broker.ended == [(ROLLBACK.value, False)] * 2


@pytest.mark.parametrize("decision", ["rollback", "unknown"])
@virtual_time()
async def test_a_decision_counts_even_if_its_await_is_forgotten(decision: str) -> None:
    async with transaction_world() as world, producing(world) as producer:
        async with producer.transaction(MESSAGE) as transaction:
            getattr(transaction, decision)()
            with pytest.raises(ClientError, match="has ended already"):
                transaction.commit()
        await settled()
        state = ROLLBACK if decision == "rollback" else UNKNOWN
        assert world.broker.ended == [(state.value, False)]


@virtual_time()
async def test_a_decision_without_await_names_the_half_message_that_a_check_moved() -> None:
    async with transaction_world() as world, producing(world) as producer:
        async with producer.transaction(MESSAGE) as transaction:
            transaction.rollback()
            world.broker.check(world.broker.batches[0], moved_by=7)
            await settled()
        await settled()
        assert world.broker.ended == [(UNKNOWN.value, True), (ROLLBACK.value, False)]
        assert [header_of(end).tran_state_table_offset for end in world.broker.ends] == [7, 7]


# --- half messages that fail ----------------------------------------------------------------------


@pytest.mark.parametrize("is_retried", [False, True])
@pytest.mark.parametrize(
    "code",
    [
        ResponseCode.FLUSH_DISK_TIMEOUT,
        ResponseCode.FLUSH_SLAVE_TIMEOUT,
        ResponseCode.SLAVE_NOT_AVAILABLE,
    ],
)
@virtual_time()
async def test_an_unsafe_half_message_is_rolled_back_and_the_block_not_run(
    code: ResponseCode, is_retried: bool
) -> None:
    config = ProducerConfig(retry_unless_ok=is_retried)
    async with (
        transaction_world(lambda batch: half_stored(batch, code)) as world,
        producing(world, config=config) as producer,
    ):
        with pytest.raises(TransactionNotStarted, match=code.name) as caught:
            async with producer.transaction(MESSAGE):
                pytest.fail("the block was run")
        assert caught.value.retriable
        await settled()
        assert world.broker.ended == [(ROLLBACK.value, False)]
        assert len(world.broker.batches) == 1


@virtual_time()
async def test_a_response_without_the_position_of_the_half_message() -> None:
    def odd(batch: Batch) -> Command:
        answer = half_stored(batch)
        fields = {**(answer.ext_fields or {}), "msgId": "AB"}
        return batch.request.answer(ResponseCode.SUCCESS, fields)

    async with transaction_world(odd) as world, producing(world) as producer:
        with pytest.raises(TransactionNotStarted, match=r"offset message id must be .*got 'AB'"):
            async with producer.transaction(MESSAGE):
                pytest.fail("the block was run")
        await settled()
        assert world.broker.ends == []


@pytest.mark.parametrize("kind", [RequestTimeout, ConnectionLost])
@virtual_time()
async def test_a_half_message_that_may_be_stored_is_not_sent_again(
    kind: type[Exception],
) -> None:
    """The check would find two half messages of one transaction, and commit both."""

    def silent(batch: Batch) -> None:
        if kind is ConnectionLost:
            batch.peer.abort("as the test wants it")

    config = ProducerConfig(send_timeout=0.5)
    async with (
        transaction_world(silent) as world,
        producing(world, config=config) as producer,
    ):
        with pytest.raises(kind):
            async with producer.transaction(MESSAGE):
                pytest.fail("the block was run")
        assert len(world.broker.batches) == 1
        if kind is ConnectionLost:
            # Like a message without a transaction: consumers must expect that.
            with pytest.raises(kind):
                await producer.send(MESSAGE)
            assert len(world.broker.batches) == 4


@pytest.mark.parametrize(
    ("code", "tries"),
    [
        (ResponseCode.SYSTEM_BUSY, 2),
        (ResponseCode.SERVICE_NOT_AVAILABLE, 2),
        (ResponseCode.NO_PERMISSION, 2),
        (ResponseCode.SYSTEM_ERROR, 1),
        (ResponseCode.MESSAGE_ILLEGAL, 1),
    ],
)
@virtual_time()
async def test_a_rejected_half_message_is_retried_like_others(
    code: ResponseCode, tries: int
) -> None:
    def decide(batch: Batch) -> Command:
        return half_stored(batch) if batch.number else refused(batch, code)

    async with transaction_world(decide) as world, producing(world) as producer:
        if tries == 1:
            with pytest.raises(RemoteError):
                async with producer.transaction(MESSAGE):
                    pytest.fail("the block was run")
        else:
            async with producer.transaction(MESSAGE):
                pass
        await settled()
        assert len(world.broker.batches) == tries
        assert len(world.broker.ends) == tries - 1


@virtual_time()
async def test_messages_that_cannot_be_transactional_are_rejected() -> None:
    async with transaction_world() as world, producing(world) as producer:
        with pytest.raises(InvalidArgument, match="the delay of a transactional message must be"):
            async with producer.transaction(Message("T", b"x", delay_level=3)):
                pytest.fail("the block was run")
        batch: Any = [MESSAGE, MESSAGE]
        with pytest.raises(InvalidArgument, match="expects a Message"):
            async with producer.transaction(batch):
                pytest.fail("the block was run")
        with pytest.raises(InvalidArgument, match="'TRAN_MSG' is reserved"):
            await producer.send(Message("T", b"x", properties={"TRAN_MSG": "true"}))
        assert world.broker.batches == []


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"check": None}, "check must be a function of .message., got None"),
        ({"topics": "orders"}, "topics must be a list of names, got the string 'orders'"),
        ({"topics": ["a b"]}, "topic must .* got 'a b'"),
        ({"check_workers": 0}, "check_workers must be .*, got 0"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        TransactionProducer("pg", nameserver="127.0.0.1:9876", **{"check": never, **settings})


# --- ends that fail -------------------------------------------------------------------------------


class Ends:
    """A hook that records how transactions end."""

    def __init__(self) -> None:
        self.seen: list[TransactionEnd] = []
        self.sent: list[str] = []

    def before_send(self, group: str, sent: Any, queue: Any) -> None:
        self.sent.append(sent.message_id)

    def after_send(self, group: str, sent: Any, queue: Any, outcome: Any) -> None:
        assert isinstance(outcome, SendReceipt)

    def transaction_ended(self, end: TransactionEnd) -> None:
        self.seen.append(end)
        raise RuntimeError("exceptions of hooks are only logged")


@virtual_time()
async def test_the_end_waits_for_a_broker_that_is_down(caplog: pytest.LogCaptureFixture) -> None:
    hook = Ends()
    async with transaction_world() as world, producing(world, hooks=[hook]) as producer:
        async with producer.transaction(MESSAGE):
            world.network.refuse("10.0.0.1")
            world.network.cut("10.0.0.1")
            await settled()
            asyncio.get_running_loop().call_later(1, world.network.accept, "10.0.0.1")
        await settled()
        assert world.broker.ended == [(COMMIT.value, False)]
    (seen,) = hook.seen
    assert (seen.state, seen.is_check, seen.error) == (COMMIT, False, None)
    assert [seen.transaction_id] == hook.sent
    assert seen.message is MESSAGE
    assert "only logged" in caplog.text


@virtual_time()
async def test_hooks_may_be_proxies() -> None:
    hook = Mock(spec=Ends)
    async with transaction_world() as world, producing(world, hooks=[hook]) as producer:
        async with producer.transaction(MESSAGE):
            pass
        await settled()
    hook.transaction_ended.assert_called_once()


class Marking(Ends):
    """A hook that changes what is sent."""

    @contextmanager
    def sending(self, group: str, messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
        self.sent += [f"{group}: {message.topic}" for message in messages]
        yield messages


class Proxy:
    """Passes everything on to a hook."""

    def __init__(self, hook: object) -> None:
        self._hook = hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hook, name)


@virtual_time()
async def test_a_proxy_may_wrap_sends() -> None:
    hook = Marking()
    async with (
        transaction_world() as world,
        producing(world, hooks=[Proxy(hook)]) as producer,
        producer.transaction(MESSAGE),
    ):
        pass
    assert hook.sent[0] == f"pg: {MESSAGE.topic}"


@virtual_time()
async def test_an_end_is_sent_again_when_its_connection_was_lost_before() -> None:
    def refuse(address: str, command: Command) -> None:
        if command.code == RequestCode.END_TRANSACTION and len(recorder.of(command.code)) == 1:
            raise ConnectionLost("as the test wants it")

    recorder = Recorder(refuse=refuse)
    async with (
        transaction_world() as world,
        TransactionProducer(
            "pg", check=never, session=world.session(hooks=(recorder,))
        ) as producer,
    ):
        async with producer.transaction(MESSAGE):
            pass
        await settled()
        assert len(recorder.of(RequestCode.END_TRANSACTION)) == 2
        assert world.broker.ended == [(COMMIT.value, False)]


@pytest.mark.parametrize("state", [COMMIT, UNKNOWN])
@virtual_time()
async def test_an_end_that_cannot_be_sent_is_logged_and_does_not_raise(
    state: TransactionState, caplog: pytest.LogCaptureFixture
) -> None:
    hook = Ends()
    async with transaction_world() as world, producing(world, hooks=[hook]) as producer:
        loop = asyncio.get_running_loop()
        async with producer.transaction(MESSAGE) as transaction:
            world.network.refuse("10.0.0.1")
            world.network.cut("10.0.0.1")
            await settled()
            began_s = loop.time()
            await transaction.end(state)
            # An UNKNOWN would have no effect, so there is no wait.
            assert (loop.time() - began_s > 2) is (state is COMMIT)
        assert transaction.state is state
        assert world.broker.ends == []
        world.network.accept("10.0.0.1")
    assert f"{state.name} was not sent" in caplog.text
    assert hook.seen[0].error is not None


@virtual_time()
async def test_a_producer_that_was_closed_inside_the_block(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with transaction_world() as world, producing(world) as producer:
        async with producer.transaction(MESSAGE):
            await producer.close()
        assert "COMMIT was not sent" in caplog.text
        with pytest.raises(NotRunning, match="'pg' is not running"):
            producer.transaction(MESSAGE)


@virtual_time()
async def test_plain_messages_are_sent_as_by_any_producer() -> None:
    async with transaction_world() as world, producing(world) as producer:
        await producer.send(MESSAGE)
        (batch,) = world.broker.batches
        assert (batch.request.ext_fields or {})["f"] == "0"
        assert "TRAN_MSG" not in named(batch)
        assert whole_body(batch.request) == b"hello"
        assert world.broker.ends == []
