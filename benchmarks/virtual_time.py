"""The cost of hours of virtual time: all retries of a message, and idle consumers.

::

    python benchmarks/virtual_time.py [rounds]

CPU time of the whole process, the best of several rounds, excluding the start and stop of the
cluster; with and without skipping idle time. Turns and timers are those of the event loop, the same
on any machine.
"""

from __future__ import annotations

import itertools
import logging
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from measure import print_table
from turbopump.aio import ConsumeResult, Message, PushConsumer
from turbopump.testing import Cluster, running_cluster, virtual_loop
from turbopump.wire.record import MessageView

ROUNDS = 5
QUEUES = (4, 64)
ATTEMPTS = 17

Scene = Callable[[Cluster], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one scene, from start to end."""

    processor_s: float
    virtual_s: float
    turns: int
    timers: int


def consumer(cluster: Cluster, answer: ConsumeResult, calls: list[bytes]) -> PushConsumer:
    async def handle(messages: Sequence[MessageView], _context: object) -> ConsumeResult:
        calls.extend(message.body for message in messages)
        return answer

    return PushConsumer(
        "billing",
        handle,
        nameserver=cluster.nameserver,
        subscriptions={"orders": "*"},
        start_from="first",
    )


async def all_retries(cluster: Cluster) -> None:
    """Fail until the message is dead-lettered: 4 h 46 min with the default delays."""
    calls: list[bytes] = []
    async with consumer(cluster, ConsumeResult.RETRY_LATER, calls):
        await cluster.send(Message("orders", b"1"))
        await cluster.until_consumed("billing")
    assert len(calls) == ATTEMPTS
    assert len(cluster.dead_letters("billing")) == 1


def idle_hour(queues: int) -> Scene:
    async def wait(cluster: Cluster) -> None:
        await cluster.make_topic("orders", queues=queues)
        async with consumer(cluster, ConsumeResult.SUCCESS, []):
            await cluster.advance(hours=1)

    return wait


async def empty_day(cluster: Cluster) -> None:
    """Run a name server and a broker without clients."""
    await cluster.advance(days=1)


def measured(scene: Scene, *, skips_idle_time: bool) -> Cost:
    async def play(cluster: Cluster) -> Cost:
        loop = virtual_loop()
        virtual_s, turns, timers = loop.time(), loop.turns, loop.timers_set
        started_s = time.process_time()
        await scene(cluster)
        return Cost(
            time.process_time() - started_s,
            loop.time() - virtual_s,
            loop.turns - turns,
            loop.timers_set - timers,
        )

    with (
        tempfile.TemporaryDirectory() as directory,
        running_cluster(Path(directory), skips_idle_time=skips_idle_time) as cluster,
    ):
        return cluster.run(play(cluster))


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    logging.getLogger("turbopump").setLevel(logging.ERROR)
    scenes: dict[str, Scene] = {
        "all 16 retries of a message": all_retries,
        **{f"an idle consumer of {count} queues": idle_hour(count) for count in QUEUES},
        "a cluster without clients": empty_day,
    }
    rows = []
    for (name, scene), skips in itertools.product(scenes.items(), (True, False)):
        costs = [measured(scene, skips_idle_time=skips) for _ in range(rounds)]
        best = min(costs, key=lambda cost: cost.processor_s)
        hours = best.virtual_s / 3600
        rows.append(
            [
                name if skips else f"{name}, nothing left out",
                f"{hours:.2f}",
                f"{best.processor_s * 1000:,.0f}",
                f"{best.processor_s * 1000 / hours:,.0f}",
                f"{best.turns:,}",
                f"{best.timers:,}",
            ]
        )
    print_table(["", "virtual hours", "CPU ms", "CPU ms an hour", "turns", "timers"], rows)


if __name__ == "__main__":
    main()
