"""Traces: a consumer's work belongs to the sender's trace, even after redeliveries."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from opentelemetry import baggage, trace
from opentelemetry.context import attach, detach
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from clusters import Cluster, Recorder, cluster
from consumers import Seen, consuming
from transaction_broker import settled, transaction_world
from turbopump.client.delivery.results import ConsumeContext, ConsumeResult
from turbopump.client.lite_pull_consumer import LitePullConsumer
from turbopump.client.producer import Producer
from turbopump.client.push_config import Listening
from turbopump.client.tracing import ConsumeTracing, SendTracing
from turbopump.client.transaction_ends import TransactionState
from turbopump.client.transactions import TransactionProducer
from turbopump.errors import MissingPackage, RemoteError
from turbopump.message import Message, MessageQueue
from turbopump.testing import virtual_time, wait_until
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command
from turbopump.wire.record import MessageView

QUEUE = MessageQueue("T", "a", 0)


class Collected:
    """Finished spans, and the provider that creates them."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    def producer(self, world: Cluster, recorder: Recorder | None = None) -> Producer:
        hooks = [recorder] if recorder else []
        session = world.session("10.0.9.9", instance="producer", hooks=hooks)
        return Producer("pg", session=session, hooks=[SendTracing(self.provider)])

    @property
    def consume_hooks(self) -> list[ConsumeTracing]:
        return [ConsumeTracing(self.provider)]


@pytest.fixture
def spans() -> Collected:
    return Collected()


def own(span: ReadableSpan) -> trace.SpanContext:
    context = span.get_span_context()
    assert context is not None
    return context


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def assert_child(child: ReadableSpan, parent: ReadableSpan) -> None:
    assert child.parent is not None
    assert child.parent.span_id == own(parent).span_id
    assert own(child).trace_id == own(parent).trace_id


async def make_topic(world: Cluster) -> None:
    await world.make_topic("T", "a")


@virtual_time()
async def test_consumer_belongs_to_the_senders_trace(tmp_path: Path, spans: Collected) -> None:
    seen: list[tuple[int, object]] = []

    async def listen(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        seen.append((trace.get_current_span().get_span_context().span_id, baggage.get_all()))
        return ConsumeResult.SUCCESS

    async with cluster(tmp_path) as world:
        await make_topic(world)
        async with spans.producer(world) as producer:
            message = Message("T", b"hello", tags="new", keys=["42"], properties={"colour": "red"})
            with spans.tracer.start_as_current_span("order"):
                token = attach(baggage.set_baggage("customer", "4 2"))
                receipt = await producer.send(message, to=QUEUE)
                detach(token)
        async with consuming(world, listen, hooks=spans.consume_hooks):
            await wait_until(lambda: bool(spans.named("process T")))

    sent, processed = spans.one("send T"), spans.one("process T")
    assert_child(sent, spans.one("order"))
    assert_child(processed, sent)
    assert (sent.kind, processed.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert seen == [(own(processed).span_id, {"customer": "4 2"})]
    assert "traceparent" not in message.properties
    common = {
        "messaging.system": "rocketmq",
        "messaging.destination.name": "T",
        "messaging.destination.partition.id": "0",
        "messaging.message.id": receipt.message_id,
        "messaging.message.body.size": 5,
        "messaging.rocketmq.message.tag": "new",
        "messaging.rocketmq.message.keys": ("42",),
    }
    assert attributes(sent) == {
        **common,
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.rocketmq.client_group": "pg",
    }
    assert attributes(processed) == {
        **common,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.consumer.group.name": "g",
        "turbopump.message.reconsume_times": 0,
    }


@virtual_time()
async def test_retries_stay_in_the_trace(tmp_path: Path, spans: Collected) -> None:
    async def listen(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        match messages[0].reconsume_times:
            case 0:
                raise RuntimeError("not today")
            case 1:
                return ConsumeResult.RETRY_LATER
            case _:
                return ConsumeResult.SUCCESS

    async with cluster(tmp_path) as world:
        await make_topic(world)
        async with spans.producer(world) as producer:
            await producer.send(Message("T", b"hello"))
        async with consuming(world, listen, hooks=spans.consume_hooks):
            await wait_until(lambda: len(spans.named("process T")) == 3, 600)

    calls = spans.named("process T")
    for call in calls:
        assert_child(call, spans.one("send T"))
    attempts = [attributes(call)["turbopump.message.reconsume_times"] for call in calls]
    assert attempts == [0, 1, 2]
    errors = [attributes(call).get("error.type") for call in calls]
    assert errors == ["RuntimeError", "retry later", None]
    codes = [call.status.status_code for call in calls]
    assert codes == [StatusCode.ERROR, StatusCode.ERROR, StatusCode.UNSET]
    assert [event.name for event in calls[0].events] == ["exception"]


@virtual_time()
async def test_orderly_listeners_are_traced_call_by_call(tmp_path: Path, spans: Collected) -> None:
    def fail_once(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        again = messages[0].reconsume_times == 0
        return ConsumeResult.RETRY_LATER if again else ConsumeResult.SUCCESS

    async with cluster(tmp_path) as world:
        await make_topic(world)
        async with spans.producer(world) as producer:
            for body in (b"1", b"2"):
                await producer.send(Message("T", body), to=QUEUE)
        seen = Seen(fail_once)
        async with consuming(world, seen, orderly=True, hooks=spans.consume_hooks):
            await wait_until(lambda: len(spans.named("process T")) == 4, 60)

    first, second = spans.named("send T")
    for call, sent in zip(spans.named("process T"), (first, first, second, second), strict=True):
        assert_child(call, sent)


@virtual_time()
async def test_batch_is_linked_to_its_senders(tmp_path: Path, spans: Collected) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        async with spans.producer(world) as producer:
            await producer.send_batch([Message("T", b"1"), Message("T", b"2")], to=QUEUE)
            await producer.send(Message("T", b"3"), to=QUEUE)
        async with Producer("plain", session=world.session("10.0.9.7")) as producer:
            await producer.send(Message("T", b"4"), to=QUEUE)
        seen = Seen()
        with spans.tracer.start_as_current_span("program"):
            async with consuming(world, seen, batch_size=10, hooks=spans.consume_hooks):
                await wait_until(lambda: bool(spans.named("process T")))

    assert seen.batches == [4]
    sent, processed = spans.named("send T"), spans.one("process T")
    assert processed.parent is None
    assert [link.context.span_id for link in processed.links] == [
        own(each).span_id for each in sent
    ]
    assert attributes(sent[0])["messaging.batch.message_count"] == 2
    assert attributes(processed)["messaging.batch.message_count"] == 4
    assert "messaging.message.id" not in attributes(sent[0])


@virtual_time()
async def test_message_without_a_context_begins_a_trace(tmp_path: Path, spans: Collected) -> None:
    async with cluster(tmp_path) as world:
        async with Producer("plain", session=world.session("10.0.9.7")) as producer:
            await producer.send(Message("T", b"x"))
        with spans.tracer.start_as_current_span("program"):
            async with consuming(world, Seen(), hooks=spans.consume_hooks):
                await wait_until(lambda: bool(spans.named("process T")))
    assert spans.one("process T").parent is None


def failing(times: int) -> Recorder:
    left = [times]

    def refuse(address: str, command: Command) -> None:
        if command.code == RequestCode.SEND_MESSAGE_V2 and left[0]:
            left[0] -= 1
            raise RemoteError(ResponseCode.SYSTEM_ERROR, "refused")

    return Recorder(refuse=refuse)


@virtual_time()
async def test_failed_attempts_are_events_of_one_span(tmp_path: Path, spans: Collected) -> None:
    async with cluster(tmp_path) as world, spans.producer(world, failing(4)) as producer:
        with pytest.raises(RemoteError):
            await producer.send(Message("T", b"x"))
        await producer.send(Message("T", b"x"))
    failed, sent = spans.named("send T")
    assert [event.name for event in failed.events] == [*["try failed"] * 3, "exception"]
    assert failed.status.status_code is StatusCode.ERROR
    assert attributes(failed)["error.type"] == "RemoteError"
    assert [event.name for event in sent.events] == ["try failed"]
    assert sent.status.status_code is StatusCode.UNSET


@virtual_time()
async def test_every_way_to_send_carries_its_callers_context(
    tmp_path: Path, spans: Collected
) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        async with spans.producer(world) as producer:
            with spans.tracer.start_as_current_span("submit"):
                promise = await producer.submit(Message("T", b"submit"), to=QUEUE)
            await promise
            with spans.tracer.start_as_current_span("oneway"):
                await producer.send_oneway(Message("T", b"oneway"), to=QUEUE)
        seen = Seen()
        async with consuming(world, seen, hooks=spans.consume_hooks):
            await wait_until(lambda: len(spans.named("process T")) == 2)
    for sent, name in zip(spans.named("send T"), ("submit", "oneway"), strict=True):
        assert_child(sent, spans.one(name))
    traces = {message.body: message.properties["traceparent"] for message in seen.messages}
    for name in ("submit", "oneway"):
        assert f"{own(spans.one(name)).trace_id:032x}" in traces[name.encode()]


@virtual_time()
async def test_pulled_messages_are_traced_manually(tmp_path: Path, spans: Collected) -> None:
    (tracing,) = spans.consume_hooks
    async with cluster(tmp_path) as world:
        await make_topic(world)
        async with spans.producer(world) as producer:
            await producer.send(Message("T", b"x"))
        async with LitePullConsumer(
            "lite", session=world.session(), subscriptions={"T": "*"}, start_from="first"
        ) as consumer:
            async for message in consumer:
                with tracing.processing([message], "lite"):
                    pass
                with pytest.raises(LookupError), tracing.processing([message], "lite"):
                    raise LookupError
                break
    done, failed = spans.named("process T")
    assert_child(done, spans.one("send T"))
    assert_child(failed, spans.one("send T"))
    assert done.status.status_code is StatusCode.UNSET
    assert attributes(failed)["error.type"] == "LookupError"


@virtual_time()
async def test_listener_that_is_cut_off_ends_its_span(tmp_path: Path, spans: Collected) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        async with spans.producer(world) as producer:
            await producer.send(Message("T", b"x"))
        seen = Seen()
        seen.hold.clear()
        listening = Listening(close_wait=0.1)
        async with consuming(world, seen, listening=listening, hooks=spans.consume_hooks):
            await wait_until(lambda: seen.running == 1)
    assert attributes(spans.one("process T"))["error.type"] == "CancelledError"


@virtual_time()
async def test_without_an_sdk_nothing_is_added(tmp_path: Path) -> None:
    seen = Seen()
    async with cluster(tmp_path) as world:
        async with Producer(
            "pg", session=world.session("10.0.9.9"), hooks=[SendTracing(trace.NoOpTracerProvider())]
        ) as producer:
            await producer.send(Message("T", b"x"))
        async with consuming(world, seen, hooks=[ConsumeTracing(trace.NoOpTracerProvider())]):
            await wait_until(lambda: seen.count == 1)
            await asyncio.sleep(0.1)
    assert "traceparent" not in seen.messages[0].properties


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "turbopump.client.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    tracing = importlib.import_module("turbopump.client.tracing")
    for hook in (tracing.SendTracing, tracing.ConsumeTracing):
        with pytest.raises(MissingPackage, match=r"pip install '\.\[tracing\]'") as raised:
            hook()
        assert isinstance(raised.value, ImportError)


@virtual_time()
async def test_decisions_of_transactions_are_spans(spans: Collected) -> None:
    async def check(message: MessageView) -> TransactionState:
        return TransactionState.ROLLBACK

    async with (
        transaction_world() as world,
        TransactionProducer(
            "pg", check=check, session=world.session(), hooks=[SendTracing(spans.provider)]
        ) as producer,
    ):
        with spans.tracer.start_as_current_span("order"):
            async with producer.transaction(Message("T", b"hello")) as transaction:
                pass
        await settled()
        world.broker.check(world.broker.batches[0])
        await settled()
    sent, committed = spans.one("send T"), spans.one("commit T")
    assert_child(sent, spans.one("order"))
    assert_child(committed, spans.one("order"))
    assert attributes(committed) == {
        "messaging.system": "rocketmq",
        "messaging.operation.name": "settle",
        "messaging.operation.type": "settle",
        "messaging.destination.name": "T",
        "messaging.rocketmq.client_group": "pg",
        "messaging.message.id": transaction.id,
        "turbopump.transaction.state": "COMMIT",
        "turbopump.transaction.from_check": False,
    }
    # Whichever producer is asked: the check belongs to the trace of the half message.
    checked = spans.one("rollback T")
    assert_child(checked, sent)
    assert attributes(checked)["turbopump.transaction.from_check"] is True


@virtual_time()
async def test_decisions_that_are_not_sent_are_failed_spans(spans: Collected) -> None:
    async def check(message: MessageView) -> TransactionState:
        return TransactionState.UNKNOWN

    async with (
        transaction_world() as world,
        TransactionProducer(
            "pg", check=check, session=world.session(), hooks=[SendTracing(spans.provider)]
        ) as producer,
        producer.transaction(Message("T", b"hello")),
    ):
        await producer.close()
    span = spans.one("commit T")
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span)["error.type"] == "NotRunning"
