"""Transactions for programs without an event loop: the block runs in the caller's thread."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Self

from turbopump.client import transactions
from turbopump.client.arguments import check_callable
from turbopump.client.background import LoopThread
from turbopump.client.blocking import Producer, blocking, built_by, documented_by
from turbopump.client.delivery.listener import is_async
from turbopump.client.message_sender import To
from turbopump.client.send_hooks import SendReceipt
from turbopump.client.transaction_ends import TransactionState, state_from
from turbopump.durations import Duration
from turbopump.errors import ClientError, InvalidArgument
from turbopump.message import Message

_log = logging.getLogger(__name__)

P = ParamSpec("P")

Execute = Callable[["Transaction"], TransactionState]
"""Runs a local transaction and returns how it ended."""


def _sent(
    decide: Callable[Concatenate[transactions.Transaction, P], transactions.Ending],
) -> Callable[Concatenate[transactions.Transaction, P], Coroutine[Any, Any, None]]:
    @functools.wraps(decide)
    async def send(client: transactions.Transaction, /, *args: P.args, **kwargs: P.kwargs) -> None:
        await decide(client, *args, **kwargs)

    return send


class Transaction:
    """One local transaction and its message, from `TransactionProducer.transaction`.

    ::

        with producer.transaction(Message("orders", b"hello")) as transaction:
            database.execute(INSERT, [transaction.id])

    Entering the block stores the half message; leaving it commits, an exception rolls back. An
    interrupt may arrive while the database commits, so it leaves the decision to ``check``.
    `commit`, `rollback` and `unknown` decide before the end of the block, and only once.

    Decisions do not raise if the broker is unreachable: the local transaction is already over, and
    the broker asks for its state later.
    """

    def __init__(self, client: transactions.Transaction, running: Callable[[], LoopThread]) -> None:
        self._client = client
        self._running = running

    def __repr__(self) -> str:
        return repr(self._client)

    @property
    def message(self) -> Message:
        return self._client.message

    @property
    def state(self) -> TransactionState | None:
        """The state it ended in; None while it is open."""
        return self._client.state

    @property
    def receipt(self) -> SendReceipt:
        """The broker's receipt of the half message."""
        return self._client.receipt

    @property
    def id(self) -> str:
        """The message id that consumers and ``check`` see."""
        return self._client.id

    begin = blocking(transactions.Transaction.begin)
    commit = blocking(_sent(transactions.Transaction.commit))
    rollback = blocking(_sent(transactions.Transaction.rollback))
    unknown = blocking(_sent(transactions.Transaction.unknown))
    end = blocking(_sent(transactions.Transaction.end))
    _exit = blocking(transactions.Transaction.__aexit__)

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        try:
            self._exit(kind, error)
        except ClientError as failure:
            # The client was closed or forked in the meantime: the local transaction is over anyway.
            _log.warning("%r ends by a check of the broker: %s", self, failure)


class TransactionProducer(Producer):
    """Sends messages that consumers see only if a local transaction commits; threads may share one.

    ::

        def check(message):
            is_stored = database.has_order(message.message_id)
            return TransactionState.COMMIT if is_stored else TransactionState.UNKNOWN

        with TransactionProducer(
            "orders-producer", check=check, nameserver="127.0.0.1:9876"
        ) as producer:
            with producer.transaction(Message("orders", b"hello")) as transaction:
                database.insert_order(transaction.id)

    ``check`` answers for every producer of the group, including those that died: it must look up
    the transaction where all of them store it. ROLLBACK is right only if it can never commit later.
    It is called in ``check_workers`` threads. Its errors, and any result other than a
    `TransactionState`, are logged and mean UNKNOWN.

    Brokers ask only producers that they know. At the start, the group is announced to all brokers
    of the name server's clusters, or only to those of ``topics`` if given.

    Messages without a transaction are sent as with a `Producer`.
    """

    _client: transactions.TransactionProducer

    @built_by(transactions.TransactionProducer)
    def __init__(self) -> None: ...

    @documented_by(transactions.TransactionProducer.transaction)
    def transaction(
        self, message: Message, *, to: To = None, timeout: Duration | None = None
    ) -> Transaction:
        self._running()
        begun = self._client.transaction(message, to=to, timeout=timeout)
        return Transaction(begun, self._running)

    @documented_by(transactions.TransactionProducer.send_in_transaction)
    def send_in_transaction(
        self, message: Message, execute: Execute, *, to: To = None, timeout: Duration | None = None
    ) -> Transaction:
        check_callable("execute", execute, "(transaction)")
        if is_async(execute):
            raise InvalidArgument(
                "execute must not be async: turbopump.aio.TransactionProducer awaits functions"
            )
        with self.transaction(message, to=to, timeout=timeout) as transaction:
            answer: object = execute(transaction)
            if transaction.state is None:
                transaction.end(state_from(answer, "execute", transaction.id))
        return transaction

    def _is_called_back(self) -> bool:
        return super()._is_called_back() or self._client.is_checking
