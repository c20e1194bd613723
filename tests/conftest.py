"""Configuration and fixtures for all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Generator

import pytest
from hypothesis import settings

# Shells make background jobs ignore SIGINT, which children inherit; some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

_MEMORY = "/dev/shm"
_MEMORY_BYTES_MIN = 4 << 30


def _has_room_in_memory() -> bool:
    try:
        disk = os.statvfs(_MEMORY)
    except OSError:
        return False
    # Some tests install and run programs.
    is_usable = os.access(_MEMORY, os.W_OK) and not disk.f_flag & os.ST_NOEXEC
    return is_usable and disk.f_bavail * disk.f_frsize >= _MEMORY_BYTES_MIN


# Thousands of stores would wait for the disk, which proves nothing: a killed process loses nothing
# that it wrote, and power loss is simulated. Child processes use the same place.
if "TMPDIR" not in os.environ and _has_room_in_memory():
    tempfile.tempdir = os.environ["TMPDIR"] = _MEMORY

# An example's duration says more about the machine's load than about the code.
settings.register_profile("untimed", settings(), deadline=None)
settings.register_profile("quick", settings(), deadline=None, max_examples=20)
settings.register_profile("long", settings(), deadline=None)
# Without a database: only new examples, which its seed decides.
settings.register_profile("fuzz", settings(), deadline=None, max_examples=300, database=None)
settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude the modules and tests from garbage collection: they live until the end.

    Some tests, and each simulation, run a full collection, which would dominate their time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make reports valid Unicode, so that they can be sent between processes."""
    report = yield
    report.sections = [(name, _proper(text)) for name, text in report.sections]
    failure = str(report.longrepr)
    if failure != _proper(failure):
        report.longrepr = _proper(failure)
    return report


@pytest.fixture(scope="module", autouse=True)
def no_sessions_left_behind() -> Generator[None]:
    """Close sessions that Spark's callbacks opened here: they would log into later tests."""
    yield
    if shared := sys.modules.get("turbopump.spark.shared_session"):
        shared.close_shared_sessions()


def _proper(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
