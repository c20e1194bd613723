"""The demo, as a new user runs it, but with fewer orders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PNG = b"\x89PNG\r\n"


def run_demo(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "demo", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT / "examples")},
        check=False,
    )


def test_demo_shows_that_everything_holds(tmp_path: Path) -> None:
    mine = tmp_path / "demo-output" / "mine"
    mine.parent.mkdir()
    mine.write_text("not the demo's")
    done = run_demo(tmp_path, "--orders", "1000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all of it holds" in done.stdout
    assert "✗" not in done.stdout
    assert (mine.parent / "throughput-and-lag.png").read_bytes().startswith(PNG)
    assert list((mine.parent / "orders").glob("country=*/*.parquet"))
    assert mine.read_text() == "not the demo's"
    assert "Traceback" not in done.stderr, done.stderr


def test_too_few_orders_are_refused(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--orders", "7")
    assert done.returncode == 2
    assert "from 250 on" in done.stderr
    assert not list(tmp_path.iterdir())
