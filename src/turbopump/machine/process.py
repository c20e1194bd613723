"""The process that a server or client lives in, and the machine's memory."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

_process_id = os.getpid()


def process_id() -> int:
    """Return the id of this process; a forked child has another one."""
    # Cached: clients ask before each request, and a system call each time is measurable.
    return _process_id


def _note_process_id() -> None:
    global _process_id
    _process_id = os.getpid()


os.register_at_fork(after_in_child=_note_process_id)


def environment(name: str) -> str:
    """Return an environment variable; empty if it is not set."""
    return os.environ.get(name, "")


def memory_bytes() -> int:
    """Return how much memory the machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def processors() -> int:
    """Return how many processors the machine has."""
    return os.cpu_count() or 1


def after_fork(action: Callable[[], None]) -> None:
    """Call a function in every forked child."""
    os.register_at_fork(after_in_child=action)


def start_thread(
    action: Callable[[], object], name: str, *, is_daemon: bool = True
) -> threading.Thread:
    """Start a thread; a daemon thread does not keep the process alive."""
    thread = threading.Thread(target=action, name=name, daemon=is_daemon)
    thread.start()
    return thread


def open_standard_streams() -> None:
    """Open the null device in place of standard streams that are closed, as after ``<&-``.

    Sockets would get their numbers, and libuv aborts the process when it closes one of these.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def drop_output() -> None:
    """Keep Python from flushing broken standard output at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
