"""Options pickled by older versions, as in checkpoints and waiting jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from itertools import zip_longest
from typing import Any, TypeVar

_Kind = TypeVar("_Kind", bound=type)


def restore(value: Any, state: Iterable[object]) -> None:
    """Restore a pickle, possibly of an older version: new fields come last and have defaults."""
    pairs: Iterable[tuple[Any, object]] = zip_longest(fields(value), state, fillvalue=MISSING)
    for field, saved in pairs:
        assert field is not MISSING, "pickled by a newer version"
        object.__setattr__(value, field.name, field.default if saved is MISSING else saved)


def unpickled_by(restore: Callable[[Any, Iterable[object]], None]) -> Callable[[_Kind], _Kind]:
    """Set ``__setstate__`` of a finished dataclass: Python 3.11.2 replaces one in its body."""

    def decorated(kind: _Kind) -> _Kind:
        kind.__setstate__ = restore  # type: ignore[attr-defined]
        return kind

    return decorated
