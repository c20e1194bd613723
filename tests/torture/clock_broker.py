"""``turbopump`` with a wall clock that can be set: ``python -m torture.clock_broker broker …``.

The file named by the variable ``TORTURE_CLOCK`` holds milliseconds, which are added to the time of
day. Durations are unaffected, as when a machine's clock is set.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

from turbopump.cli import main
from turbopump.clock import SystemClock

VARIABLE = "TORTURE_CLOCK"
_OFFSET = struct.Struct("<q")


def jump(path: Path, offset_ms: int) -> None:
    """Set the clock of the process that reads this file."""
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(_OFFSET.pack(offset_ms))


def follow(path: Path) -> None:
    """Make this process's time of day follow a file."""
    with path.open("rb") as file:
        offset = mmap.mmap(file.fileno(), _OFFSET.size, access=mmap.ACCESS_READ)

    def now_ms(clock: SystemClock) -> int:
        shift: int = _OFFSET.unpack_from(offset)[0]
        return time.time_ns() // 1_000_000 + shift

    SystemClock.now_ms = now_ms  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    follow(Path(os.environ[VARIABLE]))
    main()
