"""Retention: which of the oldest segments to delete, by age and disk usage.

Segments are deleted one by one; disk usage is checked after each.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from turbopump.clock import Clock, local_time
from turbopump.machine.files import Files
from turbopump.message import PhysicalOffset
from turbopump.store.commit_log import CommitLog
from turbopump.store.config import RetentionConfig
from turbopump.store.directory import StoreDirectory
from turbopump.store.health import Health
from turbopump.store.key_index import KeyIndex
from turbopump.store.queues import Queues
from turbopump.store.steady_clock import SteadyClock

_log = logging.getLogger(__name__)


class Verdict(Struct, frozen=True):
    """What a retention run did."""

    segments: int
    """How many of the oldest segments it deleted."""
    full: bool
    """Whether the disk is so full that messages are refused."""


class _Deleted(Struct, frozen=True):
    """A deleted segment."""

    path: Path
    start: int
    end: int
    first_ms: int
    last_ms: int
    """When its first message was stored, and the first one after it; 0 if unknown."""
    used_ratio: float


@dataclass(eq=False)
class Retention:
    """Deletes the oldest segments of a store, and what follows them."""

    config: RetentionConfig
    clock: Clock
    steady_clock: SteadyClock
    files: Files
    directory: StoreDirectory
    log: CommitLog
    queues: Queues
    index: KeyIndex | None
    health: Health

    def __post_init__(self) -> None:
        # Queues may be on a different disk than the log; deleting segments would not help there.
        self._disks = (self.directory.commit_log, self.directory.root)
        self._to_follow = False
        self._first_ms: dict[int, int] = {}
        """When the first message of each complete file was stored."""

    def run(self, end: PhysicalOffset, *, at_any_hour: bool) -> Verdict:
        """Delete eligible segments before a position; return how many, and if the disk is full.

        Those that are deleted before their time, because the disk is full, are logged.
        """
        ages_ms = self._ages_ms(end)
        deleted, early = 0, list[_Deleted]()
        try:
            for age_ms in ages_ms[: self.config.segments_per_run_max]:
                used, now_ms = self.files.used_ratio(self._disks[0]), self.clock.now_ms()
                if not is_due(self.config, age_ms, now_ms, used, at_any_hour=at_any_hour):
                    break
                is_early = age_ms < self.config.reserved_ms
                segment = self._describe_first(used) if is_early else None
                self._first_ms.pop(self.log.starts[0], None)
                self.log.drop_first()
                if segment is not None:
                    early.append(segment)
                deleted += 1
                self._to_follow = True
        finally:
            # Even if one could not be deleted: queues must not point to deleted segments.
            if early:
                self._report(early)
            full = self.refuse_if_full()
            self._follow_deletion()
        return Verdict(deleted, full)

    def _describe_first(self, used_ratio: float) -> _Deleted:
        """Describe the oldest segment, which is about to be deleted."""
        start, following = self.log.starts[:2]
        return _Deleted(
            self.log.path(start),
            start,
            following,
            self._stored_ms(start),
            self._stored_ms(following),
            used_ratio,
        )

    def _report(self, early: Sequence[_Deleted]) -> None:
        first, last = early[0], early[-1]
        times = [
            "unknown" if not ms else local_time(ms).isoformat(timespec="milliseconds")
            for ms in (first.first_ms, last.last_ms)
        ]
        _log.warning(
            "%.0f%% of the disk is used: %d log files were deleted before their time, %s to %s,"
            " positions %d to %d, messages stored from %s to %s",
            first.used_ratio * 100,
            len(early),
            first.path,
            last.path.name,
            first.start,
            last.end,
            *times,
        )

    def refuse_if_full(self) -> bool:
        """Refuse messages while the disk is too full; return whether it is."""
        used = max(self.files.used_ratio(disk) for disk in self._disks)
        full = used > self.config.full_ratio
        self.health.disk_is_full(used if full else None)
        return full

    def _ages_ms(self, end: PhysicalOffset) -> list[int]:
        """Return the age of the last message of each flushed segment before a position."""
        end = min(self.log.flushed, end)
        ages_ms: list[int] = []
        age_ms = 0
        for following in reversed(self.log.starts[1:]):
            # The first message of the next segment: practically the same timestamp, and quickly
            # found. Without one, as in blank files, which replace lost ones, the file counts as
            # young as the next.
            timestamp_ms = self._stored_ms(following)
            if timestamp_ms:
                stored_ms = self.steady_clock.stored_ms(PhysicalOffset(following), timestamp_ms)
                age_ms = self.steady_clock.now_ms() - stored_ms
            if following <= end:
                ages_ms.append(age_ms)
        return ages_ms[::-1]

    def _stored_ms(self, start: int) -> int:
        """Return when the first message of a file was stored; 0 if that is unknown."""
        known_ms = self._first_ms.get(start, 0)
        if known_ms:
            return known_ms
        try:
            stored_ms = self.log.read_first_store_timestamp_ms(start)
        except OSError:
            # Damaged, or deleted by someone else: no reason to let the disk fill up.
            return 0
        if start + self.log.segment_bytes <= self.log.flushed:
            self._first_ms[start] = stored_ms
        return stored_ms

    def _follow_deletion(self) -> None:
        """Make all queues and the index follow, even if one fails: that one retries later."""
        if not self._to_follow:
            return
        log_min = self.log.min_offset
        failure: OSError | None = None
        followers = [queue.raise_minimum for queue in self.queues]
        if self.index is not None:
            followers.append(self.index.drop_before)
        for follow in followers:
            try:
                follow(log_min)
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure
        self._to_follow = False


def is_due(
    config: RetentionConfig, age_ms: int, now_ms: int, used_ratio: float, *, at_any_hour: bool
) -> bool:
    """Whether to delete the oldest segment, given the age of its newest message.

    ``now_ms`` is wall clock time. ``at_any_hour`` is for operators who do not want to wait.
    """
    is_hour = at_any_hour or local_time(now_ms).hour in config.delete_hours
    if age_ms >= config.reserved_ms and (is_hour or used_ratio > config.early_ratio):
        return True
    # Whatever its age; the disk is checked again after each.
    return used_ratio > config.forced_ratio
