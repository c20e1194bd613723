"""SIGINT and SIGTERM as requests for an orderly stop."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_signals(begin: Callable[[], object]) -> Iterator[None]:
    """Stop in an orderly way on the first signal, and end the process on the second.

    Handlers belong to the main thread, so elsewhere this does nothing. Only Python's own handlers
    are replaced: the program, or a framework that runs it, may have installed others, and an
    ignored signal stays ignored, as ``nohup`` requires.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_begun = False

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal is_begun
        if is_begun:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        is_begun = True
        begin()

    wanted = [each for each in _SIGNALS if _is_pythons(signal.getsignal(each))]
    before = {each: signal.signal(each, handle) for each in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_pythons(handler: object) -> bool:
    """Whether only the interpreter or asyncio has installed the handler of a signal."""
    if handler in (signal.SIG_DFL, signal.default_int_handler):
        return True
    # `asyncio.run` cancels its main task on SIGINT, by a bound method with the task.
    method = getattr(handler, "func", None)
    return isinstance(getattr(method, "__self__", None), asyncio.Runner)
