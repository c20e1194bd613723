"""The short form of ``scripts/torture``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent.parent
DEADLINE_S = 300.0
"""Much longer than it takes, except on a busy machine."""


def torture(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torture", "--json", "--dir", str(directory / "run"), *options],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


@pytest.mark.parametrize(
    ("kind", "minutes"), [("kill-async", "0.3"), ("damage", "0.2"), ("exit-without-close", "0.1")]
)
def test_guarantees_hold(tmp_path: Path, kind: str, minutes: str) -> None:
    run = torture(tmp_path, "--minutes", minutes, "--seed", "46", "--only", kind)
    assert run.returncode == 0, run.stderr
    [row] = json.loads(run.stdout)["rows"]
    assert row["acknowledged"] > 0
    assert row["lost"] == 0


def test_an_unknown_kind_is_named(tmp_path: Path) -> None:
    run = torture(tmp_path, "--only", "kill,typhoon")
    assert run.returncode == 2
    assert "typhoon" in run.stderr
