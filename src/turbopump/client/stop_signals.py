"""SIGINT and SIGTERM as the wish to stop in an orderly way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_signals(begin: Callable[[], object]) -> Iterator[None]:
    """Let the first signal begin to stop, and a second one end the process.

    Handlers are the main thread's, so elsewhere this does nothing. A signal that is ignored stays
    ignored, as ``nohup`` and shells want it for programs in the background.
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

    wanted = [each for each in _SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, handle) for each in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None is a handler that was not installed from Python, and cannot be again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
