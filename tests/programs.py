"""Directories of programs, for the PATH of the processes that tests start."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path


def bare_python(folder: Path) -> Path:
    """Return a directory for the PATH whose Python has no packages."""
    venv.create(folder / "bare")
    programs = folder / "bare" / "bin"
    imports = subprocess.run(
        [programs / "python3", "-c", "import msgspec, pyarrow, turbopump"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"]},
    )
    assert "No module named 'msgspec'" in imports.stderr
    version = ".".join(map(str, sys.version_info[:2]))
    if not (programs / f"python{version}").exists():
        (programs / f"python{version}").symlink_to(programs / "python3")
    return programs
