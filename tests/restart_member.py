"""One client with a member of two groups: ``restart_member.py nameserver file``, until stdin ends.

The group ``workers`` fails all messages that start with ``bad``; the group ``orderly`` consumes in
order. Each call of a listener is two lines in the file, written immediately, so that a kill loses
none. Times are from the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence

from turbopump import ConsumeContext, ConsumeResult, PushConsumer
from turbopump.errors import ConnectionLost, RequestTimeout
from turbopump.wire.record import MessageView

FIRST_LEVEL = 1
"""A delay of one second."""
ATTEMPTS = 2
CALL_S = 0.004


class Log(logging.Handler):
    """Writes lines for calls, and one for each send-back whose outcome is unknown."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, what: str, message: MessageView, context: ConsumeContext) -> None:
        place = f"{context.group} {context.queue.topic} {context.queue.queue_id}"
        tried = f"{message.body.decode()} {message.reconsume_times}"
        line = f"{what} {time.monotonic_ns()} {place} {message.queue_offset} {tried}\n"
        os.write(self._file, line.encode())

    def emit(self, record: logging.LogRecord) -> None:
        args = record.args
        if isinstance(args, tuple) and isinstance(args[-1], ConnectionLost | RequestTimeout):
            os.write(self._file, b"unknown\n")


def main() -> None:
    nameserver, path = sys.argv[1:]
    log = Log(path)
    logging.getLogger("turbopump.client.retry_sender").addHandler(log)

    def handle(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        (message,) = messages
        log.write("begin", message, context)
        time.sleep(CALL_S)
        log.write("end", message, context)
        context.delay_level = FIRST_LEVEL
        is_bad = message.body.startswith(b"bad")
        return ConsumeResult.RETRY_LATER if is_bad else ConsumeResult.SUCCESS

    with (
        PushConsumer(
            "workers",
            handle,
            nameserver=nameserver,
            subscriptions={"work": "*"},
            start_from="first",
            max_attempts=ATTEMPTS,
        ),
        PushConsumer(
            "orderly",
            handle,
            nameserver=nameserver,
            subscriptions={"ordered": "*"},
            start_from="first",
            orderly=True,
        ),
    ):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
