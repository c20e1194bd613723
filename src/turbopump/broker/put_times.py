"""How long writes to the log take, as operators' tools show it."""

from __future__ import annotations

from bisect import bisect_right

_BOUNDS_MS = (1, 10, 50, 100, 200, 500, 1000, 2000, 3000, 4000, 5000, 10_000)
_NAMES = (
    "<=0ms",
    "0~10ms",
    "10~50ms",
    "50~100ms",
    "100~200ms",
    "200~500ms",
    "500ms~1s",
    "1~2s",
    "2~3s",
    "3~4s",
    "4~5s",
    "5~10s",
    "10s~",
)


class PutTimes:
    """Counts writes by the time that each took; writes of one burst take the same."""

    def __init__(self) -> None:
        self._counts = [0] * len(_NAMES)
        self.max_ms = 0

    def note(self, elapsed_ms: int, writes: int) -> None:
        """Count writes that were made together."""
        self._counts[bisect_right(_BOUNDS_MS, elapsed_ms)] += writes
        self.max_ms = max(self.max_ms, elapsed_ms)

    def __str__(self) -> str:
        return "".join(
            f"[{name}]:{count} " for name, count in zip(_NAMES, self._counts, strict=True)
        )
