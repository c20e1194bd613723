"""Code filters where they are written: functions and sources, and what cannot be sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from turbopump.errors import InvalidArgument, InvalidExpression
from turbopump.filters.code import SOURCE_BYTES_MAX, CodeFilter, source_of
from turbopump.wire.record import MessageView

THRESHOLD = 5


def large(message: MessageView) -> bool:
    def amount(text: bytes) -> int:
        return int(text)

    return amount(message.body) > 100


def matches(message: MessageView) -> bool:
    import json as own

    return bool(own.loads(message.body)["paid"])


def uses_a_module(message: MessageView) -> bool:
    return bool(json.loads(message.body))


def uses_a_constant(message: MessageView) -> bool:
    return any(len(key) > THRESHOLD for key in message.keys)


async def is_async(message: MessageView) -> bool:
    return True


def same(function: Any) -> Any:
    return function


@same
def decorated(message: MessageView) -> bool:
    return True


def of_another(limit: int) -> Callable[[MessageView], bool]:
    def inner(message: MessageView) -> bool:
        return message.queue_id > limit

    return inner


def of_two(message: MessageView, limit: int) -> bool:
    return len(message.body) > limit


def of_none() -> bool:
    return True


def test_a_function_becomes_its_source() -> None:
    made = CodeFilter(large)
    names: dict[str, Any] = {"MessageView": MessageView}
    exec(made.source, names)
    assert names["matches"] is names["large"]
    assert made.name.startswith("large.")
    assert "\nmatches = " not in CodeFilter(matches).source


def test_a_function_inside_another_is_moved_to_the_left() -> None:
    def inner(message: MessageView) -> bool:
        return True

    assert CodeFilter(inner).source.startswith("def inner(")


def test_a_name_stands_for_a_source() -> None:
    one, other = CodeFilter("def matches(m): return True"), CodeFilter("def matches(m): return 1")
    assert one.name != other.name
    assert one == CodeFilter(one.source) != other
    assert hash(one) == hash(CodeFilter(one.source))
    assert source_of(one.name) == one.source.encode()
    assert one.name in repr(one)
    name = other.name
    del other
    with pytest.raises(InvalidArgument, match="no subscription has the code filter"):
        source_of(name)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (lambda message: True, "cannot send a lambda"),
        (is_async, "is_async is async"),
        (of_another(3), "inner uses limit of the function around it"),
        (uses_a_module, "uses_a_module uses json, which is not sent along"),
        (uses_a_constant, "uses_a_constant uses THRESHOLD, which is not sent along"),
        (decorated, "decorated has a decorator"),
        (len, "expects a function, or source that defines matches"),
        (5, "got int"),
        (None, "got NoneType"),
        ("", "must define matches(message)"),
        ("def other(message): return True", "must define matches(message)"),
        ("async def matches(message): return True", "must define matches(message)"),
        ("#" * (SOURCE_BYTES_MAX + 1), f"at most {SOURCE_BYTES_MAX} bytes, got"),
        ("x = '\0'", "null bytes"),
        ("def matches(message): return '\ud800'", "must be valid Unicode"),
        (of_two, "of_two must take one argument, the message: missing a required argument"),
        (of_none, "of_none must take one argument, the message: too many positional"),
    ],
)
def test_functions_that_cannot_be_sent(code: Any, reason: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        CodeFilter(code)
    assert reason in str(raised.value)
    assert "None of" not in str(raised.value)


def test_a_function_without_a_file() -> None:
    names: dict[str, Any] = {}
    exec("def matches(message): return True", names)
    with pytest.raises(InvalidArgument, match="give CodeFilter the source as a text"):
        CodeFilter(names["matches"])


def test_sources_that_are_not_python() -> None:
    with pytest.raises(InvalidExpression, match="line 2 of the filter: expected ':'"):
        CodeFilter("x = 1\ndef matches(message)\n    return True")
