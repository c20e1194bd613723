"""Retention: which of the oldest segments may go, decided from ages and the disk's usage."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from msgspec import Struct

from turbopump.store.config import RetentionConfig


class Verdict(Struct, frozen=True):
    """What a run of retention has to do."""

    segments: int
    """How many of the oldest segments are to be deleted."""
    full: bool
    """Whether the disk is so full that messages are to be refused."""


def judge(
    config: RetentionConfig,
    newest_ms: Sequence[int],
    now_ms: int,
    used_ratio: float,
    *,
    at_any_hour: bool = False,
) -> Verdict:
    """Decide, given the store time of the newest message of each segment that may be deleted.

    Oldest first, and not of the segment being written. ``at_any_hour`` is for an operator who does
    not want to wait.
    """
    expired = 0
    for newest in newest_ms:
        if now_ms - newest < config.reserved_ms:
            break
        expired += 1
    due = at_any_hour or _hour(now_ms) in config.delete_hours or used_ratio > config.early_ratio
    count = expired if due else 0
    if used_ratio > config.forced_ratio:
        # One run frees what it may; the next one looks at the disk again.
        count = len(newest_ms)
    return Verdict(min(count, config.segments_per_run_max), used_ratio > config.full_ratio)


def _hour(now_ms: int) -> int:
    # The operator's hours are local ones.
    return datetime.datetime.fromtimestamp(now_ms / 1000).astimezone().hour
