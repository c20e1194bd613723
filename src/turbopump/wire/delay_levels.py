"""Delay levels as in broker configurations: ``1s 5s 10s``, level 1 first."""

from __future__ import annotations

import re

from turbopump.errors import InvalidArgument

DELAY_LEVELS = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
"""The default, unless ``messageDelayLevel`` is set."""

_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_LEVEL = re.compile(r"(\d+)([smhd])")


def parse_delay_levels(text: str) -> tuple[int, ...]:
    """Return the delay of each level, in milliseconds."""
    levels = []
    for part in text.split():
        match = _LEVEL.fullmatch(part)
        if match is None:
            raise InvalidArgument(
                f"delay level must be a number and one of s, m, h, d, got {part!r}"
            )
        levels.append(int(match[1]) * _UNIT_MS[match[2]])
    return tuple(levels)
