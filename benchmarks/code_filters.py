"""Filtered against unfiltered pulls: tags, SQL92 and code, by CPU time of the servers.

    python benchmarks/code_filters.py [--messages 100000] [--rounds 3]

A broker with one filter server runs in a separate process. Each kind of filter in turn pulls a
backlog in one queue to its end, 32 messages at a time; half of the messages match.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from broker_process import server
from measure import print_table
from turbopump.aio import CodeFilter, Found, Message, Producer, PullConsumer, Sql
from turbopump.client.outgoing import split_batch
from turbopump.client.subscriptions import Expression
from turbopump.errors import NoRoute
from turbopump.message import MessageQueue
from turbopump.net.loop import run
from turbopump.wire.record import MessageView

PULLED_AT_A_TIME = 32
START_S = 30.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def by_tag(message: MessageView) -> bool:
    return message.tags == "even"


def by_body(message: MessageView) -> bool:
    import json

    return bool(json.loads(message.body)["amount"] > 50)


KINDS: dict[str, Expression] = {
    "everything": "*",
    "tags": "even",
    "SQL92": Sql("amount > 50"),
    "code, by tag": CodeFilter(by_tag),
    "code, by JSON body": CodeFilter(by_body),
}


def cpu_s(broker: int) -> dict[str, float]:
    """Return the CPU time used so far by the broker, the filter server and the filters."""
    used: dict[str, float] = defaultdict(float)
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            command = (directory / "cmdline").read_bytes().decode()
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        spent_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        if int(directory.name) == broker:
            used["broker"] += spent_s
        elif "turbopump.filter_server" in command and int(fields[1]) == broker:
            used["server"] += spent_s
        elif "filter_server/child.py" in command:
            used["filter"] += spent_s
    return used


async def store(nameserver: str, count: int) -> MessageQueue:
    """Store a backlog in one queue."""
    async with Producer("benchmark", nameserver=nameserver) as producer:
        await producer.send(Message("Bench", b'{"amount": 1}'))
        queue = MessageQueue("Bench", (await producer.queues("Bench"))[0].broker, 0)
        messages = [
            Message(
                "Bench",
                b'{"amount": %d, "padding": "%s"}' % (amount, b"x" * 96),
                tags="even" if number % 2 else "odd",
                properties={"amount": str(amount)},
            )
            for number in range(count)
            for amount in [number % 100 + 1]
        ]
        for batch in split_batch(messages):
            await producer.send_batch(batch, to=queue)
    return queue


async def pull_all(consumer: PullConsumer, queue: MessageQueue, kind: Expression) -> int:
    """Pull a queue to its end; return the number of messages."""
    offset, found = 0, 0
    end = await consumer.max_offset(queue)
    while offset < end:
        outcome = await consumer.pull(queue, offset, tags=kind, count_max=PULLED_AT_A_TIME)
        if isinstance(outcome, Found):
            found += len(outcome.messages)
        offset = outcome.next_offset
    return found


async def filter_server_ready(consumer: PullConsumer, queue: MessageQueue) -> None:
    """Wait until the broker's filter server has started."""
    async with asyncio.timeout(START_S):
        while True:
            with suppress(NoRoute):
                await consumer.pull(queue, 0, tags=CodeFilter(by_tag))
                return
            await asyncio.sleep(0.1)


async def measure(broker: int, nameserver: str, count: int, rounds: int) -> None:
    queue = await store(nameserver, count)
    took: dict[tuple[str, str], list[float]] = defaultdict(list)
    matched: dict[str, int] = {}
    async with PullConsumer("benchmark", nameserver=nameserver) as consumer:
        await filter_server_ready(consumer, queue)
        for kind in KINDS.values():
            await pull_all(consumer, queue, kind)
        for _ in range(rounds):
            for name, kind in KINDS.items():
                before, start_s = cpu_s(broker), time.perf_counter()
                matched[name] = await pull_all(consumer, queue, kind)
                took[name, "wall"].append(time.perf_counter() - start_s)
                after = cpu_s(broker)
                for part in ("broker", "server", "filter"):
                    took[name, part].append(after[part] - before[part])
                took[name, "sum"].append(sum(after.values()) - sum(before.values()))
    medians = {key: statistics.median(values) * 1e6 / count for key, values in took.items()}
    unfiltered = medians["everything", "sum"]
    print_table(
        ["kind", "matched", "broker µs", "filter server µs", "filter µs", "sum : everything",
         "messages/s"],
        [
            [
                name,
                f"{matched[name]:,}",
                *(f"{medians[name, part]:.2f}" for part in ("broker", "server", "filter")),
                f"{medians[name, 'sum'] / unfiltered:.1f}",
                f"{1e6 / medians[name, 'wall']:,.0f}",
            ]
            for name in KINDS
        ],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    with server(config="filterServerNums=1\n") as running:
        pid, nameserver = running.process.pid, running.nameserver
        run(measure(pid, nameserver, chosen.messages, chosen.rounds))


if __name__ == "__main__":
    main()
