"""Argument checks of clients: errors name the argument, its value and what to pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from turbopump.errors import InvalidArgument
from turbopump.message import Message

T = TypeVar("T")


def checked(name: str, value: T | None, kind: type[T], example: str = "") -> T:
    """Return a settings object, the default one for None; refuse any other type.

    ::

        checked("pulling", 3, Pulling, "Pulling(batch_size=64)")
    """
    if value is None:
        return kind()
    if not isinstance(value, kind):
        hint = f"; pass {example}" if example else ""
        raise InvalidArgument(f"{name} must be a {kind.__name__}, got {value!r}{hint}")
    return value


def check_kind(call: str, value: object, kind: type) -> None:
    """Refuse an argument of another type; ``call`` is what it was passed to."""
    if not isinstance(value, kind):
        raise InvalidArgument(f"{call} expects a {kind.__name__}, got {type(value).__name__}")


def wrong_arguments(
    error: TypeError,
    method: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> TypeError:
    """Return the error of a call with arguments that a method does not have, or else its own.

    Raises InvalidArgument for ``send(topic, body)``.
    """
    if args and isinstance(args[0], str):
        check_kind(f"{method.__name__}()", args[0], Message)
    try:
        inspect.signature(method).bind(None, *args, **kwargs)
    except TypeError as wrong:
        return TypeError(f"{method.__name__}(): {wrong}")
    return error


def checked_hooks(name: str, hooks: Iterable[T], *methods: str, instead: str = "") -> tuple[T, ...]:
    """Return hooks as a tuple; refuse those that lack one of the methods.

    A hook may have the method ``instead`` of all of them.

    ::

        checked_hooks("hooks", [Count()], "before_send", "after_send")
    """
    expected = f"{name} must be a list of objects with {' and '.join(methods)}"
    expected += f", or with {instead}" if instead else ""
    if not isinstance(hooks, Iterable):
        raise InvalidArgument(f"{expected}, got {hooks!r}")
    found = tuple(hooks)
    for hook in found:
        is_other = bool(instead) and _has(hook, instead)
        if isinstance(hook, type) or not (_has(hook, *methods) or is_other):
            raise InvalidArgument(f"{expected}, got {hook!r} in it")
    return found


def hooks_with(hooks: Iterable[object], *methods: str) -> list[Any]:
    """Return the hooks that have all methods.

    `isinstance` with their protocol does not find methods of proxies and mocks.
    """
    return [hook for hook in hooks if _has(hook, *methods)]


def _has(hook: object, *methods: str) -> bool:
    return all(callable(getattr(hook, method, None)) for method in methods)


def check_listener(listener: object) -> None:
    """Refuse objects that cannot be called with messages and a context."""
    expected = "listener must be a function of (messages, context)"
    if not callable(listener):
        raise InvalidArgument(f"{expected}, got {listener!r}")
    try:
        signature = inspect.signature(listener)
    except (TypeError, ValueError):
        # Functions written in C have none.
        return
    try:
        signature.bind((), None)
    except TypeError:
        name = getattr(listener, "__name__", type(listener).__name__)
        raise InvalidArgument(
            f"{expected}, got {name}{signature}; for one message per call see turbopump.consumer"
        ) from None


def check_subscriptions(subscriptions: object) -> None:
    """Refuse subscriptions that are not a mapping of topics to expressions."""
    if subscriptions is not None and not isinstance(subscriptions, Mapping):
        raise InvalidArgument(
            "subscriptions must be a mapping of topics to expressions, got "
            f'{subscriptions!r}; pass {{"orders": "*"}} for all messages of a topic'
        )


def checked_path(name: str, value: object) -> Path | None:
    """Return a path, which may be a string."""
    if value is not None and (not isinstance(value, Path | str) or not str(value)):
        raise InvalidArgument(f"{name} must be a path, got {value!r}")
    return None if value is None else Path(value)


def check_callable(name: str, value: object, expected: str) -> None:
    """Refuse classes and what cannot be called; ``expected`` describes the parameters."""
    if not callable(value) or isinstance(value, type):
        raise InvalidArgument(f"{name} must be a function of {expected}, got {value!r}")


def joined_addresses(nameserver: object) -> str:
    """Return name server addresses as one string, given as one or separately."""
    if isinstance(nameserver, str):
        return nameserver
    is_list = isinstance(nameserver, list | tuple)
    addresses = cast("list[object]", nameserver) if is_list else [None]
    if not all(isinstance(address, str) for address in addresses):
        raise InvalidArgument(
            f'nameserver must be "host:port;host:port" or a list of addresses, got {nameserver!r}'
        )
    return ";".join(cast("list[str]", addresses))
