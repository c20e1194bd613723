"""What has happened so far: counted by all threads, shown live, sampled for the plot."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

LIVE = ("sent", "shipping", "billing", "analytics")
"""The counts in the live view and the plot: sent orders, and those each group has consumed."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The counts at one time, and the lag of each group."""

    seconds: float
    counts: Mapping[str, int]
    lags: Mapping[str, int]


class Board:
    """Counts, and samples of them; safe to use from every thread."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._started = time.perf_counter()
        self.samples: list[Sample] = []

    def add(self, name: str, number: int = 1) -> None:
        with self._changed:
            self._counts[name] += number
            self._changed.notify_all()

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def wait_for(self, name: str, number: int, timeout_s: float) -> None:
        """Return when a count is reached; raises TimeoutError with the count so far."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._counts[name] >= number, timeout_s):
                raise TimeoutError(
                    f"{name}: {self._counts[name]:,} of {number:,} after {timeout_s:g} s"
                )

    def sample(self, lags: Mapping[str, int]) -> None:
        with self._changed:
            self.samples.append(Sample(self.seconds, dict(self._counts), lags))
