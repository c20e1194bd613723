"""From the start of a server process to its end."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

import typer

from turbopump.cli.logs import LogSettings, configure_logging
from turbopump.core import CORE_NAME
from turbopump.net.loop import run
from turbopump.settings import data_directory

S = TypeVar("S")

_log = logging.getLogger(__name__)

_GARBAGE_THRESHOLDS = (20_000, 20, 50)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""What GNU's `mallopt` calls M_TRIM_THRESHOLD and M_MMAP_THRESHOLD."""
_KEPT_BYTES_MAX = 64 * 1024 * 1024
_KEPT_PIECE_BYTES_MAX = 4 * 1024 * 1024
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(
    server: AbstractAsyncContextManager[S],
    ready: Callable[[S], str],
    *,
    log: LogSettings = LogSettings(),  # noqa: B008 - frozen
    directory: Path | None = None,
    ends_with_input: bool = False,
) -> None:
    """Run a server until a signal stops it; ``ready`` returns the line that it is up.

    With ``ends_with_input``, the end of standard input stops it too.
    """
    configure_logging(log)
    log_core()
    if directory is not None:
        _log.info("data directory: %s", directory)
        old = Path.home() / "store" / "commitlog"
        if directory == data_directory() / "store" and not directory.exists() and old.is_dir():
            _log.warning(
                "%s has messages and is not used; pass --dir %s to use it", old.parent, Path.home()
            )
    run(_serve(server, ready, ends_with_input=ends_with_input))


def ready_line(**addresses: str) -> str:
    """Return the line that says where to connect, and which core runs; other programs parse it."""
    pairs = {**addresses, "core": CORE_NAME}
    return " ".join(["ready", *(f"{name}={value}" for name, value in pairs.items())])


def log_core() -> None:
    """Log which core runs, and how to get the faster one."""
    if CORE_NAME == "compiled" or os.environ.get("TURBOPUMP_CORE"):
        _log.info("core: %s", CORE_NAME)
    else:
        _log.info(
            "core: %s; for the compiled one, which is faster, install a C compiler and Python's"
            " headers, and install turbopump again",
            CORE_NAME,
        )


async def _serve(
    server: AbstractAsyncContextManager[S], ready: Callable[[S], str], *, ends_with_input: bool
) -> None:
    with _stop_signal() as stop:
        if ends_with_input:
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stop.set)
        async with server as running:
            _collect_garbage_rarely()
            keep_freed_memory()
            typer.echo(ready(running))
            await stop.wait()


def _collect_garbage_rarely() -> None:
    """Exempt objects that live as long as the process, and collect the others less often.

    Requests create no cycles, so collections find almost nothing; the defaults cost a broker a
    tenth of its time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GARBAGE_THRESHOLDS)


def keep_freed_memory() -> bool:
    """Let malloc reuse large blocks instead of returning them to the system; whether it can.

    Frames and batches of some hundred KiB come and go. The kernel clears each page of new memory
    on first use, which takes several times as long as copying into it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):
        # Not the GNU C library, the only one that needs it.
        return False
    mmap, trim = (_MMAP_THRESHOLD, _KEPT_PIECE_BYTES_MAX), (_TRIM_THRESHOLD, _KEPT_BYTES_MAX)
    return all(mallopt(*each) == 1 for each in (mmap, trim))


@contextmanager
def _stop_signal() -> Iterator[asyncio.Event]:
    """Set the event at the first signal; a second one kills the process."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        stop.set()
        forget()

    def forget() -> None:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    finally:
        forget()
