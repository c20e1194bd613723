"""Processes that this one has started."""

from __future__ import annotations

import asyncio
import contextlib

from turbopump.timeouts import timeout


async def wait_or_kill(process: asyncio.subprocess.Process, wait_s: float) -> None:
    """Wait until a process that was asked to stop has ended; one that hangs is killed."""
    try:
        async with timeout(wait_s):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
