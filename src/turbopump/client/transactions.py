"""Messages that become visible only if their local transaction commits.

A transaction has two steps. First, the broker stores the message where no consumer sees it (a half
message). Then the producer asks the broker to commit or roll back. If it does not, the broker asks
any producer of the group (a check), whose function ``check`` looks up the answer.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple, Self
from weakref import WeakValueDictionary

from msgspec import structs

from turbopump.client import calls
from turbopump.client.arguments import check_callable, check_kind, hooks_with
from turbopump.client.calls import SendStatus
from turbopump.client.config import ClientConfig
from turbopump.client.message_sender import To
from turbopump.client.names import check_topic, with_namespace, without_namespace
from turbopump.client.producer import Producer, Running
from turbopump.client.producer_config import ProducerConfig
from turbopump.client.send_hooks import SendHook, SendReceipt
from turbopump.client.send_retries import SendRetries
from turbopump.client.session import Session
from turbopump.client.transaction_checks import Check, CheckRequest, TransactionChecks
from turbopump.client.transaction_ends import (
    TransactionEnd,
    TransactionHook,
    TransactionState,
    report_end,
    state_after,
    state_from,
)
from turbopump.durations import Duration
from turbopump.errors import (
    ClientError,
    InvalidArgument,
    NetworkError,
    NoRoute,
    TransactionNotStarted,
    TurbopumpError,
)
from turbopump.message import Message, MessageQueue
from turbopump.net.limits import require_at_least
from turbopump.net.router import sendable
from turbopump.wire import properties
from turbopump.wire.headers import CheckTransactionState, EndTransaction
from turbopump.wire.ids import parse_offset_id
from turbopump.wire.names import SELF_TEST_TOPIC
from turbopump.wire.record import MessageView

_log = logging.getLogger(__name__)

Execute = Callable[["Transaction"], TransactionState | Awaitable[TransactionState]]
"""Runs a local transaction and returns how it ended."""


class _Place(NamedTuple):
    """Where a half message is stored; a check moves it to the end of its queue."""

    queue_offset: int
    physical_offset: int


class Ending(Awaitable[None]):
    """A decision that counts already: awaiting it sends it to the broker, once."""

    def __init__(self, send: Callable[[], Awaitable[None]]) -> None:
        self._send: Callable[[], Awaitable[None]] | None = send

    def __await__(self) -> Generator[Any, None, None]:
        send, self._send = self._send, None
        if send is not None:
            yield from send().__await__()


class Transaction:
    """One local transaction and its message, from `TransactionProducer.transaction`.

    ::

        async with producer.transaction(Message("orders", b"hello")) as transaction:
            await database.execute(INSERT, transaction.id)

    Entering the block stores the half message; leaving it commits, an exception rolls back. An
    interrupt or a cancellation may arrive while the database commits, so it leaves the decision to
    ``check``. `commit`, `rollback` and `unknown` decide before the end of the block, and only once:
    the call itself decides, and the end of the block sends what was not awaited.

    Decisions do not raise if the broker is unreachable: the local transaction is already over, and
    the broker asks for its state later.
    """

    def __init__(
        self,
        message: Message,
        begin: Callable[[Transaction], Awaitable[tuple[SendReceipt, _Place]]],
        end: Callable[
            [Message, SendReceipt, _Place, TransactionState, BaseException | None], Awaitable[None]
        ],
    ) -> None:
        self.message = message
        self.state: TransactionState | None = None
        """The state it ended in; None while it is open."""
        self._begin = begin
        self._end = end
        self._begun: tuple[SendReceipt, _Place] | None = None
        self._ending: Ending | None = None

    def __repr__(self) -> str:
        id_ = self.id if self._begun else "not begun"
        state = "open" if self.state is None else self.state.name
        return f"<Transaction {id_} of topic {self.message.topic}: {state}>"

    @property
    def receipt(self) -> SendReceipt:
        """The broker's receipt of the half message."""
        return self._require_begun()[0]

    @property
    def id(self) -> str:
        """The message id that consumers and ``check`` see."""
        return self.receipt.message_id

    async def begin(self) -> None:
        """Store the half message; ``async with`` does this.

        ::

            transaction = producer.transaction(Message("orders", b"hello"))
            await transaction.begin()
        """
        if self._begun is not None:
            raise ClientError(f"transaction {self.id} has begun already: make one per message")
        self._begun = await self._begin(self)

    def commit(self) -> Ending:
        """Make the message visible to consumers before the block ends."""
        return self.end(TransactionState.COMMIT)

    def rollback(self) -> Ending:
        """Discard the message without raising an exception."""
        return self.end(TransactionState.ROLLBACK)

    def unknown(self) -> Ending:
        """Leave the decision to ``check``, as when the outcome of a database commit is unknown."""
        return self.end(TransactionState.UNKNOWN)

    def end(self, state: TransactionState, error: BaseException | None = None) -> Ending:
        """End in a state; ``error`` is the reason reported to the broker."""
        if not isinstance(state, TransactionState):
            raise InvalidArgument(f"state must be a TransactionState, got {state!r}")
        self._require_begun()
        if self.state is not None:
            raise ClientError(
                f"transaction {self.id} has ended already with {self.state.name}, "
                f"{state.name} comes too late"
            )
        self.state = state
        # Decided here, not when awaited: a forgotten await must not commit what was rolled back.
        self._ending = Ending(functools.partial(self._send_end, state, error))
        return self._ending

    async def _send_end(self, state: TransactionState, error: BaseException | None) -> None:
        # Where the half message is now: checks may have moved it since the decision.
        receipt, place = self._require_begun()
        await self._end(self.message, receipt, place, state, error)

    def moved(self, asked: CheckTransactionState) -> None:
        """Note where a check moved the half message: the decision must name the newest copy."""
        place = _Place(asked.tran_state_table_offset, asked.commit_log_offset)
        self._begun = (self.receipt, place)

    async def __aenter__(self) -> Self:
        await self.begin()
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, *_: object) -> None:
        await (self._ending or self.end(state_after(error), error))

    def _require_begun(self) -> tuple[SendReceipt, _Place]:
        if self._begun is None:
            raise ClientError("the transaction has not begun: enter its block, or call begin()")
        return self._begun


class TransactionProducer(Producer):
    """Sends messages that consumers see only if a local transaction commits.

    ::

        async def check(message):
            is_stored = await database.has_order(message.message_id)
            return TransactionState.COMMIT if is_stored else TransactionState.UNKNOWN

        async with TransactionProducer(
            "orders-producer", check=check, nameserver="127.0.0.1:9876"
        ) as producer:
            async with producer.transaction(Message("orders", b"hello")) as transaction:
                await database.insert_order(transaction.id)

    ``check`` answers for every producer of the group, including those that died: it must look up
    the transaction where all of them store it. ROLLBACK is right only if it can never commit later.
    A plain function is called in ``check_workers`` threads, an ``async def`` on the loop. Its
    errors, and any result other than a `TransactionState`, are logged and mean UNKNOWN.

    Brokers ask only producers that they know. At the start, the group is announced to all brokers
    of the name server's clusters, or only to those of ``topics`` if given.

    Messages without a transaction are sent as with a `Producer`.
    """

    def __init__(
        self,
        group: str,
        *,
        check: Check,
        topics: Sequence[str] | None = None,
        check_workers: int = 1,
        nameserver: str | Sequence[str] = "",
        namespace: str = "",
        config: ProducerConfig | None = None,
        client: ClientConfig | None = None,
        session: Session | None = None,
        hooks: Sequence[SendHook] = (),
    ) -> None:
        super().__init__(
            group,
            nameserver=nameserver,
            namespace=namespace,
            config=config,
            client=client,
            session=session,
            hooks=hooks,
        )
        check_callable("check", check, "(message)")
        if isinstance(topics, str):
            raise InvalidArgument(f"topics must be a list of names, got the string {topics!r}")
        for topic in topics or ():
            check_topic(topic)
        require_at_least("check_workers", check_workers, 1)
        # Every broker has this topic, and its route leads to all of them.
        self._topics = (
            [SELF_TEST_TOPIC]
            if topics is None
            else [with_namespace(self._client.namespace, topic) for topic in topics]
        )
        self._new_checks = functools.partial(
            TransactionChecks, self.group, check, self._answer, check_workers
        )
        self._checks: TransactionChecks | None = None
        self._end_hooks: list[TransactionHook] = hooks_with(self._hooks, "transaction_ended")
        # Weak: a transaction whose block was never entered must not count as open forever.
        self._open: WeakValueDictionary[str, Transaction] = WeakValueDictionary()

    async def start(self) -> None:
        """Start, and announce the group to the brokers; unreachable ones are notified later."""
        if self._running is not None:
            return
        # Before brokers learn of the group, or the first check would arrive too early.
        self._checks = self._new_checks()
        await super().start()
        try:
            await self.running.session.refresh_routes()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Wait for running checks and messages in flight, then leave the session.

        Open transactions are decided later by a check.
        """
        checks, self._checks = self._checks, None
        if checks is not None and self._running is not None:
            self._running.session.require_own_process()
            await checks.close()
        await super().close()

    # --- transactions -----------------------------------------------------------------------------

    def transaction(
        self, message: Message, *, to: To = None, timeout: Duration | None = None
    ) -> Transaction:
        """Return a transaction for one message, for use with ``async with``.

        Entering it raises what `send` raises, and TransactionNotStarted if the half message is not
        safe; the block does not run then. A half message that may have been stored is not sent
        again: each copy would be committed.

        ::

            async with producer.transaction(Message("orders", b"hello")) as transaction:
                await database.insert_order(transaction.id)
        """
        check_kind("transaction()", message, Message)
        running = self.running
        return Transaction(
            message,
            functools.partial(self._begin, running, to, timeout),
            functools.partial(self._decide, running),
        )

    async def send_in_transaction(
        self, message: Message, execute: Execute, *, to: To = None, timeout: Duration | None = None
    ) -> Transaction:
        """Call ``execute`` with a transaction, and end it in the returned state.

        An exception rolls back and is re-raised. Any result other than a `TransactionState` is
        logged and means UNKNOWN.

        ::

            async def execute(transaction):
                await database.insert_order(transaction.id)
                return TransactionState.COMMIT

            transaction = await producer.send_in_transaction(Message("orders", b"hello"), execute)
        """
        check_callable("execute", execute, "(transaction)")
        async with self.transaction(message, to=to, timeout=timeout) as transaction:
            answer: object = execute(transaction)
            if inspect.isawaitable(answer):
                answer = await answer
            if transaction.state is None:
                await transaction.end(state_from(answer, "execute", transaction.id))
        return transaction

    async def _begin(
        self, running: Running, to: To, timeout: Duration | None, transaction: Transaction
    ) -> tuple[SendReceipt, _Place]:
        half = {properties.TRANSACTION_PREPARED: "true", properties.PRODUCER_GROUP: self.group}
        receipt = await running.sender.send(
            running.io, transaction.message, to=to, timeout=timeout, extra=half
        )
        try:
            _, physical_offset = parse_offset_id(receipt.offset_id)
        except InvalidArgument as error:
            raise TransactionNotStarted(f"broker {receipt.queue.broker}: {error}") from error
        place = _Place(receipt.queue_offset, physical_offset)
        if receipt.status is not SendStatus.OK:
            unsafe = TransactionNotStarted(
                f"half message {receipt.message_id} has status {receipt.status.name}, expected OK: "
                f"broker {receipt.queue.broker} might lose it, so it was rolled back"
            )
            await self._decide(
                running, transaction.message, receipt, place, TransactionState.ROLLBACK, unsafe
            )
            raise unsafe
        self._open[receipt.message_id] = transaction
        return receipt, place

    async def _decide(
        self,
        running: Running,
        message: Message,
        receipt: SendReceipt,
        place: _Place,
        state: TransactionState,
        reason: BaseException | None,
    ) -> None:
        self._open.pop(receipt.message_id, None)
        header = EndTransaction(
            producer_group=self.group,
            tran_state_table_offset=place.queue_offset,
            commit_log_offset=place.physical_offset,
            commit_or_rollback=state.value,
            from_transaction_check=False,
            msg_id=receipt.message_id,
            broker_name=receipt.queue.broker,
        )
        remark = None if reason is None else sendable(f"{type(reason).__name__}: {reason}")
        queue = structs.replace(
            receipt.queue, topic=running.sender.broker_topic(receipt.queue.topic)
        )
        await self._reported(
            TransactionEnd(self.group, receipt.message_id, message, state, is_check=False),
            self._send_end(running, queue, header, remark),
        )

    async def _send_end(
        self, running: Running, queue: MessageQueue, header: EndTransaction, remark: str | None
    ) -> None:
        """Send a decision, within the timeout of a send.

        A one-way request that fails was not written, so retrying cannot repeat it.
        """
        session = running.session
        end_ms = running.sender.end_ms(None)
        retries = SendRetries(session, queue.topic, self._config, end_ms, is_chosen=False)
        while True:
            left_ms = max(end_ms - session.clock.monotonic_ms(), 1)
            try:
                address = session.address_to_write(queue.broker)
                await calls.end_transaction(session, address, header, left_ms, remark)
            except (NetworkError, NoRoute) as error:
                # UNKNOWN has no effect at the broker: do not wait for it.
                is_unknown = header.commit_or_rollback == TransactionState.UNKNOWN.value
                if is_unknown or not retries.after_error(error, queue):
                    raise
            else:
                return
            if retries.pause_ms:
                await retries.pause()

    async def _reported(self, end: TransactionEnd, sending: Awaitable[None]) -> None:
        try:
            await sending
        except TurbopumpError as error:
            end = structs.replace(end, error=error)
        report_end(end, self._end_hooks)

    # --- checks -----------------------------------------------------------------------------------

    @property
    def is_checking(self) -> bool:
        """Whether the caller is ``check``, or called by it."""
        return self._checks is not None and self._checks.is_calling

    def topics(self) -> Iterable[str]:
        """Return the topics whose brokers must know the group before the first send."""
        return self._topics

    def check_transaction(
        self, broker_address: str, asked: CheckTransactionState, message: MessageView
    ) -> None:
        """Answer a broker's check."""
        if self._checks is None:
            _log.info("transaction %s is not checked: producer closes", message.message_id)
            return
        topic = without_namespace(self._client.namespace, message.topic)
        question = CheckRequest(broker_address, asked, message.replaced(topic=topic))
        transaction = self._open.get(message.message_id)
        if transaction is None:
            self._checks.submit(question)
        else:
            # The block still runs here: ``check`` would not find it, and roll it back.
            transaction.moved(asked)
            self._answer(question)

    def _answer(self, asked: CheckRequest) -> None:
        if self._running is not None:
            self._running.tasks.start(self._answer_to(self._running, asked))

    async def _answer_to(self, running: Running, asked: CheckRequest) -> None:
        header = EndTransaction(
            producer_group=self.group,
            tran_state_table_offset=asked.header.tran_state_table_offset,
            commit_log_offset=asked.header.commit_log_offset,
            commit_or_rollback=asked.state.value,
            from_transaction_check=True,
            msg_id=asked.message.message_id,
            transaction_id=asked.header.transaction_id,
        )
        limit_ms = self._config.send_timeout_ms
        await self._reported(
            TransactionEnd(
                self.group, asked.message.message_id, asked.message, asked.state, is_check=True
            ),
            calls.end_transaction(running.session, asked.broker_address, header, limit_ms),
        )
