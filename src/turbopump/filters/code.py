"""Code filters: Python that a filter server runs beside the broker, over whole messages."""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from hashlib import sha256
from types import CodeType, FunctionType
from weakref import WeakValueDictionary

from turbopump.errors import InvalidArgument, InvalidExpression
from turbopump.wire.record import MessageView

SOURCE_BYTES_MAX = 64 * 1024
"""Longest source of a filter in UTF-8: the longest body of a request."""

MATCHES = "matches"
"""The name of the deciding function in the source."""

_DIGEST_CHARS = 16
_BUILTINS = frozenset(dir(builtins))

Matches = Callable[[MessageView], bool]


class CodeFilter:
    """A filter written in Python: a function of a message, or the source that defines ``matches``.

    ::

        def large(message):
            import json

            return json.loads(message.body)["amount"] > 100

        PushConsumer("billing", bill, subscriptions={"orders": CodeFilter(large)})

    Only the source of the function is sent: it must import and define everything inside. Raises
    InvalidArgument if it cannot be sent, InvalidExpression if it is not Python.
    """

    __slots__ = ("_kept", "name", "source")

    def __init__(self, code: str | Matches) -> None:
        if isinstance(code, str):
            self.source, function = code, MATCHES
        else:
            self.source, function = _source_with_matches(code)
        data = _encoded(self.source)
        if len(data) > SOURCE_BYTES_MAX:
            raise InvalidArgument(
                f"the source of a filter must be at most {SOURCE_BYTES_MAX} bytes, got {len(data)}"
            )
        _require_matches(self.source)
        self.name = f"{function}.{sha256(data).hexdigest()[:_DIGEST_CHARS]}"
        """Differs for different sources: members that disagree do not filter for each other."""
        self._kept = _BY_NAME.setdefault(self.name, _Source(self.source))

    def __repr__(self) -> str:
        return f"<CodeFilter {self.name}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CodeFilter) and other.source == self.source

    def __hash__(self) -> int:
        return hash(self.source)


def _encoded(source: str) -> bytes:
    try:
        return source.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"the filter's source must be valid Unicode: {error}") from error


class _Source:
    """A source shared by all filters of one name, while one of them exists."""

    __slots__ = ("__weakref__", "text")

    def __init__(self, text: str) -> None:
        self.text = text


_BY_NAME: WeakValueDictionary[str, _Source] = WeakValueDictionary()
"""A subscription has only the name of its filter; the name stands for one source."""


def source_of(name: str) -> bytes:
    """Return the source of the filter of a name, which its subscriber still holds."""
    found = _BY_NAME.get(name)
    if found is None:
        raise InvalidArgument(f"no subscription has the code filter {name!r} any more")
    return found.text.encode()


def _source_with_matches(function: object) -> tuple[str, str]:
    """Return a source that defines ``matches``, and the function's own name."""
    if not isinstance(function, FunctionType):
        raise InvalidArgument(
            f"CodeFilter expects a function, or source that defines {MATCHES}(message),"
            f" got {type(function).__name__}"
        )
    name = function.__name__
    if name == "<lambda>":
        raise InvalidArgument("CodeFilter cannot send a lambda: write it as a function with def")
    if inspect.iscoroutinefunction(function):
        raise InvalidArgument(f"{name} is async: a filter is a plain function")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise InvalidArgument(f"{name} must take one argument, the message: {error}") from error
    if function.__closure__:
        free = ", ".join(function.__code__.co_freevars)
        raise InvalidArgument(f"{name} uses {free} of the function around it: define it inside")
    outside = sorted(set(_globals_of(function.__code__)) - _BUILTINS - {name})
    if outside:
        raise InvalidArgument(
            f"{name} uses {', '.join(outside)}, which is not sent along: import or define it"
            " inside the function"
        )
    advice = "give CodeFilter the source as a text"
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise InvalidArgument(
            f"the source of {name} cannot be found ({error}): {advice}"
        ) from error
    # Since Python 3.13, a function made by exec() may get the lines of `python -c` instead.
    if not re.match(rf"@|def\s+{name}\b", source):
        raise InvalidArgument(f"the source found for {name} does not begin with its def: {advice}")
    if source.startswith("@"):
        raise InvalidArgument(f"{name} has a decorator, which is not sent along: remove it")
    return (source if name == MATCHES else f"{source}\n\n{MATCHES} = {name}\n"), name


def _globals_of(code: CodeType) -> Iterator[str]:
    """Return the names that a function looks up outside, including those of nested functions."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_of(constant)


def _require_matches(source: str) -> None:
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        place = "" if error.lineno is None else f"line {error.lineno} of "
        reason = f"{place}the filter: {error.msg}"
        raise InvalidExpression(reason, max(0, (error.offset or 1) - 1)) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise InvalidArgument(f"the filter's source cannot be read: {error}") from error
    for statement in tree.body:
        match statement:
            case ast.FunctionDef(name="matches"):
                return
            case ast.Assign(targets=[ast.Name(id="matches")]):
                return
    raise InvalidArgument(f"the filter's source must define {MATCHES}(message) at its top level")
