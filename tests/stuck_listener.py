"""A consumer whose listener never returns; the tests check that its process ends.

Arguments: the name server, and ``close``, ``aclose`` or ``wait`` for how it is ended.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

from turbopump import ConsumeContext, Listening, PushConsumer, aio
from turbopump.wire.record import MessageView

begun = threading.Event()


def handle(messages: Sequence[MessageView], context: ConsumeContext) -> NoReturn:
    while sys.argv[2] == "wait" and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.01)
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    begun.set()
    while True:
        threading.Event().wait()


def main(nameserver: str, mode: str) -> None:
    with PushConsumer(
        "stuck",
        handle,
        nameserver=nameserver,
        subscriptions={"orders": "*"},
        start_from="first",
        listening=Listening(close_wait=0.1),
    ) as consumer:
        if mode == "wait":
            consumer.wait()
        begun.wait()


async def amain(nameserver: str) -> None:
    async with aio.PushConsumer(
        "stuck",
        handle,
        nameserver=nameserver,
        subscriptions={"orders": "*"},
        start_from="first",
        listening=Listening(close_wait=0.1),
    ):
        await asyncio.to_thread(begun.wait)


if __name__ == "__main__":
    if sys.argv[2] == "aclose":
        asyncio.run(amain(sys.argv[1]))
    else:
        main(sys.argv[1], sys.argv[2])
