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
"""Long enough for a machine that is busy with something else."""

STOP_S = 2.0
"""What is promised; a test may rely on it."""


@contextmanager
def started(home: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run ``turbopump`` with these arguments; what is left of it afterwards is killed."""
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
    """Wait for the line that says that the process is up; return where, by who."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert re.fullmatch(r"ready( \w+=[\w.]+:\d+)+\n", line), (line, process.poll())
    pairs = (word.partition("=") for word in line.split()[1:])
    return {name: address for name, _, address in pairs}
