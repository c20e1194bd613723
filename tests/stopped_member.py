"""A consumer that waits until a signal stops it.

Arguments: the name server, the topic, how to wait and the kind of listener. It waits ``blocking``,
with ``aio`` or ``uvloop``, in a ``thread`` other than the main one, or with its ``own`` handler for
SIGTERM. The listener reports when it starts and ends, and is ``slow`` or ``stuck``.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Sequence

from turbopump import ConsumeContext, ConsumeResult, Listening, PushConsumer, aio
from turbopump.wire.record import MessageView

SLOW_S = 1.0


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def is_waiting() -> bool:
    """Whether the expected signal handlers are installed."""
    if sys.argv[3] == "own":
        return signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    return sys.argv[3] == "thread" or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL


def handle(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
    while not is_waiting():
        time.sleep(0.01)
    say("begun")
    if sys.argv[4] == "stuck":
        threading.Event().wait()
    time.sleep(SLOW_S)
    say("done")
    return ConsumeResult.SUCCESS


async def ahandle(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
    while not is_waiting():  # noqa: ASYNC110 - no event to wait for
        await asyncio.sleep(0.01)
    say("begun")
    await asyncio.sleep(600 if sys.argv[4] == "stuck" else SLOW_S)
    say("done")
    return ConsumeResult.SUCCESS


def handlers() -> list[object]:
    return [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]


def blocking(nameserver: str) -> None:
    before = handlers()
    with PushConsumer(
        sys.argv[2],
        handle,
        nameserver=nameserver,
        subscriptions={sys.argv[2]: "*"},
        start_from="first",
        listening=Listening(close_wait=60),
    ) as consumer:
        if sys.argv[3] == "own":

            def close(*_: object) -> None:
                say("own")
                consumer.close()

            signal.signal(signal.SIGTERM, close)
            before = handlers()
        consumer.wait()
        assert handlers() == before
    say("closed")


async def waiting(nameserver: str) -> None:
    before = handlers()
    async with aio.PushConsumer(
        sys.argv[2],
        ahandle,
        nameserver=nameserver,
        subscriptions={sys.argv[2]: "*"},
        start_from="first",
        listening=Listening(close_wait=60),
    ) as consumer:
        await consumer.wait()
        assert handlers() == before
    say("closed")


def main(nameserver: str, mode: str) -> None:
    if mode in ("blocking", "own"):
        blocking(nameserver)
    elif mode == "aio":
        asyncio.run(waiting(nameserver))
    elif mode == "uvloop":
        import uvloop

        uvloop.run(waiting(nameserver))
    else:
        thread = threading.Thread(target=blocking, args=[nameserver], daemon=True)
        thread.start()
        signal.sigwait({signal.SIGUSR1})


if __name__ == "__main__":
    # Shells make background jobs ignore SIGINT, which children inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(sys.argv[1], sys.argv[3])
