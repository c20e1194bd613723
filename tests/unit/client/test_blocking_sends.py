"""Sends of blocking producers: on the caller's thread, decided like asynchronous ones."""

from __future__ import annotations

import asyncio
import functools
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import pytest

from scripted_broker import Batch, ScriptedBroker, refused, scripted_broker, taken
from turbopump import Message, MessageQueue, MessageRules, Producer, ProducerConfig
from turbopump.aio import Session
from turbopump.client import blocking
from turbopump.client.config import ClientConfig
from turbopump.client.message_sender import run_to_end
from turbopump.errors import (
    ClientError,
    ConnectionLost,
    ForkedClient,
    InvalidArgument,
    NotRunning,
    RemoteError,
    RequestTimeout,
)
from turbopump.machine.threads import DaemonThreads
from turbopump.net.sockets import SocketNetwork
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command

MESSAGE = Message("T", b"hello")
WAIT_S = 20

Decide = Callable[[Batch], Command | None]


class Threads:
    """A hook that records the threads that it is called in."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.outcomes: list[object] = []

    def before_send(self, group: str, sent: Any, to: MessageQueue) -> None:
        self.names.append(threading.current_thread().name)

    def after_send(self, group: str, sent: Any, to: MessageQueue, outcome: object) -> None:
        self.outcomes.append(outcome)


@contextmanager
def producing(decide: Decide = taken, **settings: Any) -> Iterator[tuple[ScriptedBroker, Producer]]:
    with (
        scripted_broker(decide) as broker,
        Producer("pg", nameserver=broker.address, **settings) as producer,
    ):
        yield broker, producer


def in_thread(action: Callable[[], object]) -> Any:
    return DaemonThreads(1, "in-thread").submit(action)


# --- which thread ---------------------------------------------------------------------------------


def test_sends_hooks_and_selectors_run_on_the_callers_thread() -> None:
    seen = Threads()
    chosen: list[str] = []

    def choose(queues: Sequence[MessageQueue]) -> MessageQueue:
        chosen.append(threading.current_thread().name)
        return queues[2]

    with producing(hooks=[seen]) as (broker, producer):
        assert producer.send(MESSAGE).queue_offset == 7
        assert producer.send(MESSAGE, to=choose).queue.queue_id == 2
        assert len(producer.send_batch([MESSAGE, MESSAGE]).message_id.split(",")) == 2
        producer.send_oneway(MESSAGE)
        producer.send(MESSAGE, to=MessageQueue("T", "a", 1))
        here = threading.current_thread().name
        assert seen.names == [here] * 5
        assert chosen == [here]
        assert len(seen.outcomes) == 4
        assert [len(each.bodies) for each in broker.batches] == [1, 1, 2, 1, 1]
        assert broker.batches[-1].queue_id == 1


def test_wrong_arguments_name_the_public_method() -> None:
    with producing() as (broker, producer):
        send: Any = producer.send
        for wrong in (("T", b"x"), ("T",)):
            with pytest.raises(InvalidArgument, match=r"^send\(\) expects a Message, got str$"):
                send(*wrong)
        for method, args, named, error in (
            (producer.send, (MESSAGE, 3), {}, r"send\(\): too many positional arguments"),
            (producer.send, (), {}, r"send\(\): missing a required argument: 'message'"),
            (producer.send_batch, ([MESSAGE],), {"tag": 1}, r"send_batch\(\): .* argument 'tag'"),
        ):
            with pytest.raises(TypeError, match=error) as raised:
                cast("Any", method)(*args, **named)
            assert "MessageSender" not in str(raised.value)
        assert not broker.batches


def test_a_type_error_of_a_message_is_its_own() -> None:
    class Bad(dict[str, str]):
        def items(self) -> Any:
            raise TypeError("of the program")

    with producing() as (_, producer), pytest.raises(TypeError, match=r"^of the program$"):
        producer.send(Message("T", b"x", properties=Bad(a="b")))


def test_one_way_messages_of_a_thread_arrive_in_order() -> None:
    with producing() as (broker, producer):
        for number in range(200):
            producer.send_oneway(Message("T", b"%d" % number))
        producer.send(MESSAGE)
        assert broker.stored == [*(b"%d" % number for number in range(200)), b"hello"]


def test_threads_beyond_the_limit_send_through_the_loop() -> None:
    count = 3 * blocking.SENDING_THREADS_MAX
    arrived: queue.SimpleQueue[Batch] = queue.SimpleQueue()
    seen = Threads()
    with producing(lambda batch: arrived.put(batch), hooks=[seen]) as (broker, producer):
        with ThreadPoolExecutor(count, "sender") as threads:
            sends = [threads.submit(producer.send, MESSAGE) for _ in range(count)]
            batches = [arrived.get(timeout=WAIT_S) for _ in range(count)]
            for batch in batches:
                broker.post(functools.partial(batch.peer.answer, batch.request, taken(batch)))
            receipts = [each.result(WAIT_S) for each in sends]
        assert len({receipt.message_id for receipt in receipts}) == count
        assert sorted(set(seen.names)) == sorted(f"sender_{number}" for number in range(count))
        assert len({batch.peer for batch in batches}) == blocking.SENDING_THREADS_MAX + 1


class OtherNetwork:
    """A network that does not declare sockets."""

    def __init__(self) -> None:
        sockets = SocketNetwork()
        self.connect = sockets.connect
        self.listen = sockets.listen


def test_a_network_without_sockets_is_sent_to_through_the_loop() -> None:
    seen = Threads()
    with scripted_broker(taken) as broker:
        session = Session(ClientConfig(broker.address), OtherNetwork())
        with Producer("pg", session=session, hooks=[seen]) as producer:
            producer.send(MESSAGE)
            producer.send_oneway(MESSAGE)
    assert seen.names == [threading.current_thread().name] * 2


@contextmanager
def handing_over(
    decide: Decide = taken, hooks: Sequence[Any] = (), **settings: Any
) -> Iterator[tuple[ScriptedBroker, Producer]]:
    """Yield a producer whose threads never have their own connections."""
    with scripted_broker(decide) as broker:
        session = Session(ClientConfig(broker.address), OtherNetwork(), hooks=hooks)
        with Producer("pg", session=session, **settings) as producer:
            yield broker, producer


def test_requests_handed_to_the_loop_fail_like_others() -> None:
    config = ProducerConfig(retries_max=0, messages=MessageRules(body_bytes_max=1 << 25))

    def decide(batch: Batch) -> Command | None:
        if batch.number == 1:
            batch.peer.abort("gone")
        return None if batch.number in {1, 2} else taken(batch)

    with handing_over(decide, config=config) as (_, producer):
        producer.send(MESSAGE)
        with pytest.raises(ConnectionLost, match="closed by the peer"):
            producer.send(MESSAGE)
        with pytest.raises(RequestTimeout, match="no answer to request 310 of"):
            producer.send(MESSAGE, timeout=0.1)
        assert producer.send(MESSAGE).queue_offset == 7
        with pytest.raises(InvalidArgument, match="a frame must be at most"):
            producer.send(Message("T", os.urandom(1 << 24)))
        assert producer.send(MESSAGE, timeout=WAIT_S).queue_offset == 7


def test_session_hooks_see_requests_handed_to_the_loop() -> None:
    class Seen:
        codes: ClassVar[list[int]] = []

        def before_request(self, address: str, command: Command) -> Command:
            self.codes.append(command.code)
            return command

        def after_response(self, address: str, request: Command, response: Command) -> None:
            self.codes.append(-request.code)

    with handing_over(hooks=[Seen()]) as (_, producer):
        producer.send(MESSAGE)
        producer.send(MESSAGE)
    assert [code for code in Seen.codes if abs(code) == 310] == [310, -310] * 2


def test_a_send_that_waits_for_a_loop_is_a_mistake() -> None:
    async def wait() -> None:
        await asyncio.sleep(0)

    with pytest.raises(AssertionError, match="waits for an event loop"):
        run_to_end(wait())


# --- the same decisions ---------------------------------------------------------------------------


def test_rejected_sends_are_retried_after_a_pause() -> None:
    answers = [ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE]

    def decide(batch: Batch) -> Command:
        return refused(batch, answers[batch.number]) if batch.number < 2 else taken(batch)

    seen = Threads()
    with producing(decide, hooks=[seen]) as (broker, producer):
        producer.send(MESSAGE, to=MessageQueue("T", "a", 3))
        assert [each.queue_id for each in broker.batches] == [3, 3, 3]
        assert [type(each).__name__ for each in seen.outcomes] == [
            "RemoteError",
            "RemoteError",
            "SendReceipt",
        ]


def test_a_lost_connection_is_retried_on_another_queue_unless_one_was_chosen() -> None:
    def decide(batch: Batch) -> Command | None:
        if batch.number in {0, 2}:
            batch.peer.abort("test")
            return None
        return taken(batch)

    with producing(decide) as (broker, producer):
        producer.send(MESSAGE)
        assert len(broker.batches) == 2
        with pytest.raises(ConnectionLost):
            producer.send(MESSAGE, to=lambda queues: queues[0])
        assert len(broker.batches) == 3
        producer.send(MESSAGE)


def test_an_unreachable_broker_is_skipped() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        down = f"127.0.0.1:{listening.getsockname()[1]}"
    seen = Threads()
    with producing(hooks=[seen]) as (broker, producer):
        broker.others["b"] = down
        receipts = [producer.send(MESSAGE) for _ in range(8)]
        assert {receipt.queue.broker for receipt in receipts} == {"a"}
        assert "ConnectFailed" in {type(each).__name__ for each in seen.outcomes}


def test_errors_are_those_of_asynchronous_sends() -> None:
    config = ProducerConfig(retries_max=0)
    first_only: Decide = lambda batch: None if len(broker.batches) > 1 else taken(batch)  # noqa: E731
    with producing(first_only, config=config) as (broker, producer):
        producer.send(MESSAGE)  # it knows the route now
        with pytest.raises(RequestTimeout, match="no answer to request 310"):
            producer.send(MESSAGE, timeout=0.05)
        with pytest.raises(InvalidArgument, match="body must be 1–4194304 bytes, got 0"):
            producer.send(Message("T", b""))
    wrong: Decide = lambda batch: refused(batch, ResponseCode.MESSAGE_ILLEGAL)  # noqa: E731
    with producing(wrong) as (broker, producer):
        with pytest.raises(RemoteError, match="in the broker's words"):
            producer.send(MESSAGE)
        assert len(broker.batches) == 1


def test_hooks_of_the_session_see_sends_of_threads() -> None:
    seen: list[int] = []

    class Count:
        def before_request(self, address: str, command: Command) -> Command:
            seen.append(command.code)
            return command

        def after_response(self, address: str, request: Command, response: Command) -> None:
            seen.append(-request.code)

    with scripted_broker(taken) as broker:
        session = Session(ClientConfig(broker.address), hooks=[Count()])
        with Producer("pg", session=session) as producer:
            producer.send(MESSAGE)
            producer.send_oneway(MESSAGE)
        assert [code for code in seen if abs(code) == 310] == [310, -310, 310]


# --- closing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [2, 1001])
def test_submitting_blocks_at_the_limit_of_the_configuration(most: int) -> None:
    arrived: queue.SimpleQueue[Batch] = queue.SimpleQueue()
    config = ProducerConfig(in_flight_max=most, send_timeout=20)
    with producing(arrived.put, config=config) as (broker, producer):
        submitting = in_thread(lambda: [producer.submit(MESSAGE) for _ in range(most + 1)])
        batches = [arrived.get(timeout=WAIT_S) for _ in range(most)]
        assert not submitting.done()
        for number in range(most + 1):
            batch = batches[number] if number < most else arrived.get(timeout=WAIT_S)
            broker.post(functools.partial(batch.peer.answer, batch.request, taken(batch)))
        assert [each.result(WAIT_S).queue_offset for each in submitting.result(WAIT_S)] == [7] * (
            most + 1
        )


def test_closing_waits_for_a_send_of_another_thread() -> None:
    arrived: queue.SimpleQueue[Batch] = queue.SimpleQueue()
    with producing(lambda batch: arrived.put(batch)) as (broker, producer):
        send = in_thread(lambda: producer.send(MESSAGE))
        batch = arrived.get(timeout=WAIT_S)
        closing = in_thread(producer.close)
        while producer._thread is not None:
            assert not send.done()
        with pytest.raises(NotRunning):
            producer.send(MESSAGE)
        assert not closing.done()
        broker.post(lambda: batch.peer.answer(batch.request, taken(batch)))
        assert send.result(WAIT_S).queue_offset == 7
        closing.result(WAIT_S)


def test_closing_in_a_hook_begins_and_does_not_wait() -> None:
    class Close(Threads):
        def before_send(self, group: str, sent: Any, to: MessageQueue) -> None:
            producer.close()

    with producing(hooks=[Close()]) as (_, producer):
        assert in_thread(lambda: producer.send(MESSAGE)).result(WAIT_S).queue_offset == 7
        producer.close()
        with pytest.raises(NotRunning):
            producer.send(MESSAGE)


def test_a_signal_handler_may_send_and_close_while_its_thread_sends() -> None:
    sent: list[str] = []

    def handle(number: int, _: object) -> None:
        sent.append(producer.send(MESSAGE).message_id)
        producer.close()

    def decide(batch: Batch) -> Command:
        if batch.number == 0:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        return taken(batch)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with producing(decide) as (broker, producer):
            assert producer.send(MESSAGE).queue_offset == 7
            assert len(sent) == 1
            assert len(broker.stored) == 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_interrupted_send_leaves_the_producer_usable() -> None:
    def interrupt(number: int, _: object) -> None:
        raise KeyboardInterrupt

    def decide(batch: Batch) -> Command | None:
        if batch.number == 0:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            return None
        return taken(batch)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with producing(decide) as (broker, producer):
            with pytest.raises(KeyboardInterrupt):
                producer.send(MESSAGE)
            producer.send(MESSAGE)
            assert len(broker.batches) == 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_sends_on_the_loops_own_thread_are_rejected() -> None:
    refusals: queue.SimpleQueue[ClientError] = queue.SimpleQueue()

    def send_again(*_: object) -> None:
        try:
            producer.send(MESSAGE)
        except ClientError as error:
            refusals.put(error)

    with producing() as (_, producer):
        producer.submit(MESSAGE, on_sent=send_again).result(WAIT_S)
        assert "its own event loop" in str(refusals.get(timeout=WAIT_S))


def test_a_forked_child_gets_an_error_and_its_parent_keeps_its_connections() -> None:
    with producing() as (broker, producer):
        producer.send(MESSAGE)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                producer.send(MESSAGE)
            except ForkedClient:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        producer.send(MESSAGE)
        assert len({batch.peer for batch in broker.batches}) == 1
