"""Invalid settings are named."""

from __future__ import annotations

from typing import Any

import pytest

from turbopump.errors import InvalidArgument
from turbopump.store import FlushConfig, ReadLimits, RetentionConfig, StoreConfig


@pytest.mark.parametrize(
    "changes",
    [
        {"segment_bytes": 0},
        {"queue_segment_units": -1},
        {"index_slots": 0},
        {"index_entries": 1},
        {"record_bytes_max": 0},
        {"open_files_max": 1},
        {"mapped_segments_max": 0},
        {"clean_check_segments": 0},
        {"delay_levels": (-1,)},
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(InvalidArgument, match=name):
        StoreConfig(**changes)


def test_bad_settings_of_parts_are_named() -> None:
    with pytest.raises(InvalidArgument, match="interval_ms"):
        FlushConfig(interval_ms=0)
    with pytest.raises(InvalidArgument, match="dirty_bytes_min"):
        FlushConfig(dirty_bytes_min=-1)
    with pytest.raises(InvalidArgument, match="scan_units_max"):
        ReadLimits(scan_units_max=0)
    with pytest.raises(InvalidArgument, match="delete_hours"):
        RetentionConfig(delete_hours=frozenset({24}))
    with pytest.raises(InvalidArgument, match="disk ratios"):
        RetentionConfig(early_ratio=0.95)
