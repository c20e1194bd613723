"""Continues on the event loop when a job of another thread is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future


def when_done(job: Future[None], on_done: Callable[[Future[None]], None]) -> None:
    """Call a function with a job on the running loop once it is done."""
    loop = asyncio.get_running_loop()

    def notify(done: Future[None]) -> None:
        # A job may end after the broker and its loop: then nothing waits for it.
        if not loop.is_closed():
            loop.call_soon_threadsafe(on_done, done)

    job.add_done_callback(notify)
