"""Errors that count as bugs: unhandled ones, and logged ones that no fault causes."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from turbopump.errors import RequestTimeout
from turbopump.testing.simulate.error_log import capture_errors, is_bug

FAULT = OSError("the disk said no")


@pytest.mark.parametrize("error", [FAULT, RequestTimeout("no answer"), LookupError("a bug")])
def test_a_task_whose_error_is_never_retrieved_is_a_bug(error: Exception) -> None:
    heard: list[tuple[str, BaseException | None]] = []

    async def fail() -> None:
        raise error

    async def forget() -> None:
        task = asyncio.create_task(fail())
        await asyncio.wait({task})
        del task
        gc.collect()

    with (
        capture_errors(lambda text, error: heard.append((text, error))) as hear,
        asyncio.Runner() as runner,
    ):
        hear(runner.get_loop())
        runner.run(forget())
    [(text, found)] = heard
    assert found is error
    assert is_bug(text, found)


@pytest.mark.parametrize(("error", "expected"), [(FAULT, False), (LookupError("a bug"), True)])
def test_a_logged_error_is_a_bug_unless_a_fault_causes_it(error: Exception, expected: bool) -> None:
    heard: list[bool] = []
    with capture_errors(lambda text, error: heard.append(is_bug(text, error))):
        logging.getLogger("turbopump.store").error("failed", exc_info=error)
    assert heard == [expected]
