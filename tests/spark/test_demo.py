"""The demo, as a new user runs it, but with fewer orders."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from turbopump.admin import Admin

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "examples")}

PNG = b"\x89PNG\r\n"


def test_demo_checks_every_number_and_leaves_the_cluster_running(tmp_path: Path) -> None:
    mine = tmp_path / "demo-output" / "mine"
    mine.parent.mkdir()
    mine.write_text("not the demo's")
    command = [sys.executable, "-m", "demo", "--orders", "1000", "--stay"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as demo:
        try:
            assert demo.stdout is not None
            printed = ""
            for line in demo.stdout:
                printed += line
                if "Ctrl-C" in line:
                    break
            assert "All checks passed" in printed, printed
            assert "✗" not in printed
            (nameserver,) = re.findall(r"The cluster is running: name server (\S+),", printed)
            with Admin(nameserver) as admin:
                assert admin.topics.status("orders").messages == 1000
            demo.send_signal(signal.SIGINT)
            assert demo.wait(timeout=60) == 0
        finally:
            demo.terminate()
    assert (mine.parent / "throughput-and-lag.png").read_bytes().startswith(PNG)
    assert list((mine.parent / "orders").glob("country=*/*.parquet"))
    assert mine.read_text() == "not the demo's"


def test_too_few_orders_are_rejected(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "demo", "--orders", "7"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 2
    assert "expected a number of at least 250, got '7'" in done.stderr
    assert not list(tmp_path.iterdir())
