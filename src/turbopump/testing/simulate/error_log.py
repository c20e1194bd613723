"""Unhandled errors: in tasks, in callbacks, and in the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from turbopump.errors import TurbopumpError
from turbopump.testing.listeners import InjectedFailure

_EXPECTED = (OSError, TurbopumpError, InjectedFailure)
"""What faults cause: anything else in the log is a bug."""

_LOGGERS = ("turbopump", "asyncio")

_UNHANDLED = "unhandled: "

OnError = Callable[[str, BaseException | None], None]
"""Called with every logged error, and every error that no code has handled."""


class _Errors(logging.Handler):
    """Receives every error that is logged."""

    def __init__(self, tell: OnError) -> None:
        super().__init__(logging.ERROR)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._tell(record.getMessage(), error)


def is_bug(text: str, error: BaseException | None) -> bool:
    """Whether a logged error cannot come from a planned fault, or was not handled."""
    if text.startswith(_UNHANDLED):
        # Whatever it was, its owner did not retrieve its task's result.
        return True
    # Only flipped bits damage what was synced, and what was not is not served.
    if error is None:
        return "damaged message" in text
    return not isinstance(error, _EXPECTED)


@contextmanager
def capture_errors(tell: OnError) -> Iterator[Callable[[asyncio.AbstractEventLoop], None]]:
    """Record errors, and nothing else, in the log; yields what adds those of a loop."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(log, log.level, log.propagate) for log in loggers]
    handler = _Errors(tell)
    for log in loggers:
        log.addHandler(handler)
        log.setLevel(logging.ERROR)
        log.propagate = False

    def on_exception(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        tell(f"{_UNHANDLED}{context.get('message')}", error or RuntimeError("no exception"))

    try:
        yield lambda loop: loop.set_exception_handler(on_exception)
    finally:
        for log, level, propagate in before:
            log.removeHandler(handler)
            log.setLevel(level)
            log.propagate = propagate
