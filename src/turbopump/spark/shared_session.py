"""One session per process and cluster, for Spark's synchronous callbacks.

Spark calls readers and writers in short-lived calls of long-lived worker processes. The session
outlives the calls, so that tasks need not reconnect; a forked worker starts over.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from turbopump.client.background import LoopThread, background
from turbopump.client.config import ClientConfig
from turbopump.client.session import Session

T = TypeVar("T")


class SharedSession:
    """A running session and the thread that its event loop runs in."""

    def __init__(self, thread: LoopThread, session: Session) -> None:
        self.session = session
        self._thread = thread

    def run(self, work: Callable[[Session], Coroutine[Any, Any, T]]) -> T:
        """Run something with the session on its loop, and return the result."""
        return self._thread.run(work(self.session))


_links: dict[tuple[int, ClientConfig], SharedSession] = {}
_lock = threading.Lock()


def shared_session(config: ClientConfig) -> SharedSession:
    """Return this process's session with a cluster, which lives as long as the process."""
    key = (os.getpid(), config)
    with _lock:
        found = _links.get(key)
        if found is None:
            found = _links[key] = _connected(config)
    return found


def _connected(config: ClientConfig) -> SharedSession:
    thread = background.join()
    shared = SharedSession(thread, Session(config))
    shared.run(lambda session: session.start())
    return shared


def _after_fork() -> None:
    global _lock  # the parent may have held it during the fork
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
