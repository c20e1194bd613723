"""How a slave handles what its master sends: compare both logs, then copy.

A master that lost its last messages and wrote others sends bytes that do not continue the slave's
log. The protocol has no check for that, so a slave requests bytes that it already has, and
compares. This module neither waits nor knows connections: `Copying.take` returns the next step.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TypeAlias

from msgspec import Struct

from turbopump.broker.replication.frames import Transfer
from turbopump.broker.replication.master import EVERYTHING
from turbopump.errors import FrameError
from turbopump.message import PhysicalOffset
from turbopump.store.store import Store

COMPARED_BYTES = 64 * 1024
"""How much of the end of the log is compared; more each time that nothing matches."""

_GROWTH = 16


class Copied(Struct, frozen=True):
    """Bytes that are stored, or will be when the future is done."""

    durable: Future[None]


class Diverged(Struct, frozen=True):
    """The master's log differs from a position on, or ends there."""

    position: PhysicalOffset
    master_ends: bool


class CompareMore(Struct, frozen=True):
    """Nothing matches that was compared: reconnect and begin earlier."""

    compared_bytes: int
    end: PhysicalOffset
    """Upper bound for the end of the master's log."""


class StartOver(Struct, frozen=True):
    """The master's log begins after the end of the slave's."""

    position: PhysicalOffset


class AskForLastFile(Struct, frozen=True):
    """The master has nothing at the beginning of its log and does not say where it begins."""


Step: TypeAlias = Copied | Diverged | CompareMore | StartOver | AskForLastFile


class Copying:
    """The transfer of the log over one connection."""

    def __init__(
        self,
        log: Store,
        compared_bytes: int = COMPARED_BYTES,
        end_max: PhysicalOffset | None = None,
        *,
        last_file_only: bool = False,
    ) -> None:
        self._log = log
        self._compared_bytes = compared_bytes
        self._end = log.written_end
        """Position up to which the slave's log is compared."""
        self._first = log.min_offset
        self._is_empty = self._end == self._first
        if self._is_empty:
            is_new = not self._end
            wanted = PhysicalOffset(0) if last_file_only else EVERYTHING
            self.request = wanted if is_new else self._end
        else:
            end = self._end if end_max is None else min(end_max, self._end)
            # At least one message: the fillers at the end of files are the same in all logs.
            begin = min(end - compared_bytes, log.last_message() if end_max is None else end)
            self.request = max(PhysicalOffset(begin), self._first, EVERYTHING)
        """The first report: where the master should begin."""
        self._begin = self.request
        self._expected: PhysicalOffset | None = None if self._is_empty else self.request
        self._heartbeats = 0
        self._has_begun = False
        self._both_are_empty = False

    @property
    def is_comparing(self) -> bool:
        """Whether the slave's log is not yet known to agree with the master's."""
        if self._expected is None:
            return not self._both_are_empty
        return self._expected < self._end

    def take(self, transfer: Transfer) -> Step | None:
        """Compare or copy what the master sent; raises FrameError for invalid data.

        Returns the next step, None if there is nothing to do.
        """
        position, data = transfer.position, transfer.data
        if self._expected is None:
            return self._begin_empty(position, data)
        if position != self._expected:
            step = self._elsewhere(position)
            if step is not None:
                return step
        self._has_begun = True
        if not data:
            return self._heartbeat(position)
        self._heartbeats = 0
        same = self._same_bytes(position, data)
        if position + same < self._end and same < len(data):
            return self._differs(PhysicalOffset(position + same), master_ends=False)
        self._expected = PhysicalOffset(position + len(data))
        if same == len(data):
            return None
        return Copied(self._log.append_raw(PhysicalOffset(position + same), data[same:]))

    def _begin_empty(self, position: PhysicalOffset, data: memoryview) -> Step | None:
        """Begin a log wherever the master does."""
        if not data:
            self._heartbeats += 1
            self._both_are_empty = position == self._end
            stuck = position == self.request == EVERYTHING and self._heartbeats > 1
            return AskForLastFile() if stuck else None
        start: bytes | memoryview = data
        at = position
        if position == self.request == EVERYTHING:
            # Apache RocketMQ's master begins exactly where it is asked to. What is missing is the
            # highest byte of the first message's size, which is below 16 MiB.
            start, at = bytes(1) + bytes(data), PhysicalOffset(0)
        elif self._end and position != self._end:
            return StartOver(position)
        self._end = at
        self._expected = PhysicalOffset(position + len(data))
        return Copied(self._log.append_raw(at, start))

    def _elsewhere(self, position: PhysicalOffset) -> Step | None:
        """Judge a master that does not begin where requested; None if that is acceptable.

        Apache RocketMQ's masters never do so.
        """
        if self._has_begun:
            raise FrameError(f"bytes for position {position}, expected {self._expected}")
        if position > self._end:
            return StartOver(position)
        if position < self.request and position != self._first:
            # Where its log ends.
            return self._differs(position, master_ends=True)
        # Where its log begins.
        self._begin = self._expected = position
        return None

    def _heartbeat(self, position: PhysicalOffset) -> Step | None:
        if not self.is_comparing:
            return None
        # The first may come although there is more to send, the second does not.
        self._heartbeats += 1
        return None if self._heartbeats < 2 else self._differs(position, master_ends=True)

    def _differs(self, position: PhysicalOffset, *, master_ends: bool) -> Step:
        """Decide whether the logs are known to differ from here, or may differ earlier."""
        agreed = position - self._begin
        begins_with_log = self.request <= max(self._first, EVERYTHING)
        if agreed >= self._compared_bytes // 2 or begins_with_log:
            return Diverged(position, master_ends)
        return CompareMore(self._compared_bytes * _GROWTH, position)

    def _same_bytes(self, position: PhysicalOffset, data: memoryview) -> int:
        """Return how many bytes agree with the slave's log, which may end before they do."""
        same = 0
        while same < len(data) and position + same < self._end:
            size_max = min(len(data) - same, self._end - position - same)
            own = self._log.raw(PhysicalOffset(position + same), size_max)
            if own is None:
                # Deleted meanwhile, as the oldest files are.
                raise FrameError(f"this slave's log has no bytes at {position + same}")
            sent = data[same : same + len(own)]
            if own != sent:
                return same + first_difference(own, sent)
            same += len(own)
        return same


def first_difference(one: memoryview, other: memoryview) -> int:
    """Return where two views of the same size differ first."""
    low, high = 0, len(one)
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
