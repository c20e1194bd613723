"""What a test run on several processors reports about failures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
SENT = """
import json

def pytest_runtest_logreport(report):
    json.dumps(report._to_json(), default=str, ensure_ascii=False).encode()
"""
"""Serializes reports, as they are sent from one process to another."""

TESTS = r"""
def test_that_fails():
    assert "x\udc80" == "y"

def test_that_passes():
    print("x\udc80")
"""


@pytest.mark.slow
def test_a_failure_with_invalid_unicode_is_shown(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text() + SENT)
    (tmp_path / "test_it.py").write_text(TESTS)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_it.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 failed, 1 passed" in ran.stdout, ran.stdout + ran.stderr
    assert r"x\udc80" in ran.stdout
