"""Decorated functions: their parameters, their results, and how a worker runs them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Generator,
    Iterable,
    Iterator,
    Sized,
)
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from msgspec import Struct

import turbopump
from turbopump import ConsumeOutcome, GiveUp, Message, RetryLater
from turbopump.aio import (
    Admin,
    ConsumeContext,
    ConsumeResult,
    MessageQueue,
    MessageView,
    Producer,
    Worker,
    consumer,
)
from turbopump.client.handlers import encoded
from turbopump.errors import ClientError, InvalidArgument, NotRunning
from turbopump.testing import Cluster, running_server, virtual_loop
from typed_bodies import Validated


class Order(Struct):
    """A body."""

    number: int
    tags: list[str] = []


class Receipt(Struct):
    """The result of an order."""

    number: int


class Outcomes:
    """A hook that notes how calls end."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def before_consume(self, messages: object, context: ConsumeContext) -> None:
        pass

    def after_consume(self, messages: object, context: ConsumeContext, result: object) -> None:
        self.seen.append(context.outcome)


def view(cluster: Cluster, topic: str) -> list[bytes]:
    return sorted(message.body for message in cluster.messages(topic))


# --- running --------------------------------------------------------------------------------------


async def test_a_function_gets_the_decoded_body(turbopump_cluster: Cluster) -> None:
    seen: list[object] = []

    @consumer("orders", group="billing", start_from="first")
    async def bill(order: Order, message: MessageView, context: ConsumeContext) -> None:
        seen.append((order, message.keys, context.group))

    async with Worker(bill, nameserver=turbopump_cluster.nameserver):
        await turbopump_cluster.send(Message("orders", b'{"number": 7}', keys=["k"]))
        await turbopump_cluster.until_consumed("billing")
    assert seen == [(Order(7), ["k"], "billing")]


async def test_plain_functions_run_in_threads_and_publish_what_they_return(
    turbopump_cluster: Cluster,
) -> None:
    threads = set()

    @consumer("orders", group="billing", to="receipts", start_from="first")
    def bill(order: Order) -> Receipt:
        threads.add(threading.current_thread().name)
        return Receipt(order.number)

    async with Worker(bill, nameserver=turbopump_cluster.nameserver):
        await turbopump_cluster.send(Message("orders", b'{"number": 7}'))
        await turbopump_cluster.until_consumed("billing")
    assert view(turbopump_cluster, "receipts") == [b'{"number":7}']
    assert "MainThread" not in threads


async def test_a_plain_function_may_return_what_is_to_be_awaited(
    turbopump_cluster: Cluster,
) -> None:
    """As a decorator that knows nothing of asyncio makes of an async function."""
    calls = []

    async def bill(order: Order) -> Receipt:
        calls.append(order.number)
        if len(calls) == 1:
            raise RuntimeError("not today")
        return Receipt(order.number)

    @consumer("orders", group="billing", to="receipts", start_from="first")
    def wrapped(order: Order) -> Awaitable[Receipt]:
        return bill(order)

    async with Worker(wrapped, nameserver=turbopump_cluster.nameserver):
        await turbopump_cluster.send(Message("orders", b'{"number": 7}'))
        await turbopump_cluster.until_consumed("billing")
    assert calls == [7, 7]
    assert view(turbopump_cluster, "receipts") == [b'{"number":7}']


async def test_functions_may_return_messages_of_their_own(turbopump_cluster: Cluster) -> None:
    @consumer("orders", group="billing", start_from="first")
    async def bill(order: dict[str, int]) -> list[Message]:
        return [Message("a", b"1"), Message("b", b"%d" % order["number"], keys=["x"])]

    async with Worker(bill, nameserver=turbopump_cluster.nameserver):
        await turbopump_cluster.send(Message("orders", b'{"number": 7}'))
        await turbopump_cluster.until_consumed("billing")
    assert view(turbopump_cluster, "a") == [b"1"]
    assert view(turbopump_cluster, "b") == [b"7"]


async def test_functions_of_a_group_share_its_consumer(turbopump_cluster: Cluster) -> None:
    seen: list[tuple[str, object]] = []

    @consumer("orders", group="shop", tags="created", start_from="first")
    async def created(body: bytes) -> None:
        seen.append(("created", body))

    @consumer("payments", group="shop", start_from="first")
    def paid(text: str) -> None:
        seen.append(("paid", text))

    @consumer("orders", group="audit", start_from="first")
    async def audit(message: MessageView) -> None:
        seen.append(("audit", message.body))

    async with Worker(created, paid, audit, nameserver=turbopump_cluster.nameserver):
        await turbopump_cluster.send(Message("orders", b"1", tags="created"))
        await turbopump_cluster.send(Message("orders", b"2", tags="paid"))
        await turbopump_cluster.send(Message("payments", "grün".encode()))
        await turbopump_cluster.until_consumed("shop")
        await turbopump_cluster.until_consumed("audit")
    assert sorted(seen, key=str) == [
        ("audit", b"1"),
        ("audit", b"2"),
        ("created", b"1"),
        ("paid", "grün"),
    ]


@pytest.mark.parametrize("orderly", [False, True])
async def test_a_body_of_another_type_is_a_dead_letter_and_the_rest_is_consumed(
    turbopump_cluster: Cluster, orderly: bool, caplog: pytest.LogCaptureFixture
) -> None:
    seen = []

    @consumer("orders", group="billing", start_from="first", orderly=orderly)
    async def bill(order: Order) -> None:
        seen.append(order.number)

    caplog.set_level(logging.ERROR, "turbopump.client.worker")
    async with Worker(bill, nameserver=turbopump_cluster.nameserver):
        for body in (b'{"number": "x"}', b"not JSON", b'{"number": 1}'):
            await turbopump_cluster.send(Message("orders", body))
        await turbopump_cluster.until(lambda: seen == [1], minutes=1)
        await turbopump_cluster.until(
            lambda: len(turbopump_cluster.dead_letters("billing")) == 2, minutes=1
        )
    assert "does not fit <consumer" in caplog.text


async def test_an_exception_redelivers(turbopump_cluster: Cluster) -> None:
    calls = []

    @consumer("orders", group="billing", start_from="first", max_attempts=2)
    async def bill(order: Order) -> None:
        calls.append(order.number)
        raise RuntimeError("not today")

    async with Worker(bill, nameserver=turbopump_cluster.nameserver):
        await turbopump_cluster.send(Message("orders", b'{"number": 1}'))
        await turbopump_cluster.until_consumed("billing")
    assert calls == [1, 1, 1]
    assert len(turbopump_cluster.dead_letters("billing")) == 1


@pytest.mark.parametrize("is_raised", [True, False])
async def test_functions_may_retry_later_or_give_up(
    turbopump_cluster: Cluster, *, is_raised: bool
) -> None:
    calls = []

    @consumer("orders", group="billing", start_from="first")
    async def bill(order: Order, message: MessageView) -> RetryLater | GiveUp:
        calls.append((order.number, message.reconsume_times))
        outcome = GiveUp("no such customer") if message.reconsume_times else RetryLater(1)
        if is_raised:
            raise outcome
        return outcome

    async with Worker(bill, nameserver=turbopump_cluster.nameserver):
        await turbopump_cluster.send(Message("orders", b'{"number": 1}'))
        await turbopump_cluster.until_consumed("billing")
    assert calls == [(1, 0), (1, 1)]
    assert len(turbopump_cluster.dead_letters("billing")) == 1


async def test_a_generator_may_return_that_its_message_failed(turbopump_cluster: Cluster) -> None:
    @consumer("orders", group="billing", start_from="first", to="receipts")
    def bill(message: MessageView) -> Generator[bytes, None, RetryLater | None]:
        yield b"%d" % message.reconsume_times
        return None if message.reconsume_times else RetryLater(1)

    async with Worker(bill, nameserver=turbopump_cluster.nameserver):
        await turbopump_cluster.send(Message("orders", b"0"))
        await turbopump_cluster.until_consumed("billing")
    assert view(turbopump_cluster, "receipts") == [b"1"]


@pytest.mark.parametrize("to", [None, "receipts"])
@pytest.mark.parametrize("returned", [GiveUp, [1, RetryLater(1)], (ConsumeResult.RETRY_LATER,)])
async def test_an_outcome_that_is_not_returned_by_itself_redelivers(
    turbopump_cluster: Cluster, caplog: pytest.LogCaptureFixture, *, to: str | None, returned: Any
) -> None:
    take = consumer("orders", group="billing", start_from="first", to=to, max_attempts=0)
    bill = take(lambda body: returned)
    async with Worker(bill, nameserver=turbopump_cluster.nameserver):
        await turbopump_cluster.send(Message("orders", b"0"))
        await turbopump_cluster.until_consumed("billing")
    assert len(turbopump_cluster.dead_letters("billing")) == 1
    assert "must return RetryLater(...), GiveUp(...) or a ConsumeResult by itself" in caplog.text


async def test_a_plain_function_may_raise_stop_iteration(turbopump_cluster: Cluster) -> None:
    @consumer("orders", group="billing", start_from="first", max_attempts=0)
    def bill(orders: list[int]) -> None:
        next(iter(orders))

    outcomes = Outcomes()
    async with Worker(bill, nameserver=turbopump_cluster.nameserver, hooks=[outcomes]):
        await turbopump_cluster.send(Message("orders", b"[]"))
        await turbopump_cluster.until_consumed("billing")
    assert outcomes.seen == [ConsumeOutcome.EXCEPTION]


async def test_hooks_of_a_worker_choose_among_messages(turbopump_cluster: Cluster) -> None:
    class WithoutTests:
        def keeps(self, group: str, message: MessageView, queue: MessageQueue) -> bool:
            return message.body != b"test"

    bodies: list[bytes] = []

    @consumer("orders", group="billing", start_from="first")
    def bill(order: bytes) -> None:
        bodies.append(order)

    async with Worker(bill, nameserver=turbopump_cluster.nameserver, hooks=[WithoutTests()]):
        for body in (b"test", b"order"):
            await turbopump_cluster.send(Message("orders", body))
        await turbopump_cluster.until_consumed("billing")
    assert bodies == [b"order"]


async def test_a_function_says_what_follows_exceptions_of_a_class(
    turbopump_cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    waits: dict[int, float] = {}
    errors = {1: ConnectionResetError("reset"), 2: KeyError("customer"), 3: RetryLater(5)}

    @consumer(
        "orders",
        group="billing",
        start_from="first",
        on_error={OSError: GiveUp(), ConnectionError: RetryLater(60), Exception: GiveUp()},
    )
    async def bill(order: Order, message: MessageView) -> None:
        now, before = virtual_loop().time(), waits.get(order.number, 0)
        waits[order.number] = now - before
        if message.reconsume_times == 0:
            raise errors[order.number]

    outcomes = Outcomes()
    async with Worker(bill, nameserver=turbopump_cluster.nameserver, hooks=[outcomes]):
        for number in errors:
            await turbopump_cluster.send(Message("orders", b'{"number": %d}' % number))
        await turbopump_cluster.until_consumed("billing")
    assert (round(waits[1]), round(waits[3])) == (60, 5)
    (letter,) = turbopump_cluster.dead_letters("billing")
    assert letter.json(Order).number == 2
    assert outcomes.seen.count(ConsumeOutcome.EXCEPTION) == 2
    assert "ConnectionResetError: reset" in caplog.text


async def test_failing_to_publish_is_no_exception_of_the_function(
    turbopump_cluster: Cluster,
) -> None:
    calls = []

    @consumer("orders", group="billing", to="x", start_from="first", on_error={Exception: GiveUp()})
    async def bill(order: Order) -> object:
        calls.append(order)
        return {"too": object()} if len(calls) == 1 else None

    async with Worker(bill, nameserver=turbopump_cluster.nameserver):
        await turbopump_cluster.send(Message("orders", b'{"number": 7}'))
        await turbopump_cluster.until_consumed("billing")
    assert len(calls) == 2
    assert not turbopump_cluster.dead_letters("billing")


@pytest.mark.parametrize(
    ("on_error", "message"),
    [
        ([ValueError], "on_error must be a dict"),
        ({"ValueError": GiveUp()}, "a key of on_error must be a class of exceptions"),
        ({KeyboardInterrupt: GiveUp()}, "a key of on_error must be a class of exceptions"),
        ({ValueError: 30}, r"on_error\[ValueError\] must be RetryLater\(...\) or GiveUp\(\)"),
        ({ValueError: GiveUp}, "must be RetryLater"),
        ({RetryLater: GiveUp()}, "cannot change RetryLater"),
    ],
)
def test_what_follows_exceptions_is_checked(on_error: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        consumer("orders", group="g", on_error=on_error)


@pytest.mark.parametrize("is_async", [False, True])
async def test_functions_send_with_the_producer_of_their_worker(
    turbopump_cluster: Cluster, is_async: bool
) -> None:
    sent: list[str] = []

    class Count:
        """A hook that sees what is sent."""

        def before_send(self, group: str, message: Any, queue: object) -> None:
            sent.append(group)

        def after_send(self, *_: object) -> None: ...

    @consumer("orders", group="billing", start_from="first")
    def bill(order: Order, producer: turbopump.Producer) -> None:
        with producer:  # The worker closes it, not this block.
            receipt = producer.send_json("receipts", Receipt(order.number), keys=["a"])
        producer.submit(Message("receipts", receipt.message_id.encode())).result()

    @consumer("orders", group="billing", start_from="first")
    async def bill_async(producer: Producer, order: Order) -> None:
        receipt = await producer.send_json("receipts", Receipt(order.number), keys=["a"])
        await producer.send(Message("receipts", receipt.message_id.encode()))

    function: Any = bill_async if is_async else bill
    async with Worker(function, nameserver=turbopump_cluster.nameserver, send_hooks=[Count()]):
        await turbopump_cluster.send(Message("orders", b'{"number": 7}'))
        await turbopump_cluster.send(Message("orders", b'{"number": 7}'))
        await turbopump_cluster.until_consumed("billing")
    assert view(turbopump_cluster, "receipts").count(b'{"number":7}') == 2
    assert len(view(turbopump_cluster, "receipts")) == 4
    assert sent == ["billing"] * 4


def test_functions_of_blocking_workers_send_on_sockets(tmp_path: Path) -> None:
    done = threading.Event()
    seen: list[bytes] = []

    @turbopump.consumer("orders", group="billing", start_from="first")
    def bill(order: Order, producer: turbopump.Producer) -> None:
        producer.send_json("receipts", Receipt(order.number))

    @turbopump.consumer("receipts", group="mail", start_from="first")
    async def mail(body: bytes) -> None:
        seen.append(body)
        done.set()

    with running_server(tmp_path) as server:
        with turbopump.Producer("orders-producer", nameserver=server.nameserver) as producer:
            producer.send_json("orders", Order(7))
        with turbopump.Worker(bill, mail, nameserver=server.nameserver):
            assert done.wait(30)
    assert seen == [b'{"number":7}']


async def test_a_function_that_outlives_its_worker_cannot_send(turbopump_cluster: Cluster) -> None:
    lent: list[turbopump.Producer] = []

    @consumer("orders", group="billing", start_from="first")
    def bill(order: Order, producer: turbopump.Producer) -> None:
        lent.append(producer)

    async with Worker(bill, nameserver=turbopump_cluster.nameserver):
        await turbopump_cluster.send(Message("orders", b'{"number": 7}'))
        await turbopump_cluster.until_consumed("billing")
        with pytest.raises(ClientError, match="on its own event loop"):
            lent[0].send(Message("receipts", b"1"))
    with pytest.raises(NotRunning):
        await asyncio.to_thread(lent[0].send, Message("receipts", b"1"))
    with pytest.raises(NotRunning):
        await asyncio.to_thread(lent[0].queues, "receipts")


def test_a_producer_that_a_function_cannot_use_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match=r"gets a turbopump\.aio\.Producer"):

        @consumer("orders", group="g")
        async def waits(order: Order, producer: turbopump.Producer) -> None: ...

    with pytest.raises(InvalidArgument, match=r"gets a turbopump\.Producer: annotate producer"):

        @consumer("orders", group="g")
        def plain(order: Order, producer: Producer) -> None: ...

    with pytest.raises(InvalidArgument, match="several parameters of type Producer"):

        @consumer("orders", group="g")
        def two(order: Order, a: turbopump.Producer, b: turbopump.Producer) -> None: ...


async def test_a_result_that_cannot_be_published_redelivers(turbopump_cluster: Cluster) -> None:
    calls = []

    @consumer("orders", group="billing", start_from="first", to="receipts")
    async def bill(order: Order) -> object:
        calls.append(order.number)
        return object() if len(calls) == 1 else Receipt(order.number)

    async with Worker(bill, nameserver=turbopump_cluster.nameserver):
        await turbopump_cluster.send(Message("orders", b'{"number": 1}'))
        await turbopump_cluster.until_consumed("billing")
    assert calls == [1, 1]
    assert view(turbopump_cluster, "receipts") == [b'{"number":1}']


async def test_a_function_may_answer_with_a_result_and_close_the_worker(
    turbopump_cluster: Cluster,
) -> None:
    calls = []

    @consumer("orders", group="billing", start_from="first")
    async def bill(order: Order) -> ConsumeResult:
        calls.append(order.number)
        if len(calls) == 2:
            await worker.close()
        return ConsumeResult.RETRY_LATER if len(calls) == 1 else ConsumeResult.SUCCESS

    worker = Worker(bill, nameserver=turbopump_cluster.nameserver)
    await worker.start()
    await turbopump_cluster.send(Message("orders", b'{"number": 1}'))
    await worker.wait()
    assert calls == [1, 1]
    await worker.start()
    await worker.close()


async def test_waiting_for_a_worker_that_was_never_started_is_an_error(
    turbopump_cluster: Cluster,
) -> None:
    @consumer("orders", group="billing")
    def bill(body: bytes) -> None:
        pass

    worker = Worker(bill, nameserver=turbopump_cluster.nameserver)
    with pytest.raises(NotRunning, match="this Worker is not running"):
        await worker.wait()


async def test_a_function_may_close_the_worker_while_it_starts(turbopump_cluster: Cluster) -> None:
    @consumer("orders", group="first", start_from="first")
    async def close(body: bytes) -> None:
        await worker.close()

    others = [consumer("orders", group=f"other{number}")(lambda body: None) for number in range(3)]
    worker = Worker(close, *others, nameserver=turbopump_cluster.nameserver)
    await turbopump_cluster.send(Message("orders", b"1"))
    async with worker:
        await worker.wait()
    async with Admin(turbopump_cluster.nameserver) as admin:
        for group in worker.groups:
            await admin.groups.require_stopped(group)


@pytest.mark.slow
def test_blocking_programs_run_functions_until_they_are_closed(tmp_path: Path) -> None:
    seen = threading.Event()

    @turbopump.consumer("orders", group="billing", start_from="first", to="receipts")
    def bill(order: Order) -> Receipt:
        seen.set()
        return Receipt(order.number)

    with running_server(tmp_path) as server:
        with turbopump.Producer("shop", nameserver=server.nameserver) as producer:
            producer.send(Message("orders", encoded(Order(3))))
        with turbopump.Worker(bill, nameserver=[server.nameserver]):
            assert seen.wait(30)
            server.until(lambda: len(server.messages("receipts")) == 1)


# --- rejected functions ---------------------------------------------------------------------------


def handler(group: str = "g", topic: str = "t", **given: Any) -> Any:
    return consumer(topic, group=group, **given)(lambda body: None)


def test_a_decorated_function_can_be_called() -> None:
    @consumer("orders", group="billing", to="numbers")
    def bill(order: Order) -> int:
        """Bill it."""
        return order.number

    assert bill(Order(3)) == 3
    assert bill.__doc__ == "Bill it."
    assert repr(bill).endswith("bill of orders>")


@pytest.mark.parametrize(
    ("handlers", "error"),
    [
        ([], "pass at least one function"),
        ([print], "expected functions decorated with @consumer"),
        ([handler(), handler()], "group 'g' has two functions for topic 't'"),
        ([handler(), handler(topic="u", orderly=True)], "must have the same start_from, orderly"),
    ],
)
def test_functions_that_cannot_run_together_are_rejected(handlers: list[Any], error: str) -> None:
    with pytest.raises(InvalidArgument, match=error):
        Worker(*handlers, nameserver="127.0.0.1:9876")


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"topic": "a b"}, "topic must be"),
        ({"group": ""}, "group must be"),
        ({"to": "a b"}, "topic must be"),
        ({"tags": "a > 1"}, "pass Sql"),
        ({"listening": 3}, "listening must be a Listening"),
        ({"concurrency": 0}, "concurrency must be 1–1000, got 0"),
        ({"concurrency": (4, 2)}, "maximum of concurrency must be 4–1000, got 2"),
    ],
)
def test_settings_are_checked(given: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidArgument, match=error):
        handler(**given)


def no_parameter() -> None: ...
def two_bodies(first: int, second: int) -> None: ...
def any_number(*bodies: int) -> None: ...
def unknown_type(order: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def two_structs(order: Order | Receipt) -> None: ...


class Unfinished(Struct):
    """A field of a type that only a type checker, or one function, can see."""

    part: Missing  # type: ignore[name-defined]  # noqa: F821


def unknown_field(order: Unfinished) -> None: ...


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (no_parameter, "must have one parameter for the body"),
        (two_bodies, "must have one parameter for the body"),
        (any_number, "must name its parameters"),
        (unknown_type, "'Missing' is not defined"),
        (unknown_field, "'Missing' is not defined; define the types of its fields at the top"),
        (two_structs, "multiple Struct types"),
        (3, "decorates a function, got 3"),
    ],
)
def test_functions_that_cannot_be_called_with_a_message(function: Any, error: str) -> None:
    with pytest.raises(InvalidArgument, match=error):
        consumer("t", group="g")(function)


def unreadable(order: threading.Thread) -> None: ...
def unreadable_inside(orders: dict[str, list[threading.Thread | None]]) -> None: ...
def unreadable_or_not(order: int | threading.Thread) -> None: ...


@pytest.mark.parametrize("function", [unreadable, unreadable_inside, unreadable_or_not])
def test_a_type_that_cannot_be_decoded_is_rejected_with_those_that_can(function: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"Thread.*; use a msgspec Struct, a dataclass"):
        consumer("t", group="g")(function)


def several(messages: list[MessageView]) -> None: ...
def absent(message: MessageView | None) -> None: ...
def outgoing(message: Message) -> None: ...


@pytest.mark.parametrize("function", [several, absent, outgoing])
def test_a_parameter_of_a_type_that_no_body_has_is_rejected(function: Any) -> None:
    with pytest.raises(
        InvalidArgument, match=r"gets one message per call; annotate .* MessageView"
    ):
        consumer("t", group="g")(function)


def plain_result(body: bytes) -> threading.Thread: ...  # type: ignore[empty-body]
def plain_results(body: bytes) -> Iterator[threading.Thread | None]: ...  # type: ignore[empty-body]
def any_results(body: bytes) -> Iterable[threading.Thread]: ...  # type: ignore[empty-body]
def later_results(body: bytes) -> AsyncIterable[threading.Thread]: ...  # type: ignore[empty-body]
def awaited(body: bytes) -> Awaitable[threading.Thread]: ...  # type: ignore[empty-body]


@pytest.mark.parametrize(
    "function", [plain_result, plain_results, any_results, later_results, awaited]
)
def test_a_result_that_cannot_be_written_is_rejected_with_those_that_can(function: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"Thread cannot be written as JSON; use a msgspec"):
        consumer("t", group="g", to="results")(function)


class Tree(Struct):
    """A recursive body."""

    children: list[Tree] = []


def recursive(tree: Tree) -> Message | None: ...
def messages(body: bytes) -> list[Message]: ...  # type: ignore[empty-body]
def generated(body: bytes) -> Iterator[Message]: ...  # type: ignore[empty-body]
def anything(body: bytes): ...  # type: ignore[no-untyped-def]


@pytest.mark.parametrize("function", [recursive, messages, generated, anything])
def test_results_that_need_no_topic_cause_no_warning(function: Any) -> None:
    consumer("t", group="g")(function)


def trees(body: bytes) -> AsyncIterator[Tree | Message]: ...  # type: ignore[empty-body]
def either(body: bytes) -> Order | Receipt: ...  # type: ignore[empty-body]
def sized(body: bytes) -> Sized: ...  # type: ignore[empty-body]
def validated(body: bytes) -> dict[str, Validated]: ...  # type: ignore[empty-body]
def unsaid(body: bytes) -> object: ...


@pytest.mark.parametrize("function", [trees, either, sized, validated, unsaid, recursive])
def test_results_that_can_be_written_are_accepted(function: Any) -> None:
    consumer("t", group="g", to="results")(function)


def boolean(order: Order) -> bool: ...  # type: ignore[empty-body]
def optional(order: Order) -> Receipt | None: ...
def strings(order: Order) -> list[str]: ...  # type: ignore[empty-body]


@pytest.mark.parametrize("function", [boolean, optional, strings])
def test_a_result_that_is_ignored_causes_a_warning_where_it_is_decorated(function: Any) -> None:
    with pytest.warns(UserWarning, match=r'which is ignored: pass to="topic"') as caught:
        consumer("t", group="g")(function)
    assert caught[0].filename == __file__
    consumer("t", group="g", to="receipts")(function)


async def test_results_without_a_topic_are_ignored(turbopump_cluster: Cluster) -> None:
    calls = []

    @consumer("orders", group="billing", start_from="first")
    async def bill(order: dict[str, int]) -> Any:
        calls.append(order["number"])
        return [True, [], 7, {"a": 1}][order["number"]]

    async with Worker(bill, nameserver=turbopump_cluster.nameserver):
        for number in range(4):
            await turbopump_cluster.send(Message("orders", encoded({"number": number})))
        await turbopump_cluster.until_consumed("billing")
    assert sorted(calls) == [0, 1, 2, 3]


class Pair(NamedTuple):
    """A record, not two results."""

    first: int
    second: int


def some(body: bytes) -> Iterator[int]:
    yield from (1, 2)


async def some_later(body: bytes) -> AsyncIterator[int]:
    for number in (1, 2):
        yield number


def failing(body: bytes) -> Iterator[int]:
    yield 1
    raise ValueError("not today")


@pytest.mark.parametrize(
    ("function", "published"),
    [
        (lambda body: [], []),
        (lambda body: None, []),
        (lambda body: [1, None, Message("receipts", b"2")], [b"1", b"2"]),
        (lambda body: (1, 2), [b"1", b"2"]),
        (lambda body: Pair(1, 2), [b"[1,2]"]),
        (lambda body: {"a": [1]}, [b'{"a":[1]}']),
        (some, [b"1", b"2"]),
        (some_later, [b"1", b"2"]),
    ],
)
async def test_lists_tuples_and_generators_are_published_item_by_item(
    turbopump_cluster: Cluster, function: Any, published: list[bytes]
) -> None:
    take = consumer("orders", group="billing", start_from="first", to="receipts")(function)
    async with Worker(take, nameserver=turbopump_cluster.nameserver):
        await turbopump_cluster.send(Message("orders", b"0"))
        await turbopump_cluster.until_consumed("billing")
    assert view(turbopump_cluster, "receipts") == published


async def test_results_of_one_key_go_to_one_queue_in_order(turbopump_cluster: Cluster) -> None:
    @consumer(
        "orders",
        group="billing",
        to="receipts",
        key=lambda receipt: receipt.number % 3,
        start_from="first",
    )
    def bill(order: Order) -> Iterator[Receipt]:
        yield from map(Receipt, range(order.number))

    async with Worker(bill, nameserver=turbopump_cluster.nameserver):
        await turbopump_cluster.send(Message("orders", b'{"number": 12}'))
        await turbopump_cluster.until_consumed("billing")
    by_queue: dict[int, list[int]] = {}
    for message in turbopump_cluster.messages("receipts"):
        by_queue.setdefault(message.queue_id, []).append(message.json(Receipt).number)
    assert by_queue == {key: list(range(key, 12, 3)) for key in range(3)}


async def test_a_key_that_is_none_redelivers_the_message(
    turbopump_cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    key: Any = lambda receipt: None  # noqa: E731 - as users write it
    take = consumer(
        "orders",
        group="billing",
        to="receipts",
        key=key,
        start_from="first",
        max_attempts=0,
    )

    async def bill(order: Order) -> Receipt:
        return Receipt(order.number)

    async with Worker(take(bill), nameserver=turbopump_cluster.nameserver):
        await turbopump_cluster.send(Message("orders", b'{"number": 1}'))
        await turbopump_cluster.until_consumed("billing")
    assert len(turbopump_cluster.dead_letters("billing")) == 1
    assert "must return a str or int, got None for Receipt(number=1)" in caplog.text


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"key": len}, 'key chooses the queue of results: pass to="topic" as well'),
        ({"key": "customer", "to": "receipts"}, "key must be a function of .result., got 'custom"),
    ],
)
def test_keys_that_cannot_choose_a_queue_are_rejected(given: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidArgument, match=error):
        consumer("orders", group="billing", **given)


async def test_a_generator_that_fails_publishes_nothing(turbopump_cluster: Cluster) -> None:
    take = consumer("orders", group="billing", start_from="first", to="receipts", max_attempts=0)
    async with Worker(take(failing), nameserver=turbopump_cluster.nameserver):
        await turbopump_cluster.send(Message("orders", b"0"))
        await turbopump_cluster.until_consumed("billing")
    assert len(turbopump_cluster.dead_letters("billing")) == 1
    assert view(turbopump_cluster, "receipts") == []


# --- bodies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "body"),
    [
        (b"\xff", b"\xff"),
        ("ü", b"\xc3\xbc"),
        ({"a": 1}, b'{"a":1}'),
        (Validated(2), b'{"number":2}'),
    ],
)
def test_bodies_are_json_unless_they_are_bytes_or_text(value: object, body: bytes) -> None:
    assert encoded(value) == body


def test_bodies_that_are_not_json_are_rejected() -> None:
    with pytest.raises(InvalidArgument, match="cannot be written as JSON"):
        encoded(object())


def test_models_validate_themselves() -> None:
    @consumer("t", group="g", to="u")
    def take(order: Validated) -> int:
        return order.number

    class Body:
        """A message with a body."""

        body = b'{"number": 4}'

    message = Body()
    context: Any = None
    given: Any = message
    assert take.arguments(given, context)["order"].number == 4
    Body.body = b'{"number": -4}'
    with pytest.raises(msgspec.ValidationError, match="must be 0 or more"):
        take.arguments(given, context)
