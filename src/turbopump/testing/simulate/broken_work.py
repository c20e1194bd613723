"""Background work that fails once as if it had a bug: it must be reported, and started again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from turbopump.testing.listeners import InjectedFailure


class BrokenWork:
    """One method of a broker or client, called by background work, that raises once."""

    def __init__(self, owner: object, method: str, name: str, is_due: Callable[[], bool]) -> None:
        self.name = name
        self._is_due = is_due
        """Whether it must have been called again by now: its process is alive, and has cause to."""
        self._error = InjectedFailure(f"{name} fails as planned")
        self._is_reported = False
        self._has_failed = False
        self._calls = 0
        """After the failure."""
        self._call: Callable[..., Any] = getattr(owner, method)
        setattr(owner, method, self._broken)

    def _broken(self, *args: Any, **kwargs: Any) -> Any:
        if not self._has_failed:
            self._has_failed = True
            raise self._error
        self._calls += 1
        return self._call(*args, **kwargs)

    def heard(self, error: BaseException | None) -> None:
        """Note what was reported."""
        self._is_reported |= error is self._error

    def violations(self) -> Iterator[str]:
        """Return whether it was not reported, or not started again."""
        if self._has_failed and not self._is_reported:
            yield f"the failure of {self.name} was not reported"
        if self._has_failed and not self._calls and self._is_due():
            yield f"{self.name} failed and was not started again"
