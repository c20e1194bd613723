"""Which parts of a range to request, several ahead of the responses: decides, sends nothing.

Offsets of a queue have no gaps, so the second request need not wait for the first response: it asks
where that one will probably end. If it ends elsewhere, because messages are large or a filter
skipped many, the gap is requested, and duplicates are to be cut off.

Only the furthest request asks for more than up to where the next one starts; otherwise messages
would arrive several times once responses reach further than before. The furthest shows that they
do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from msgspec import Struct

ROWS_AHEAD = 4096
"""Maximum messages requested ahead: more would only wait in memory for their turn."""

SHORT_IN_A_ROW = 3
"""Responses that end early before this counts as usual. One large message causes two: one that ends
before it, and one with nothing else."""


class PendingPull(Struct, frozen=True):
    """A request in flight, and the number of its response."""

    offset: int
    limit: int
    answer: int


class Prefetch:
    """The requests in flight for one range, in the order of the queue.

    ``step`` is how far the response before ``start`` reached: the broker decides how many messages
    it returns at a time.
    """

    def __init__(
        self,
        start: int,
        end: int,
        step: int,
        ask: Callable[[int, int], int],
        *,
        count_max: int,
        in_flight_max: int,
        is_filtered: bool = False,
    ) -> None:
        self.at = start
        """Up to where everything has arrived."""
        self.end = end
        self.asked: deque[PendingPull] = deque()
        self._ask_for = ask
        self._count_max = count_max
        self._in_flight_max = in_flight_max
        self._is_filtered = is_filtered
        self._ask_next = start
        self._short: list[int] = []
        self._expect(step)

    def ask(self) -> None:
        """Request the front if nothing covers it, and what follows all requests."""
        if not self.asked:
            self._ask_next = self.at
        elif self.asked[0].offset > self.at:
            self._fill(self.asked[0].offset)
        if len(self.asked) > self._most // 2:
            # Requests sent together cost one write, and one wake-up of the broker.
            return
        self._ask_behind()

    @property
    def is_all_asked(self) -> bool:
        """Whether the last request reaches the end, if it is answered in full."""
        return bool(self.asked) and self.asked[-1].offset + self.asked[-1].limit >= self.end

    def take(self, next_offset: int) -> None:
        """Continue from where the response to the first request leads."""
        asked = self.asked.popleft()
        if next_offset - asked.offset != self._step or self._short:
            self._learn_step(asked, next_offset)
        if next_offset > self.at:
            self.at = min(next_offset, self.end)

    def _learn_step(self, asked: PendingPull, next_offset: int) -> None:
        """Expect the next responses to reach as far as the last ones, including this one."""
        reached = max(1, next_offset - asked.offset)
        is_cut_by_us = asked.limit < self._count_max and reached >= asked.limit
        if self._is_filtered:
            # It varies with what matches: the last response is the best predictor of the next.
            if not is_cut_by_us:
                self._expect(reached)
        elif reached * 4 > self._step * 5:
            self._expect(reached)
        elif reached >= self._step:
            # Leave a small excess to the next request: the step would be too large for others.
            self._short.clear()
        elif not is_cut_by_us:
            self._short.append(reached)
            if len(self._short) == SHORT_IN_A_ROW:
                self._expect(sorted(self._short)[len(self._short) // 2])

    def _expect(self, step: int) -> None:
        self._step = step
        self._most = min(self._in_flight_max, max(2, ROWS_AHEAD // step))
        self._short.clear()

    def _fill(self, end: int) -> None:
        """Request the gap before ``end``, in as many requests as it probably takes."""
        offsets = range(self.at, end, self._step)[: self._in_flight_max]
        for offset in reversed(offsets):
            count = min(self._count_max, end - offset)
            if offset != offsets[-1] and not self._is_filtered:
                count = min(count, self._step)
            self.asked.appendleft(PendingPull(offset, count, self._ask_for(offset, count)))

    def _ask_behind(self) -> None:
        """Request beyond all requests."""
        asked, ask_for, end, step = self.asked, self._ask_for, self.end, self._step
        usual = self._count_max if self._is_filtered else min(self._count_max, step)
        offset = self._ask_next
        for left in range(self._most - len(asked) - 1, -1, -1):
            if offset >= end:
                break
            count = min(usual if left else self._count_max, end - offset)
            asked.append(PendingPull(offset, count, ask_for(offset, count)))
            offset += step
        self._ask_next = offset
