"""Background work that fails once as if it had a bug: it must be reported and restarted."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from typing import Any

from turbopump.testing.listeners import InjectedFailure

_STARTED_AGAIN_S = 45.0
"""Longer than any of the intervals, and the pause after a failure."""


class BrokenWork:
    """One method of a broker or client, called by background work, that raises once."""

    def __init__(
        self,
        owner: object,
        method: str,
        name: str,
        is_running: Callable[[], bool],
        *,
        is_regular: bool = True,
    ) -> None:
        self.name = name
        self._is_running = is_running
        """Whether its process is alive; while that stops, the method is not background work."""
        self._is_regular = is_regular
        """Whether it is called again in any case, not only if there is work to do."""
        self._error = InjectedFailure(f"{name} fails as planned")
        self._is_reported = False
        self._failed_s = math.inf
        self._calls = 0
        """After the failure."""
        self._call: Callable[..., Any] = getattr(owner, method)
        setattr(owner, method, self._broken)

    def _broken(self, *args: Any, **kwargs: Any) -> Any:
        if self._failed_s == math.inf and self._is_running():
            self._failed_s = asyncio.get_running_loop().time()
            raise self._error
        self._calls += 1
        return self._call(*args, **kwargs)

    def heard(self, error: BaseException | None) -> None:
        """Record what was reported."""
        self._is_reported |= error is self._error

    def violations(self, now_s: float) -> Iterator[str]:
        """Return whether it was not reported, or not restarted."""
        if now_s < self._failed_s:
            return
        if not self._is_reported:
            yield f"the failure of {self.name} was not reported"
        is_late = now_s - self._failed_s > _STARTED_AGAIN_S
        if is_late and not self._calls and self._is_regular and self._is_running():
            yield f"{self.name} failed and was not started again"
