"""Server processes, as users start them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DEADLINE_S = 20.0
"""Long enough for a busy machine."""

STOP_S = 2.0
"""A documented guarantee, which tests may rely on."""


@contextmanager
def started(home: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run ``turbopump`` with these arguments; processes left at the end are killed."""
    with subprocess.Popen(
        [sys.executable, "-m", "turbopump", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HOME": str(home)},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ready_addresses(process: subprocess.Popen[str]) -> dict[str, str]:
    """Wait for the line that reports readiness; return the addresses by server."""
    assert process.stdout is not None
    line = process.stdout.readline()
    ready = re.fullmatch(r"ready(( \w+=[\w.]+:\d+)+) core=(plain|compiled)\n", line)
    assert ready is not None, (line, process.poll())
    pairs = (word.partition("=") for word in ready[1].split())
    return {name: address for name, _, address in pairs}
