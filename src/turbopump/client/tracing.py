"""OpenTelemetry: consuming a message continues its sender's trace.

Pass `SendTracing` in ``hooks`` of a producer, and `ConsumeTracing` in those of a push consumer. The
context travels in the message's properties, under the names that the configured propagator uses:
``traceparent``, ``tracestate`` and ``baggage`` by default. Names of spans and attributes follow the
semantic conventions for messaging.

Requires the package opentelemetry-api: ``pip install '.[tracing]'`` in a checkout.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import TypeAlias

import msgspec

from turbopump.client.delivery.results import ConsumeContext, ConsumeResult
from turbopump.client.outgoing import Outgoing
from turbopump.client.send_hooks import SendReceipt
from turbopump.client.transaction_ends import TransactionEnd
from turbopump.errors import MissingPackage
from turbopump.message import Message, MessageQueue
from turbopump.version import __version__
from turbopump.wire.record import MessageView

try:
    from opentelemetry import propagate, trace
    from opentelemetry.context import Context, attach, detach
    from opentelemetry.trace import (
        Link,
        Span,
        SpanKind,
        Status,
        StatusCode,
        Tracer,
        TracerProvider,
    )
except ImportError as error:
    # `from turbopump import *` works without it; the hooks do not.
    _missing: ImportError | None = error
else:
    _missing = None

Attributes: TypeAlias = dict[str, str | int | Sequence[str]]

_PARTITION = "messaging.destination.partition.id"
_PRODUCER_GROUP = "messaging.rocketmq.client_group"
_BATCH_COUNT = "messaging.batch.message_count"
_MESSAGE_ID = "messaging.message.id"
_BODY_BYTES = "messaging.message.body.size"
_TAG = "messaging.rocketmq.message.tag"
_KEYS = "messaging.rocketmq.message.keys"
_ERROR = "error.type"

_FAILED = (ConsumeResult.RETRY_LATER, ConsumeResult.ROLLBACK)

_Begun: TypeAlias = "tuple[Span, Token[Context]]"
_begun: ContextVar[_Begun | None] = ContextVar("turbopump_consume_span", default=None)
"""The span of the call running in this thread or task."""


class SendTracing:
    """Creates a span for each send, and adds its context to the messages.

    ::

        producer = Producer("orders-producer", nameserver="127.0.0.1:9876", hooks=[SendTracing()])

    The span covers all attempts; failed ones are its events. Without ``provider``, the global one
    is used.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = _tracer(provider)

    @contextmanager
    def sending(self, group: str, messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
        """Start a span, and yield copies of the messages that carry its context."""
        if not messages:
            yield messages
            return
        with self._tracer.start_as_current_span(
            f"send {messages[0].topic}",
            kind=SpanKind.PRODUCER,
            attributes=_of_sending(group, messages),
        ) as span:
            carrier: dict[str, str] = {}
            propagate.inject(carrier)
            try:
                yield [_carrying(message, carrier) for message in messages]
            except Exception as error:
                span.set_attribute(_ERROR, _name_of(error))
                raise

    def before_send(self, group: str, sent: Outgoing, queue: MessageQueue) -> None:  # noqa: ARG002 - what hooks are given
        """Record what is known only now: id and queue."""
        span = trace.get_current_span()
        if not sent.is_batch:
            span.set_attribute(_MESSAGE_ID, sent.message_id)
        span.set_attribute(_PARTITION, str(queue.queue_id))

    def after_send(
        self,
        group: str,  # noqa: ARG002 - what hooks are given
        sent: Outgoing,  # noqa: ARG002 - what hooks are given
        queue: MessageQueue,
        outcome: SendReceipt | Exception,
    ) -> None:
        """Record a failed attempt; another one may follow."""
        if isinstance(outcome, Exception):
            attributes = {_ERROR: _name_of(outcome), _PARTITION: str(queue.queue_id)}
            trace.get_current_span().add_event("try failed", attributes)

    def transaction_ended(self, end: TransactionEnd) -> None:
        """Create a span for a decision; that of a check belongs to the half message's trace."""
        message = end.message
        asked = propagate.extract(message.properties, Context()) if end.is_check else None
        span = self._tracer.start_span(
            f"{end.state.name.lower()} {message.topic}",
            context=asked,
            kind=SpanKind.CLIENT,
            attributes={
                **_common("settle", message.topic),
                _PRODUCER_GROUP: end.group,
                _MESSAGE_ID: end.transaction_id,
                "turbopump.transaction.state": end.state.name,
                "turbopump.transaction.from_check": end.is_check,
            },
        )
        if end.error is not None:
            span.set_attribute(_ERROR, _name_of(end.error))
            span.set_status(Status(StatusCode.ERROR, str(end.error)))
        span.end()


class ConsumeTracing:
    """Creates a span for each call of a listener, in the trace of its message.

    ::

        consumer = PushConsumer("billing", handle, nameserver="127.0.0.1:9876",
                                subscriptions={"orders": "*"}, hooks=[ConsumeTracing()])

    For one message, the sender's span is the parent, and its baggage becomes current. A batch has
    many senders, so its span starts a trace that links to each of theirs. A redelivered message
    adds a span to the same trace.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = _tracer(provider)

    def before_consume(self, messages: Sequence[MessageView], context: ConsumeContext) -> None:
        """Start the span and make it the listener's current one."""
        _begun.set(self._begin(messages, context.group))

    def after_consume(
        self,
        messages: Sequence[MessageView],  # noqa: ARG002 - what hooks are given
        context: ConsumeContext,  # noqa: ARG002
        result: ConsumeResult,
    ) -> None:
        """End the span, as failed if the messages will be redelivered."""
        begun = _begun.get()
        if begun is not None:
            _begun.set(None)
            _end(begun, sys.exception(), result.value if result in _FAILED else None)

    @contextmanager
    def processing(self, messages: Sequence[MessageView], group: str) -> Iterator[Span]:
        """Create the span explicitly, for pulled messages.

        ::

            for message in consumer:
                with tracing.processing([message], "audit"):
                    audit(message)
        """
        begun = self._begin(messages, group)
        try:
            yield begun[0]
        except BaseException as error:
            _end(begun, error, None)
            raise
        _end(begun, None, None)

    def _begin(self, messages: Sequence[MessageView], group: str) -> _Begun:
        # Not the current context: a worker inherits that of the code that started the consumer.
        contexts = [propagate.extract(message.properties, Context()) for message in messages]
        parent = contexts[0] if len(contexts) == 1 else Context()
        span = self._tracer.start_span(
            f"process {messages[0].topic}",
            context=parent,
            kind=SpanKind.CONSUMER,
            attributes=_of_processing(group, messages),
            links=_links(contexts) if len(contexts) > 1 else (),
        )
        return span, attach(trace.set_span_in_context(span, parent))


def _tracer(provider: TracerProvider | None) -> Tracer:
    if _missing is not None:
        raise MissingPackage.of_extra("tracing", "tracing needs opentelemetry-api") from _missing
    return trace.get_tracer("turbopump", __version__, provider)


def _end(begun: _Begun, error: BaseException | None, failure: str | None) -> None:
    span, token = begun
    if error is not None:
        span.record_exception(error)
        failure = _name_of(error)
    if failure is not None:
        span.set_attribute(_ERROR, failure)
        span.set_status(Status(StatusCode.ERROR, failure if error is None else str(error)))
    detach(token)
    span.end()


def _carrying(message: Message, carrier: dict[str, str]) -> Message:
    if not carrier:
        return message
    return msgspec.structs.replace(message, properties={**message.properties, **carrier})


def _links(contexts: Sequence[Context]) -> list[Link]:
    senders = [trace.get_current_span(each).get_span_context() for each in contexts]
    # Messages sent together share one span.
    distinct = {sender.span_id: sender for sender in senders if sender.is_valid}
    return [Link(sender) for sender in distinct.values()]


def _common(operation: str, topic: str) -> Attributes:
    return {
        "messaging.system": "rocketmq",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": topic,
    }


def _of_sending(group: str, messages: Sequence[Message]) -> Attributes:
    first = messages[0]
    found: Attributes = {**_common("send", first.topic), _PRODUCER_GROUP: group}
    if len(messages) > 1:
        return {**found, _BATCH_COUNT: len(messages)}
    found[_BODY_BYTES] = len(first.body)
    if first.tags:
        found[_TAG] = first.tags
    if first.keys:
        found[_KEYS] = [first.keys] if isinstance(first.keys, str) else list(first.keys)
    if first.delay_level:
        found["messaging.rocketmq.message.delay_time_level"] = first.delay_level
    return found


def _of_processing(group: str, messages: Sequence[MessageView]) -> Attributes:
    first = messages[0]
    found: Attributes = {
        **_common("process", first.topic),
        _PARTITION: str(first.queue_id),
        "messaging.consumer.group.name": group,
    }
    if len(messages) > 1:
        return {**found, _BATCH_COUNT: len(messages)}
    found |= {
        _MESSAGE_ID: first.message_id,
        _BODY_BYTES: first.body_length,
        "turbopump.message.reconsume_times": first.reconsume_times,
    }
    if first.tags:
        found[_TAG] = first.tags
    if first.keys:
        found[_KEYS] = list(first.keys)
    return found


def _name_of(error: BaseException) -> str:
    return type(error).__qualname__
