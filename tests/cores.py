"""Both versions of the core, and input for tests that demand equal results of them.

``TURBOPUMP_SANITIZED_CORE`` names the library of a sanitized build, which is then the compiled one.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import pytest
from hypothesis import strategies as st

from turbopump.core import reference

SANITIZED = "TURBOPUMP_SANITIZED_CORE"


def _compiled() -> Any:
    path = os.environ.get(SANITIZED)
    if path is not None:
        spec = spec_from_file_location("turbopump.core.compiled", path)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    try:
        return import_module("turbopump.core.compiled")
    except ImportError:
        return None


compiled = _compiled()
VERSIONS: list[Any] = [reference] if compiled is None else [reference, compiled]


def both() -> tuple[Any, Any]:
    """Return the plain core and the compiled one; skips the test if that is not built."""
    if compiled is None:
        pytest.skip("the compiled core is not built")
    return reference, compiled


needs_both = pytest.mark.skipif(compiled is None, reason="the compiled core is not built")


# --- results --------------------------------------------------------------------------------------


def outcome(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Return what a call returns, or its error's type, text and position."""
    try:
        return function(*arguments, **named)
    except Exception as error:  # noqa: BLE001 - it is the result
        return type(error).__name__, str(error), getattr(error, "position", None)


def values(frame: Any) -> dict[str, Any]:
    """Return a frame's attributes by name; those of the plain version name all there are."""
    kind = getattr(reference, type(frame).__name__)
    found = {name: getattr(frame, name) for name in kind.__struct_fields__}
    return {"type": type(frame).__name__, "body type": type(frame.body), **found}


def attributes(found: Any) -> Any:
    """Return the attributes of a record, with their types, or of those in a tuple or list."""
    if isinstance(found, tuple | list):
        return [attributes(each) for each in found]
    kind = getattr(reference, type(found).__name__, None)
    if isinstance(found, Exception):
        return outcome(_raise, found)
    if kind is None:
        return found
    names = [name for name in kind.__slots__ if not name.startswith("_")]
    return [(name, type(getattr(found, name)), getattr(found, name)) for name in names]


def _raise(error: Exception) -> None:
    raise error


# --- input ----------------------------------------------------------------------------------------


def exact(data: bytes) -> memoryview:
    """Return bytes in memory of exactly their size, so that a sanitizer finds reads beyond it."""
    # Copies of arrays have no room to grow, and no zero byte after them.
    return memoryview(array("B", data)[:])


def _part(data: bytes) -> memoryview:
    return memoryview(b"\xda\xa3\x20" + data + b"\xa7\0\0\x01")[3 : 3 + len(data)]


BUFFERS: st.SearchStrategy[Callable[[bytes], Any]] = st.sampled_from(
    [exact, exact, bytes, bytearray, _part]
)
"""The kinds of buffers that the core reads."""

_EXTREMES = [
    value.to_bytes(size, "big")
    for size in (1, 2, 4, 8)
    for value in {2 ** (8 * size - 1) - 1, 2 ** (8 * size - 1), 2 ** (8 * size) - 1, 0, 1, 90, 91}
]
"""Lengths and numbers at their limits, signed and unsigned."""


@st.composite
def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """Draw data as they are, or truncated, or with some bytes changed, removed or inserted."""
    copy = bytearray(data)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(copy)))
        part = draw(st.sampled_from(_EXTREMES) | st.binary(max_size=2))
        change = draw(st.sampled_from("oorit"))
        if change == "o":
            copy[at : at + len(part)] = part[: len(copy) - at]
        elif change == "r":
            del copy[at : at + draw(st.integers(1, 8))]
        elif change == "i":
            copy[at:at] = part
        else:
            del copy[at:]
    return bytes(copy)
