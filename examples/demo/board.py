"""What has happened so far: counted by everybody, shown live, sampled for the plot."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

LIVE = ("sent", "shipped", "billed", "archived")
"""What the live view and the plot show; all of them end at the number of orders."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The counts at a moment, and how far each group was behind."""

    seconds: float
    counts: Mapping[str, int]
    lags: Mapping[str, int]


class Board:
    """Counts, and samples of them; every thread may use it."""

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
        """Return when a count has been reached; raises TimeoutError with how far it came."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._counts[name] >= number, timeout_s):
                raise TimeoutError(
                    f"{name}: {self._counts[name]:,} of {number:,} after {timeout_s:g} s"
                )

    def sample(self, lags: Mapping[str, int]) -> None:
        with self._changed:
            self.samples.append(Sample(self.seconds, dict(self._counts), lags))
