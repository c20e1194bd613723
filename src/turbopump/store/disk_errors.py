"""Translation of disk errors into the store's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from turbopump.errors import DiskFailed

P = ParamSpec("P")
T = TypeVar("T")


def translate_disk_errors(call: Callable[P, T]) -> Callable[P, T]:
    """Make a method raise `DiskFailed` in place of OSError."""

    @wraps(call)
    def named(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except OSError as error:
            raise DiskFailed(f"the store's files cannot be read or deleted: {error}") from error

    return named
