"""A request that a thread waits for, and that an event loop sends together with others."""

from __future__ import annotations

import threading
from collections.abc import Callable

from turbopump.net.request_protocol import Request
from turbopump.wire.command import Command, Response

Outcome = Response | Exception

UNHEARD = Command(0)
"""Stands for the answer if no thread waits for it."""


class ThreadRequest:
    """Waits for an answer on a connection of an event loop as a future does, but without a task.

    A thread creates it and waits until ``finished`` is released, which costs a fraction of a
    `concurrent.futures.Future`. The rest belongs to the loop.
    """

    __slots__ = ("finished", "on_answer", "outcome", "request", "timeout_ms")

    def __init__(self, request: Request, timeout_ms: int) -> None:
        self.request = request
        self.timeout_ms = timeout_ms
        self.finished = threading.Lock()
        self.finished.acquire()
        self.outcome: Outcome | None = None
        """None if it has to be sent in another way."""
        self.on_answer: Callable[[ThreadRequest, Response | None], Outcome] | None = None
        """Set while it is in flight: turns an answer, or that there is none, into the outcome."""

    def done(self) -> bool:
        return self.on_answer is None

    def set_result(self, answer: Response | None) -> None:
        """Take the answer, None if there will be none, and wake the thread."""
        on_answer, self.on_answer = self.on_answer, None
        if on_answer is not None:
            self.finish(on_answer(self, answer))

    def give_up(self) -> None:
        """Stop waiting: no answer came in time."""
        self.set_result(None)

    def abandon(self) -> None:
        """Stop waiting: the thread has abandoned the request."""
        self.set_result(UNHEARD)

    def finish(self, outcome: Outcome | None) -> None:
        """Wake the thread; None makes it send the request in another way."""
        self.outcome = outcome
        self.finished.release()
