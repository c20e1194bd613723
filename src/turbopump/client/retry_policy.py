"""What follows an exception of a function: a choice by its type. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from turbopump.client.delivery.results import GiveUp, RetryLater
from turbopump.errors import InvalidArgument

OnError = Mapping[type[Exception], RetryLater | GiveUp]
"""What follows exceptions of a type and of its subclasses."""

_EXAMPLE = "on_error={TimeoutError: RetryLater(30), ValueError: GiveUp()}"


class RetryPolicy:
    """Chooses what follows an exception: the entry of the closest of its classes."""

    def __init__(self, on_error: OnError | None) -> None:
        if not isinstance(on_error, Mapping | None):
            raise InvalidArgument(f"on_error must be a dict, got {on_error!r}: write {_EXAMPLE}")
        self._by_type = dict(on_error or {})
        for kind, outcome in self._by_type.items():
            _check_type(kind)
            if not isinstance(outcome, RetryLater | GiveUp):
                raise InvalidArgument(
                    f"on_error[{kind.__name__}] must be RetryLater(...) or GiveUp(), got "
                    f"{outcome!r}: write {_EXAMPLE}"
                )

    def after(self, error: Exception) -> RetryLater | GiveUp | None:
        """Return what is to follow; None for what follows any exception, a growing delay."""
        if isinstance(error, RetryLater | GiveUp):
            # The function has chosen by itself.
            return None
        kinds = type(error).__mro__
        return next((self._by_type[kind] for kind in kinds if kind in self._by_type), None)


def _check_type(kind: object) -> None:
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        raise InvalidArgument(
            f"a key of on_error must be a class of exceptions, got {kind!r}: write {_EXAMPLE}"
        )
    if issubclass(kind, RetryLater | GiveUp):
        raise InvalidArgument(
            f"on_error cannot change {kind.__name__}, which says by itself what follows"
        )
