"""Retention: which of the oldest segments may go, decided from ages and the disk's usage.

Segments go one by one, with a look at the disk after each.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from turbopump.clock import Clock
from turbopump.machine.files import Files
from turbopump.message import PhysicalOffset
from turbopump.store.commit_log import CommitLog
from turbopump.store.config import RetentionConfig
from turbopump.store.directory import StoreDirectory
from turbopump.store.health import Health
from turbopump.store.key_index import KeyIndex
from turbopump.store.local_time import local_time
from turbopump.store.queues import Queues
from turbopump.store.steady_clock import SteadyClock


class Verdict(Struct, frozen=True):
    """What a run of retention has to do."""

    segments: int
    """How many of the oldest segments are to be deleted, or have been."""
    full: bool
    """Whether the disk is so full that messages are to be refused."""


class Retention:
    """Deletes the oldest segments of a store, and what follows them."""

    def __init__(
        self,
        config: RetentionConfig,
        clock: Clock,
        steady_clock: SteadyClock,
        files: Files,
        directory: StoreDirectory,
        log: CommitLog,
        queues: Queues,
        index: KeyIndex | None,
        health: Health,
    ) -> None:
        self._config = config
        self._clock = clock
        self._steady_clock = steady_clock
        self._files = files
        # Queues may lie on another disk than the log; deleting segments would not help there.
        self._disks = (directory.commit_log, directory.root)
        self._log = log
        self._queues = queues
        self._index = index
        self._health = health
        self._to_follow = False

    def run(self, dispatched_to: PhysicalOffset, *, at_any_hour: bool) -> Verdict:
        """Delete what may go, one by one; return how many did and whether the disk is full."""
        ages_ms = self._ages_ms(dispatched_to)
        deleted = 0
        try:
            while (
                deleted < min(self._config.segments_per_run_max, len(ages_ms))
                and self._judge(ages_ms[deleted:], at_any_hour).segments
            ):
                self._log.drop_first()
                deleted += 1
                self._to_follow = True
        finally:
            # Also when one could not be deleted: queues must not lead to those that are gone.
            full = self.refuse_if_full()
            self._follow_deletion()
        return Verdict(deleted, full)

    def _judge(self, ages_ms: Sequence[int], at_any_hour: bool) -> Verdict:
        used = self._files.used_ratio(self._disks[0])
        now_ms = self._clock.now_ms()
        return judge(self._config, ages_ms, now_ms, used, at_any_hour=at_any_hour)

    def refuse_if_full(self) -> bool:
        """Have messages refused while too much of the disk is used; return whether it is."""
        used = max(self._files.used_ratio(disk) for disk in self._disks)
        full = used > self._config.full_ratio
        self._health.disk_is_full(used if full else None)
        return full

    def _ages_ms(self, dispatched_to: PhysicalOffset) -> list[int]:
        """Return, for each segment that is complete and on disk, how old its last message is."""
        end = min(self._log.flushed, dispatched_to)
        ages_ms: list[int] = []
        age_ms = 0
        for following in reversed(self._log.starts[1:]):
            # The next one's first message: practically the same moment, and quickly found. Blank
            # files, which stand for lost ones, have none.
            timestamp_ms = self._log.first_store_timestamp_ms(following)
            if timestamp_ms:
                stored_ms = self._steady_clock.stored_ms(PhysicalOffset(following), timestamp_ms)
                age_ms = self._steady_clock.now_ms() - stored_ms
            if following <= end:
                ages_ms.append(age_ms)
        return ages_ms[::-1]

    def _follow_deletion(self) -> None:
        """Have all queues and the index follow, also if one cannot: that one tries again later."""
        if not self._to_follow:
            return
        log_min = self._log.min_offset
        failure: OSError | None = None
        followers = [queue.raise_minimum for queue in self._queues]
        if self._index is not None:
            followers.append(self._index.drop_before)
        for follow in followers:
            try:
                follow(log_min)
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure
        self._to_follow = False


def judge(
    config: RetentionConfig,
    ages_ms: Sequence[int],
    now_ms: int,
    used_ratio: float,
    *,
    at_any_hour: bool = False,
) -> Verdict:
    """Decide, given the age of the newest message of each segment that may be deleted.

    Oldest first, and not of the segment being written. ``now_ms`` is the wall clock's time.
    ``at_any_hour`` is for an operator who does not want to wait.
    """
    expired = 0
    for age_ms in ages_ms:
        if age_ms < config.reserved_ms:
            break
        expired += 1
    due = at_any_hour or _hour(now_ms) in config.delete_hours or used_ratio > config.early_ratio
    count = expired if due else 0
    if used_ratio > config.forced_ratio:
        # However young: but one only, and then look at the disk again.
        count = max(count, min(1, len(ages_ms)))
    return Verdict(min(count, config.segments_per_run_max), used_ratio > config.full_ratio)


def _hour(now_ms: int) -> int:
    # The operator's hours are local ones.
    return local_time(now_ms).hour
