"""Transactions of threads: blocks run in the caller's thread, checks in others."""

from __future__ import annotations

import inspect
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

import turbopump
import turbopump.aio
from scripted_broker import serving
from transaction_broker import TransactionBroker, named
from turbopump import Message, Transaction, TransactionProducer, TransactionState
from turbopump.errors import ClientError, InvalidArgument, NotRunning
from turbopump.wire.command import Command
from turbopump.wire.record import MessageView

COMMIT, ROLLBACK, UNKNOWN = TransactionState
MESSAGE = Message("T", b"hello")
WAIT_S = 20


class Heard(TransactionBroker):
    """Lets a thread wait for the ends that arrive."""

    arrived: queue.SimpleQueue[None]

    def end(self, request: Command, peer: Any) -> None:
        super().end(request, peer)
        self.arrived.put(None)


def never(message: MessageView) -> TransactionState:
    raise AssertionError(f"{message.message_id} was checked")


@contextmanager
def producing(check: Any = never, **settings: Any) -> Iterator[tuple[Heard, TransactionProducer]]:
    heard = Heard()
    heard.arrived = queue.SimpleQueue()
    with (
        serving(heard),
        TransactionProducer("pg", check=check, nameserver=heard.address, **settings) as producer,
    ):
        yield heard, producer


def left_open(heard: Heard, producer: TransactionProducer) -> None:
    """Leave one transaction to the checks."""
    with producer.transaction(MESSAGE) as transaction:
        transaction.unknown()
    heard.arrived.get(timeout=WAIT_S)
    heard.ends.clear()


@pytest.mark.parametrize(
    ("raised", "state"),
    [(None, COMMIT), (ValueError("no"), ROLLBACK), (KeyboardInterrupt(), UNKNOWN)],
)
def test_the_block_decides_the_outcome(
    raised: BaseException | None, state: TransactionState
) -> None:
    with producing() as (heard, producer):
        transaction = producer.transaction(MESSAGE)
        try:
            with transaction:
                assert transaction.state is None
                assert transaction.message is MESSAGE
                if raised is not None:
                    raise raised
        except (ValueError, KeyboardInterrupt) as error:
            assert error is raised
        heard.arrived.get(timeout=WAIT_S)
        assert heard.ended == [(state.value, False)]
        assert transaction.state is state
        assert (
            transaction.id == transaction.receipt.message_id == named(heard.batches[0])["UNIQ_KEY"]
        )
        assert transaction.id in repr(transaction)


def test_decisions_by_hand() -> None:
    with producing() as (heard, producer):
        transaction = producer.transaction(MESSAGE)
        with pytest.raises(ClientError, match="has not begun"):
            transaction.commit()
        transaction.begin()
        transaction.rollback()
        with pytest.raises(ClientError, match="ended already with ROLLBACK"):
            transaction.commit()
        heard.arrived.get(timeout=WAIT_S)
        assert heard.ended == [(ROLLBACK.value, False)]


def test_a_function_runs_in_the_callers_thread() -> None:
    threads: list[threading.Thread] = []

    def execute(transaction: Transaction) -> TransactionState:
        threads.append(threading.current_thread())
        assert transaction.id
        return COMMIT

    def wrong(transaction: Transaction) -> Any:
        return None

    with producing() as (heard, producer):
        assert producer.send_in_transaction(MESSAGE, execute).state is COMMIT
        assert threads == [threading.current_thread()]
        assert producer.send_in_transaction(MESSAGE, wrong).state is UNKNOWN
        for _ in range(2):
            heard.arrived.get(timeout=WAIT_S)
        assert heard.ended == [(COMMIT.value, False), (UNKNOWN.value, False)]


def test_checks_run_in_a_few_threads_other_than_the_callers() -> None:
    begun: queue.SimpleQueue[str] = queue.SimpleQueue()
    go_on = threading.Event()

    def check(message: MessageView) -> TransactionState:
        begun.put(threading.current_thread().name)
        go_on.wait(WAIT_S)
        return COMMIT

    with producing(check, check_workers=2) as (heard, producer):
        left_open(heard, producer)
        for number in range(6):
            heard.check(heard.batches[0], moved_by=number)
        threads = {begun.get(timeout=WAIT_S) for _ in range(2)}
        # The loop is free meanwhile.
        producer.send(MESSAGE)
        go_on.set()
        for _ in range(6):
            heard.arrived.get(timeout=WAIT_S)
        threads |= {begun.get(timeout=WAIT_S) for _ in range(4)}
        assert len(threads) == 2
        assert threads.isdisjoint({"MainThread", "turbopump-client"})
        assert heard.ended == [(COMMIT.value, True)] * 6


def test_a_check_may_use_its_producer_and_close_it() -> None:
    def check(message: MessageView) -> TransactionState:
        sent.append(producer.send(Message("T", b"from the check")).message_id)
        producer.close()
        return COMMIT

    sent: list[str] = []
    with producing(check) as (heard, producer):
        left_open(heard, producer)
        heard.check(heard.batches[0])
        heard.arrived.get(timeout=WAIT_S)
        producer.close()
        assert heard.ended == [(COMMIT.value, True)]
        assert len(sent) == 1


def test_a_producer_closed_inside_the_block_does_not_make_the_block_fail(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with producing() as (heard, producer):
        with caplog.at_level(logging.WARNING), producer.transaction(MESSAGE):
            producer.close()
        assert "ends by a check of the broker" in caplog.text
        assert heard.ends == []
        with pytest.raises(NotRunning):
            producer.transaction(MESSAGE)


def test_a_forked_child_that_leaves_the_block_ends_nothing() -> None:
    with producing() as (heard, producer):
        with producer.transaction(MESSAGE) as transaction:
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    transaction.__exit__(None, None, None)
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert heard.ends == []
        heard.arrived.get(timeout=WAIT_S)
        assert heard.ended == [(COMMIT.value, False)]


@pytest.mark.parametrize("module", [turbopump, turbopump.aio])
def test_names_are_exported(module: Any) -> None:
    for name in ("Transaction", "TransactionProducer", "TransactionState"):
        assert name in module.__all__
        assert getattr(module, name).__doc__


def test_arguments_are_checked_on_construction() -> None:
    make: Callable[..., object] = TransactionProducer
    with pytest.raises(InvalidArgument, match="check must be a function"):
        make("pg", check="check", nameserver="127.0.0.1:9876")
    with pytest.raises(TypeError, match="check"):
        make("pg", nameserver="127.0.0.1:9876")


def test_invalid_functions_are_rejected_before_anything_is_sent() -> None:
    async def execute(_: Transaction) -> TransactionState:
        return TransactionState.COMMIT

    producer = TransactionProducer("pg", check=never, nameserver="127.0.0.1:1")
    refused: list[tuple[Any, str]] = [
        (None, "execute must be a function of .transaction., got None"),
        (execute, "execute must not be async: turbopump.aio.TransactionProducer"),
    ]
    for function, wrong in refused:
        with pytest.raises(InvalidArgument, match=wrong):
            producer.send_in_transaction(MESSAGE, function)


def test_parameters_are_those_of_the_asynchronous_methods() -> None:
    assert "check" in inspect.signature(TransactionProducer).parameters
    assert list(inspect.signature(Transaction.end).parameters) == ["self", "state", "error"]
    assert "timeout" in inspect.signature(TransactionProducer.send).parameters
    assert inspect.signature(TransactionProducer.submit).return_annotation is Future
