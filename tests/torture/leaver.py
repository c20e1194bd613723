"""A program that exits without closing its client: ``python -m torture.leaver ROLE …``.

``submit NAMESERVER JOURNAL NAME COUNT`` hands messages to a producer and exits; ``wait NAMESERVER``
consumes until it is signalled.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from torture.journal import Journal
from torture.messages import WORK, body_of, message_id
from turbopump import ConsumeContext, ConsumeResult, Message, Producer, PushConsumer, SendReceipt
from turbopump.wire.record import MessageView

WAITING = "waiting"


def submit(nameserver: str, path: str, name: str, count: str) -> None:
    journal = Journal(Path(path))
    producer = Producer("leavers", nameserver=nameserver)
    producer.start()
    for number in range(int(count)):
        identity = message_id(WORK, name, number)
        journal.note("try", identity)

        def noted(done: Future[SendReceipt], identity: str = identity) -> None:
            if done.exception() is None:
                journal.note("ack", identity, 0, 0)

        producer.submit(Message(WORK, body_of(identity))).add_done_callback(noted)


def wait(nameserver: str) -> None:
    def handle(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        return ConsumeResult.SUCCESS

    with PushConsumer(
        WAITING, handle, nameserver=nameserver, subscriptions={WORK: "*"}, start_from="first"
    ) as consumer:
        threading.Thread(target=_say_ready, daemon=True).start()
        consumer.wait()


def _say_ready() -> None:
    """Report readiness once signal handlers are installed; before that, a signal would kill it."""
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.01)
    sys.stdout.write("ready\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "submit":
        submit(*sys.argv[2:])
    else:
        wait(*sys.argv[2:])
