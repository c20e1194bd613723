"""One session per process and cluster, for Spark's synchronous callbacks.

Spark calls readers and writers in short-lived calls of long-lived worker processes. The session
outlives the calls, so that tasks need not reconnect; a forked worker starts over.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
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

    def close(self) -> None:
        """Close the session, and the thread if no other client uses it."""
        try:
            self.run(lambda session: session.close())
        finally:
            background.leave(self._thread)


_sessions: dict[tuple[int, ClientConfig], SharedSession] = {}
_lock = threading.Lock()


def shared_session(config: ClientConfig) -> SharedSession:
    """Return this process's session with a cluster; open until `close_shared_sessions`."""
    key = (os.getpid(), config)
    with _lock:
        found = _sessions.get(key)
        if found is None:
            found = SharedSession(background.join(), Session(config))
            found.run(lambda session: session.start())
            _sessions[key] = found
    return found


def close_shared_sessions() -> None:
    """Close this process's sessions, for programs that outlive their clusters, such as tests."""
    with _lock:
        own = [_sessions.pop(key) for key in list(_sessions) if key[0] == os.getpid()]
    with ExitStack() as closing:
        for session in own:
            closing.callback(session.close)


def _after_fork() -> None:
    global _lock  # the parent may have held it during the fork
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
