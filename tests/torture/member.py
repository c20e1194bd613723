"""A member of all consumer groups: ``python -m torture.member NAMESERVER JOURNAL LISTENERS``.

LISTENERS is ``threads`` or ``async``. Records the start and end of each listener call.
SIGTERM leaves the groups.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from torture.journal import Journal
from torture.messages import (
    ATTEMPTS_MAX,
    FLOWS,
    ORDERED,
    WORK,
    Fate,
    fate_of,
    flow_of,
    identity_of,
    is_intact,
)
from turbopump.aio import (
    ClientConfig,
    ConsumeContext,
    ConsumeResult,
    MessageView,
    PushConsumer,
)
from turbopump.net.loop import run

THREADS = 4
PERSIST_MS = 500
_SLOWEST_S = 0.01


class Calls:
    """What the listeners of one process do."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def begin(self, message: MessageView, context: ConsumeContext) -> tuple[object, ...]:
        identity = identity_of(message.body)
        call = (
            identity,
            context.queue.topic,
            context.queue.queue_id,
            message.queue_offset,
            message.reconsume_times,
        )
        self._journal.note("begin", *call)
        if not is_intact(message.body):
            self._journal.note("damaged", *call)
        return call

    def end(self, message: MessageView, call: tuple[object, ...]) -> ConsumeResult:
        identity = identity_of(message.body)
        fate = fate_of(identity) if flow_of(identity) == WORK else Fate.SUCCEEDS
        fails = fate is Fate.FAILS_ALWAYS or (
            fate is Fate.FAILS_ONCE and message.reconsume_times == 0
        )
        self._journal.note("failed" if fails else "done", *call)
        return ConsumeResult.RETRY_LATER if fails else ConsumeResult.SUCCESS

    def handle(self, messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        [message] = messages
        call = self.begin(message, context)
        time.sleep(random.uniform(0, _SLOWEST_S))
        return self.end(message, call)

    async def handle_async(
        self, messages: Sequence[MessageView], context: ConsumeContext
    ) -> ConsumeResult:
        [message] = messages
        call = self.begin(message, context)
        await asyncio.sleep(random.uniform(0, _SLOWEST_S))
        return self.end(message, call)


async def main(nameserver: str, path: str, listeners: str) -> None:
    calls = Calls(Journal(Path(path)))
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    async with AsyncExitStack() as stack:
        for flow in FLOWS:
            consumer = PushConsumer(
                flow,
                calls.handle if listeners == "threads" else calls.handle_async,
                client=ClientConfig(nameserver, persist_interval=PERSIST_MS / 1000),
                subscriptions={flow: "*"},
                start_from="first",
                orderly=flow == ORDERED,
                concurrency=THREADS,
                max_attempts=ATTEMPTS_MAX if flow == WORK else None,
            )
            await stack.enter_async_context(consumer)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await stopping.wait()


if __name__ == "__main__":
    run(main(*sys.argv[1:]))
