"""Writing files without holding up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class Writer:
    """A thread that writes, one file after the other; made when it is first needed."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nameserver")

    async def write(self, action: Callable[[], None], then: Callable[[], None]) -> None:
        """Write, and call ``then`` if that went well; raises what ``action`` raises.

        Once begun, both happen even if the caller is cancelled: its peer may be gone, but memory
        must not say anything else than the disk.
        """

        def follow(written: asyncio.Future[None]) -> None:
            if not written.cancelled() and written.exception() is None:
                then()

        written = asyncio.get_running_loop().run_in_executor(self._thread, action)
        written.add_done_callback(follow)
        await asyncio.shield(written)

    def close(self) -> None:
        """Wait for what is being written."""
        self._thread.shutdown()
