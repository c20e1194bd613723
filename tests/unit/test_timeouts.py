"""Timeouts in tasks that are being cancelled, on any version of Python."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

import pytest

from turbopump.testing import virtual_time
from turbopump.timeouts import CorrectedTimeout, timeout

Limit = Callable[[float | None], AbstractAsyncContextManager[Any]]

each_kind = pytest.mark.parametrize("limit", [timeout, CorrectedTimeout], ids=["own", "corrected"])


async def held(seconds: float, limit: Limit) -> None:
    async with limit(seconds):
        await asyncio.sleep(3600)


@each_kind
@virtual_time()
async def test_what_takes_too_long(limit: Limit) -> None:
    with pytest.raises(TimeoutError):
        await held(1, limit)
    async with limit(1):
        await asyncio.sleep(0.5)
    async with limit(None):
        await asyncio.sleep(5)


@each_kind
@virtual_time()
async def test_a_task_that_closes_after_it_was_cancelled(limit: Limit) -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            with suppress(TimeoutError):
                await held(1, limit)
            ended.append("closed")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["closed"]


@each_kind
@virtual_time()
async def test_cancelled_while_it_waits(limit: Limit) -> None:
    task = asyncio.create_task(held(10, limit))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
