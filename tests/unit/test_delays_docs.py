"""The table of delay levels shows the levels and when retries use them."""

from __future__ import annotations

import re
from pathlib import Path

from turbopump import Listening
from turbopump.broker.retries import FIRST_RETRY_LEVEL
from turbopump.wire.delay_levels import DELAY_LEVELS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "delays.md"


def test_levels_and_the_attempts_that_wait_for_them() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) (s|min|h) \| (\d*) ?\|$", PAGE.read_text(), re.MULTILINE)
    delays = " ".join(f"{number}{unit[0]}" for _, number, unit, _ in rows)
    assert delays == DELAY_LEVELS
    attempts = {int(level): int(attempt) for level, _, _, attempt in rows if attempt}
    levels = range(FIRST_RETRY_LEVEL, len(rows) + 1)
    # The first attempt is not delayed.
    assert attempts == {level: level - FIRST_RETRY_LEVEL + 2 for level in levels}


def test_a_listener_that_takes_too_long() -> None:
    minutes = Listening().timeout_ms // 60_000
    assert f"longer than {minutes} minutes (`Listening.timeout`)" in PAGE.read_text()
