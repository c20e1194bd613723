"""For all tests."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Generator

import pytest
from hypothesis import settings

# In the background, a shell lets its children ignore Ctrl-C, and theirs too; some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says more about what else the machine does than about the code.
settings.register_profile("untimed", settings(), deadline=None)
settings.register_profile("quick", settings(), deadline=None, max_examples=20)
settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let the garbage collector pass over the modules and tests: they stay until the end.

    Some tests, and each simulation, collect all garbage; this would take longer than the rest.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let reports pass between processes, which takes proper Unicode: some tests have other."""
    report = yield
    report.sections = [(name, _proper(text)) for name, text in report.sections]
    failure = str(report.longrepr)
    if failure != _proper(failure):
        report.longrepr = _proper(failure)
    return report


@pytest.fixture(scope="module", autouse=True)
def no_sessions_left_behind() -> Generator[None]:
    """Close what Spark's callbacks opened in this process: it would log into later tests."""
    yield
    if shared := sys.modules.get("turbopump.spark.shared_session"):
        shared.close_shared_sessions()


def _proper(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
