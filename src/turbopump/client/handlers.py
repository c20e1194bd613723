"""Functions that consume one message per call, with typed arguments decoded from its body."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import (
    Any,
    Generic,
    Never,
    NoReturn,
    ParamSpec,
    TypeGuard,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from turbopump.client.arguments import check_callable, checked
from turbopump.client.delivery.listener import is_async
from turbopump.client.delivery.results import (
    ConsumeContext,
    ConsumeResult,
    GiveUp,
    RetryLater,
    is_failure,
)
from turbopump.client.names import check_group, check_topic, check_topic_to_subscribe
from turbopump.client.offset_store import OffsetStore, check_offset_store
from turbopump.client.producer import Producer
from turbopump.client.push_config import CONCURRENCY, Concurrency, Listening, check_calls
from turbopump.client.retry_policy import OnError, RetryPolicy
from turbopump.client.selectors import Selector, by_hash
from turbopump.client.start_position import StartFrom, consume_from
from turbopump.client.subscriptions import Expression, subscription
from turbopump.errors import InvalidArgument
from turbopump.filters.tags import EVERYTHING
from turbopump.json_bodies import check_json_type, json_body, json_decoder, shortened
from turbopump.message import Message
from turbopump.wire.record import MessageView

P = ParamSpec("P")
T = TypeVar("T")

Decode = Callable[[MessageView, ConsumeContext], Any]
Key = Callable[[Any], str | int]
"""Returns what the queue of a result depends on: equal keys go to the same queue, in order."""

_NO_VALUES = (
    inspect.Signature.empty,
    None,
    NoneType,
    Any,
    NoReturn,
    Never,
    Message,
    ConsumeResult,
    RetryLater,
    GiveUp,
    list,
    tuple,
)
"""Return annotations that need no topic to publish to."""

_SEVERAL_RESULTS = (
    list,
    tuple,
    Union,
    UnionType,
    Iterable,
    Iterator,
    Generator,
    AsyncIterable,
    AsyncIterator,
    AsyncGenerator,
    Awaitable,
    Coroutine,
)
"""Return annotations whose parts are published, each by itself."""

_NO_BODIES = (Message, MessageView, ConsumeContext, ConsumeResult)
"""Types that no body has; `MessageView` and `ConsumeContext` are parameters of their own."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The settings shared by all functions of one group, which form one consumer."""

    start_from: StartFrom
    orderly: bool
    concurrency: Concurrency
    max_attempts: int | None
    listening: Listening
    offset_store: OffsetStore | None


class Handler(Generic[P, T]):
    """A function decorated with `consumer`; calling it calls the function, as tests do."""

    def __init__(
        self,
        function: Callable[P, T],
        topic: str,
        group: str,
        tags: Expression,
        to: str | None,
        key: Key | None,
        retries: RetryPolicy,
        settings: GroupSettings,
        names: Mapping[str, Any],
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.topic = topic
        self.group = group
        self.tags = tags
        self.to = to
        self.key = key
        self.retries = retries
        self.settings = settings
        self.is_async = is_async(function)
        signature = _signature(function, names)
        self.awaits = self.is_async or is_async(inspect.unwrap(function))
        self.producer_parameter = _producer_parameter(function, signature, awaits=self.awaits)
        """The parameter that gets the worker's producer, of asyncio if the function awaits."""
        self._decoders = _decoders(function, signature, self.producer_parameter)
        if to is not None:
            _check_results(function, signature.return_annotation)
        elif _names_values(signature.return_annotation):
            warnings.warn(
                f"{self!r} returns {signature.return_annotation!r}, which is ignored: pass "
                'to="topic" to consumer() to publish it, or return None',
                stacklevel=3,
            )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<consumer {getattr(self.function, '__qualname__', '?')} of {self.topic}>"

    def arguments(self, message: MessageView, context: ConsumeContext) -> dict[str, Any]:
        """Decode the function's arguments; raises ValueError if the body does not have its type."""
        return {name: decode(message, context) for name, decode in self._decoders.items()}

    def results(self, returned: object) -> list[tuple[Message, Selector | None]]:
        """Return the messages to publish, and what chooses the queue of each.

        They are those returned, and other values as messages to ``to``. A list, tuple or iterator
        is published item by item. Without ``to``, other values are ignored.
        """
        held = list(returned) if _is_collection(returned) else [returned]
        for each in held:
            self._require_result(each)
        return [
            (
                each if isinstance(each, Message) else Message(self.to or "", encoded(each)),
                self._selector(each),
            )
            for each in held
            if isinstance(each, Message) or (self.to is not None and each is not None)
        ]

    def _require_result(self, each: object) -> None:
        """Refuse an outcome that would be ignored or published, and its message acknowledged."""
        if isinstance(each, ConsumeResult) or is_failure(each):
            raise InvalidArgument(
                f"{self!r} must return RetryLater(...), GiveUp(...) or a ConsumeResult by itself, "
                f"neither the class nor among other results, got {each!r}"
            )

    def _selector(self, result: object) -> Selector | None:
        if self.key is None:
            return None
        key: object = self.key(result)
        if not isinstance(key, str | int):
            raise InvalidArgument(
                f"key of {self!r} must return a str or int, got {key!r} for {shortened(result)}"
            )
        return by_hash(key)


def _is_collection(returned: object) -> TypeGuard[Iterable[object]]:
    """Whether a result is several ones; a named tuple is a record."""
    if isinstance(returned, tuple):
        return not hasattr(returned, "_fields")
    return isinstance(returned, list | Iterator)


def consumer(
    topic: str,
    *,
    group: str,
    tags: Expression = EVERYTHING,
    to: str | None = None,
    key: Key | None = None,
    start_from: StartFrom = "last",
    orderly: bool = False,
    concurrency: Concurrency = CONCURRENCY,
    max_attempts: int | None = None,
    on_error: OnError | None = None,
    listening: Listening | None = None,
    offset_store: OffsetStore | None = None,
) -> Callable[[Callable[P, T]], Handler[P, T]]:
    """Decorate a function that consumes a topic, one message per call.

    ::

        @consumer("orders", group="billing", to="invoices")
        def bill(order: Order) -> Invoice:
            return Invoice(order.id, order.amount)

        run(bill, nameserver="127.0.0.1:9876")

    The body is decoded from JSON to the type of the parameter; ``bytes`` and ``str`` get it as it
    is, parameters of type `MessageView` and `ConsumeContext` the whole message and its context, one
    of type `Producer` the producer of the worker.
    What the function returns is published to ``to`` before the message counts as consumed, and
    ignored without ``to``; lists, tuples and generators are published item by item. An exception
    redelivers the message; a body of another type makes it a dead letter. With ``key``, such as
    ``key=lambda invoice: invoice.customer``, results of equal keys go to the same queue, in order.

    ``on_error`` says what follows exceptions of a class, subclasses included, such as
    ``{TimeoutError: RetryLater(30), ValueError: GiveUp()}``.
    """
    check_topic_to_subscribe(topic)
    check_group(group)
    subscription(topic, tags, 0)
    if to is not None:
        check_topic(to)
    if key is not None:
        check_callable("key", key, "(result)")
        if to is None:
            raise InvalidArgument('key chooses the queue of results: pass to="topic" as well')
    consume_from(start_from)
    retries = RetryPolicy(on_error)
    check_calls(concurrency, 1, max_attempts)
    if offset_store is not None:
        check_offset_store(offset_store)
    settings = GroupSettings(
        start_from=start_from,
        orderly=orderly,
        concurrency=concurrency,
        max_attempts=max_attempts,
        listening=checked("listening", listening, Listening, "Listening(close_wait=60)"),
        offset_store=offset_store,
    )
    # Annotated types may be local to the decorating function, as in tests.
    names = sys._getframe(1).f_locals  # noqa: SLF001 - the only way to see them

    def decorate(function: Callable[P, T]) -> Handler[P, T]:
        if not callable(function):
            raise InvalidArgument(f"consumer() decorates a function, got {function!r}")
        return Handler(function, topic, group, tags, to, key, retries, settings, names)

    return decorate


# --- bodies ---------------------------------------------------------------------------------------


def encoded(value: object) -> bytes:
    """Return a body: bytes unchanged, text as UTF-8, anything else as JSON."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    return json_body(value)


def _signature(function: Callable[..., Any], names: Mapping[str, Any]) -> inspect.Signature:
    """Return a function's signature with evaluated annotations."""
    try:
        return inspect.signature(function, eval_str=True, locals=names)
    except NameError as error:
        raise InvalidArgument(
            f"an annotation of {function!r} is not defined where it is decorated: {error}"
        ) from error


def _names_values(annotation: Any) -> bool:
    """Whether a return annotation names values that only ``to`` can publish."""
    if annotation in _NO_VALUES:
        return False
    parts = [part for part in get_args(annotation) if part is not Ellipsis]
    return any(map(_names_values, parts)) if parts else True


def _check_results(function: Callable[..., Any], annotation: Any) -> None:
    """Reject a return annotation that names values without a body: each would fail every time."""
    if annotation in _NO_VALUES:
        return
    parts = get_args(annotation)
    if get_origin(annotation) in _SEVERAL_RESULTS:
        for part in parts:
            _check_results(function, part)
    elif annotation not in (Ellipsis, object):
        try:
            check_json_type(annotation)
        except InvalidArgument as error:
            raise InvalidArgument(f"the result of {function!r}: {error}") from error


def _producer_parameter(
    function: Callable[..., Any], signature: inspect.Signature, *, awaits: bool
) -> str | None:
    """Return the parameter that gets a producer: one that the function is able to use."""
    from turbopump.client import blocking  # It imports this module.

    kinds = (Producer, blocking.Producer)
    names = [name for name, each in signature.parameters.items() if each.annotation in kinds]
    if not names:
        return None
    if len(names) > 1:
        raise InvalidArgument(f"{function!r} has several parameters of type Producer")
    if signature.parameters[names[0]].annotation is not (Producer if awaits else blocking.Producer):
        wanted = "turbopump.aio.Producer" if awaits else "turbopump.Producer"
        kind = "an async function" if awaits else "a plain function, which runs in a thread,"
        raise InvalidArgument(f"{function!r} is {kind} and gets a {wanted}: annotate {names[0]} so")
    return names[0]


def _decoders(
    function: Callable[..., Any], signature: inspect.Signature, producer_parameter: str | None
) -> dict[str, Decode]:
    """Return a decoder for each other parameter of a function; one of them gets the body."""
    found: dict[str, Decode] = {}
    bodies = []
    for name, parameter in signature.parameters.items():
        if name == producer_parameter:
            continue
        if parameter.annotation is MessageView:
            found[name] = lambda message, _: message
        elif parameter.annotation is ConsumeContext:
            found[name] = lambda _, context: context
        elif parameter.default is parameter.empty:
            bodies.append(name)
            found[name] = _body_decoder(function, parameter)
    if len(bodies) > 1 or not found:
        raise InvalidArgument(
            f"{function!r} must have one parameter for the body, besides those of type "
            f"MessageView, ConsumeContext and Producer, got {signature}"
        )
    return found


def _body_decoder(function: Callable[..., Any], parameter: inspect.Parameter) -> Decode:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise InvalidArgument(f"{function!r} must name its parameters, got {parameter}")
    kind = Any if parameter.annotation is parameter.empty else parameter.annotation
    if kind is bytes:
        return lambda message, _: message.body
    if any(part in _NO_BODIES for part in (kind, *get_args(kind))):
        raise InvalidArgument(
            f"{parameter} of {function!r}: a function gets one message per call; annotate its "
            "parameter with MessageView, or with the type of the body"
        )
    if kind is str:
        return lambda message, _: message.body.decode()
    try:
        decoder = json_decoder(kind)
    except InvalidArgument as error:
        raise InvalidArgument(
            f"{parameter} of {function!r}: {error}; a MessageView is the whole message"
        ) from error
    return lambda message, _: decoder.decode(message.body)


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
                "concurrency, max_attempts, listening and offset_store, since they are one consumer"
            )
        known.by_topic[handler.topic] = handler
    if not groups:
        raise InvalidArgument("pass at least one function decorated with @consumer(...)")
    return list(groups.values())
