"""Functions that consume one message per call, with typed arguments decoded from its body."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import msgspec

from turbopump.client.arguments import checked
from turbopump.client.delivery.listener import is_async
from turbopump.client.delivery.results import ConsumeContext
from turbopump.client.names import check_group, check_topic, check_topic_to_subscribe
from turbopump.client.push_config import Listening, Retries
from turbopump.client.start_position import StartFrom, consume_from
from turbopump.client.subscriptions import Expression, subscription
from turbopump.errors import InvalidArgument
from turbopump.filters.tags import EVERYTHING
from turbopump.message import Message
from turbopump.wire.record import MessageView

P = ParamSpec("P")
T = TypeVar("T")

Decode = Callable[[MessageView, ConsumeContext], Any]


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The settings shared by all functions of one group, which form one consumer."""

    start_from: StartFrom
    orderly: bool
    listening: Listening
    retries: Retries


class Handler(Generic[P, T]):
    """A function decorated with `consumer`; calling it calls the function, as tests do."""

    def __init__(
        self,
        function: Callable[P, T],
        topic: str,
        group: str,
        tags: Expression,
        to: str | None,
        settings: GroupSettings,
        names: Mapping[str, Any],
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.topic = topic
        self.group = group
        self.tags = tags
        self.to = to
        self.settings = settings
        self.is_async = is_async(function)
        self._decoders = _decoders(function, names)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<consumer {getattr(self.function, '__qualname__', '?')} of {self.topic}>"

    def arguments(self, message: MessageView, context: ConsumeContext) -> dict[str, Any]:
        """Decode the function's arguments; raises ValueError if the body does not have its type."""
        return {name: decode(message, context) for name, decode in self._decoders.items()}

    def results(self, returned: object) -> Iterable[Message]:
        """Return the messages to publish: none for None, those returned, or one to ``to``."""
        if returned is None:
            return ()
        if isinstance(returned, Message):
            return (returned,)
        if (
            isinstance(returned, list)
            and returned
            and all(isinstance(e, Message) for e in returned)
        ):
            return returned
        if self.to is None:
            raise InvalidArgument(
                f"{self!r} returned {returned!r}, which has no topic: return None or a Message, or "
                'pass to="topic" to consumer()'
            )
        return (Message(self.to, encoded(returned)),)


def consumer(
    topic: str,
    *,
    group: str,
    tags: Expression = EVERYTHING,
    to: str | None = None,
    start_from: StartFrom = "last",
    orderly: bool = False,
    listening: Listening | None = None,
    retries: Retries | None = None,
) -> Callable[[Callable[P, T]], Handler[P, T]]:
    """Decorate a function that consumes a topic, one message per call.

    ::

        @consumer("orders", group="billing", to="invoices")
        def bill(order: Order) -> Invoice:
            return Invoice(order.id, order.amount)

        run(bill, nameserver="127.0.0.1:9876")

    The body is decoded from JSON to the type of the parameter; ``bytes`` and ``str`` get it as it
    is, parameters of type `MessageView` and `ConsumeContext` the whole message and its context.
    What the function returns is published to ``to`` before the message counts as consumed. An
    exception redelivers the message; a body of another type makes it a dead letter.
    """
    check_topic_to_subscribe(topic)
    check_group(group)
    subscription(topic, tags, 0)
    if to is not None:
        check_topic(to)
    consume_from(start_from)
    listening = checked("listening", listening, Listening, "Listening(threads=4)")
    if listening.batch_max != 1:
        raise InvalidArgument(
            f"listening.batch_max must be 1, got {listening.batch_max}: a decorated function gets "
            "one message per call; use PushConsumer for batches"
        )
    settings = GroupSettings(
        start_from=start_from,
        orderly=orderly,
        listening=listening,
        retries=checked("retries", retries, Retries, "Retries(attempts_max=3)"),
    )
    # Annotated types may be local to the decorating function, as in tests.
    names = sys._getframe(1).f_locals  # noqa: SLF001 - the only way to see them

    def decorate(function: Callable[P, T]) -> Handler[P, T]:
        if not callable(function):
            raise InvalidArgument(f"consumer() decorates a function, got {function!r}")
        return Handler(function, topic, group, tags, to, settings, names)

    return decorate


# --- bodies ---------------------------------------------------------------------------------------


def encoded(value: object) -> bytes:
    """Return a body: bytes unchanged, text as UTF-8, anything else as JSON."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    try:
        return msgspec.json.encode(value, enc_hook=_plain_model)
    except (TypeError, NotImplementedError) as error:
        raise InvalidArgument(f"{value!r} cannot be written as JSON: {error}") from error


def _decoders(function: Callable[..., Any], names: Mapping[str, Any]) -> dict[str, Decode]:
    """Return a decoder for each parameter of a function; one of them gets the body."""
    try:
        signature = inspect.signature(function, eval_str=True, locals=names)
    except NameError as error:
        raise InvalidArgument(
            f"an annotation of {function!r} is not defined where it is decorated: {error}"
        ) from error
    found: dict[str, Decode] = {}
    bodies = []
    for name, parameter in signature.parameters.items():
        if parameter.annotation is MessageView:
            found[name] = lambda message, _: message
        elif parameter.annotation is ConsumeContext:
            found[name] = lambda _, context: context
        elif parameter.default is parameter.empty:
            bodies.append(name)
            found[name] = _body_decoder(function, parameter)
    if len(bodies) > 1 or not found:
        raise InvalidArgument(
            f"{function!r} must have one parameter for the body, besides those of type MessageView "
            f"and ConsumeContext, got {signature}"
        )
    return found


def _body_decoder(function: Callable[..., Any], parameter: inspect.Parameter) -> Decode:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise InvalidArgument(f"{function!r} must name its parameters, got {parameter}")
    kind = Any if parameter.annotation is parameter.empty else parameter.annotation
    if kind is bytes:
        return lambda message, _: message.body
    if kind is str:
        return lambda message, _: message.body.decode()
    try:
        decoder = msgspec.json.Decoder(kind, dec_hook=_model)
    except TypeError as error:
        raise InvalidArgument(f"{parameter} of {function!r}: {error}") from error
    return lambda message, _: decoder.decode(message.body)


def _model(kind: Any, value: object) -> object:
    """Decode classes that validate themselves, such as Pydantic models."""
    if hasattr(kind, "model_validate"):
        return kind.model_validate(value)
    raise NotImplementedError(f"objects of type {kind.__name__} cannot be read from JSON")


def _plain_model(value: Any) -> object:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise NotImplementedError(f"objects of type {type(value).__name__} are not supported")


# --- groups ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HandlerGroup:
    """The functions of one group by topic; together they form one consumer."""

    group: str
    settings: GroupSettings
    by_topic: dict[str, Handler[..., Any]]


def grouped(handlers: Iterable[object]) -> list[HandlerGroup]:
    """Group functions into consumers; raises InvalidArgument if they cannot share one."""
    groups: dict[str, HandlerGroup] = {}
    for handler in handlers:
        if not isinstance(handler, Handler):
            raise InvalidArgument(
                f"expected functions decorated with @consumer(topic, group=...), got {handler!r}"
            )
        new = HandlerGroup(handler.group, handler.settings, {})
        known = groups.setdefault(handler.group, new)
        if handler.topic in known.by_topic:
            raise InvalidArgument(
                f"group {handler.group!r} has two functions for topic {handler.topic!r}; give them "
                "different groups, and each gets every message"
            )
        if known.settings != handler.settings:
            raise InvalidArgument(
                f"functions of group {handler.group!r} must have the same start_from, orderly, "
                "listening and retries, since they are one consumer"
            )
        known.by_topic[handler.topic] = handler
    if not groups:
        raise InvalidArgument("pass at least one function decorated with @consumer(...)")
    return list(groups.values())
