"""Which core runs: TURBOPUMP_CORE chooses, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

NAME = "from turbopump.core import CORE_NAME; print(CORE_NAME)"
HIDDEN = f"import sys; sys.modules['turbopump.core.compiled'] = None; {NAME}"
"""Importing what is None fails, as if it were not installed."""

needs_compiled = pytest.mark.skipif(
    find_spec("turbopump.core.compiled") is None, reason="the compiled core has not been built"
)


def run(core: str | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with TURBOPUMP_CORE set, or without it."""
    environment = {name: text for name, text in os.environ.items() if name != "TURBOPUMP_CORE"}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment if core is None else {**environment, "TURBOPUMP_CORE": core},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("core", "runs"),
    [
        ("plain", "plain"),
        pytest.param("compiled", "compiled", marks=needs_compiled),
        pytest.param("", "compiled", marks=needs_compiled),
        pytest.param(None, "compiled", marks=needs_compiled),
    ],
)
def test_the_environment_chooses(core: str | None, runs: str) -> None:
    assert run(core, "-c", NAME).stdout == f"{runs}\n"


def test_without_the_compiled_core_the_plain_one_runs() -> None:
    assert run(None, "-c", HIDDEN).stdout == "plain\n"
    assert run("plain", "-c", HIDDEN).stdout == "plain\n"


def test_a_compiled_core_that_is_missing_is_an_error_if_it_was_chosen() -> None:
    done = run("compiled", "-c", HIDDEN)
    assert done.returncode == 1
    assert (
        "ImportError: TURBOPUMP_CORE=compiled, but the compiled core cannot be loaded; install a C"
        " compiler and Python's headers, and install turbopump again: "
    ) in done.stderr


def test_another_value_is_an_error() -> None:
    done = run("fast", "-c", NAME)
    assert done.returncode == 1
    assert done.stderr.endswith(
        "InvalidArgument: TURBOPUMP_CORE must be plain or compiled, got 'fast'\n"
    )


def test_the_command_line_reports_errors_in_a_line() -> None:
    done = run("fast", "-m", "turbopump", "--version")
    assert done.returncode == 2
    assert done.stderr == "turbopump: TURBOPUMP_CORE must be plain or compiled, got 'fast'\n"


def test_the_version_says_which_core_runs() -> None:
    assert run("plain", "-m", "turbopump", "--version").stdout.endswith(" (core: plain)\n")
