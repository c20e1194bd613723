"""Messages submitted to a producer without waiting, and their outcomes."""

from __future__ import annotations

import asyncio
import atexit
import functools
import logging

from turbopump.client.send_hooks import OnSent, SendReceipt
from turbopump.errors import NotRunning
from turbopump.machine.process import process_id

_log = logging.getLogger(__name__)


class Submitted:
    """The submitted messages of one running producer; the number without an outcome is bounded."""

    def __init__(self, count_max: int) -> None:
        self.places = asyncio.Semaphore(count_max)
        self._pending = 0
        self._cancelled = 0
        self._loop = asyncio.get_running_loop()
        self._pid = process_id()
        _running.add(self)

    def follow(self, task: asyncio.Task[SendReceipt], on_sent: OnSent | None) -> None:
        """Track a message that holds a slot, and free the slot when its outcome is known."""
        self._pending += 1
        task.add_done_callback(functools.partial(self._settle, on_sent))

    def close(self) -> None:
        """Expect no further messages."""
        _running.discard(self)

    def _settle(self, on_sent: OnSent | None, done: asyncio.Task[SendReceipt]) -> None:
        self.places.release()
        self._pending -= 1
        if done.cancelled():
            self._note_cancelled()
            error: BaseException | None = NotRunning("the send was cancelled")
        else:
            error = done.exception()
            if on_sent is None and error is not None:
                # The future reports it too, but the program may never check it.
                _log.warning("a submitted message was not sent: %s", error)
        if on_sent is None:
            return
        if isinstance(error, Exception):
            _call_back(on_sent, None, error)
        elif error is None:
            _call_back(on_sent, done.result(), None)

    def _note_cancelled(self) -> None:
        self._cancelled += 1
        if self._cancelled == 1:
            # A loop that ends cancels all of them together: log one line.
            self._loop.call_soon(self._report_cancelled)

    def _report_cancelled(self) -> None:
        _log.error(
            "%d submitted messages were cancelled before they were stored: close the producer"
            " before its event loop ends",
            self._cancelled,
        )
        self._cancelled = 0

    def report_lost(self) -> None:
        """Report messages whose event loop has ended, at process exit."""
        is_over = not self._loop.is_running()
        if self._pending and is_over and self._pid == process_id():
            _log.error(
                "%d submitted messages were not sent: their event loop ended, and the producer was"
                " not closed before",
                self._pending,
            )


def _call_back(on_sent: OnSent, receipt: SendReceipt | None, error: Exception | None) -> None:
    try:
        on_sent(receipt, error)
    except BaseException:  # noqa: BLE001 - the user's code must not end the loop
        _log.exception("the callback of a send failed")


_running: set[Submitted] = set()
"""Of open producers; not weak, or garbage collection would hide lost messages."""


@atexit.register
def _report_lost() -> None:
    for each in _running:
        each.report_lost()
