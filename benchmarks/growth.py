"""The cost of a broker's operations as topics, queues, groups, held pulls, clients, backlog grow.

    python benchmarks/growth.py [--quick] [--only topics,backlog] [--backlog-gib 10]
        [--json FILE] [--plot FILE] [--update-docs]

Each kind of thing gets its own broker, and their number is increased step by step. At each size,
the broker's CPU time is measured for one send and for adding one more thing. The slope is that of
cost against size on logarithmic axes: 0 is constant cost, 1 is linear. Memory is the growth of the
process divided by the number of things added.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bare_frames import batch_request, flood, pull_request, send_request
from broker_process import TIMEOUT_MS, Server, connected, server
from measure import panels, print_table, table, update_docs
from turbopump.net.connection import Connection
from turbopump.net.loop import run
from turbopump.wire.bodies import (
    ConsumeFrom,
    ConsumerData,
    ConsumeType,
    Heartbeat,
    MessageModel,
    Subscription,
)
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request
from turbopump.wire.headers import CreateTopic
from turbopump.wire.hosts import split_address

AT_ONCE = 64
ROUNDS = 3
MEASURABLE_S = 0.05
"""The least measurable CPU time: the system counts in hundredths of a second."""

HELD_PER_CONNECTION = 1000
BATCH = 200
BODY = b"x" * 1024
GROUPS_PER_CLIENT = 100


@dataclass(frozen=True, slots=True)
class Size:
    """The measurements at one number of things."""

    count: int
    send_us: float
    """The broker's CPU time per send."""
    add_us: float | None
    """The same per thing added to reach this number; None if the total is too small to measure."""
    memory_bytes: float
    """Memory growth of the process per thing added."""


class Growing:
    """A broker and the connections that keep things alive."""

    def __init__(self, running: Server, connection: Connection, stack: AsyncExitStack) -> None:
        self.running = running
        self.connection = connection
        self.stack = stack
        self.count = 0

    async def opened(self) -> Connection:
        """Return one more connection, open until the end."""
        return await self.stack.enter_async_context(connected(self.running.address))

    async def ask_all(self, commands: Sequence[Command]) -> None:
        """Send requests that must succeed, with a limited number in flight."""
        left = iter(commands)

        async def ask() -> None:
            for command in left:
                answer = await self.connection.request(command, 10 * TIMEOUT_MS)
                assert answer.code == ResponseCode.SUCCESS, answer

        await asyncio.gather(*(ask() for _ in range(AT_ONCE)))


Add = Callable[[Growing, range], Awaitable[None]]


def topic(name: str, queues: int) -> Command:
    header = CreateTopic(
        topic=name,
        default_topic="TBW102",
        read_queue_nums=queues,
        write_queue_nums=queues,
        perm=6,
        topic_filter_type="SINGLE_TAG",
    )
    return request(RequestCode.UPDATE_AND_CREATE_TOPIC, header)


async def add_topics(growing: Growing, numbers: range) -> None:
    await growing.ask_all([topic(f"Topic{number}", 4) for number in numbers])


async def add_queues(growing: Growing, numbers: range) -> None:
    """Add queues to one topic, each with a message."""
    await growing.ask_all([topic("Bench", numbers.stop)])
    await growing.ask_all([send_request(number) for number in numbers])


def consumer(group: str) -> ConsumerData:
    return ConsumerData(
        group_name=group,
        consume_type=ConsumeType.PUSH,
        message_model=MessageModel.CLUSTERING,
        consume_from_where=ConsumeFrom.LAST_OFFSET,
        subscription_data_set=[Subscription(topic="Bench", sub_string="*")],
    )


async def add_groups(growing: Growing, numbers: range) -> None:
    """Add groups; each gets a retry topic and one member."""
    for first in range(numbers.start, numbers.stop, GROUPS_PER_CLIENT):
        client = await growing.opened()
        heartbeat = Heartbeat(
            client_id=f"client-{first}",
            consumer_data_set=[
                consumer(f"group-{number}")
                for number in range(first, min(first + GROUPS_PER_CLIENT, numbers.stop))
            ],
        )
        command = Command(code=RequestCode.HEART_BEAT, body=heartbeat.encode())
        answer = await client.request(command, 10 * TIMEOUT_MS)
        assert answer.code == ResponseCode.SUCCESS, answer


async def add_members(growing: Growing, numbers: range) -> None:
    """Add members to one group, each over its own connection."""
    for number in numbers:
        client = await growing.opened()
        heartbeat = Heartbeat(client_id=f"client-{number}", consumer_data_set=[consumer("members")])
        command = Command(code=RequestCode.HEART_BEAT, body=heartbeat.encode())
        await client.request(command, 10 * TIMEOUT_MS)


async def add_connections(growing: Growing, numbers: range) -> None:
    host, port = split_address(growing.running.address)
    loop = asyncio.get_running_loop()
    for number in numbers:
        transport, _ = await loop.create_connection(asyncio.Protocol, host, port)
        growing.stack.callback(transport.abort)
        if number % AT_ONCE == 0:
            # Its answer comes after the pending connections have been accepted.
            await growing.connection.request(pull_request(0), TIMEOUT_MS)


async def add_held_pulls(growing: Growing, numbers: range) -> None:
    """Leave pulls waiting for tags no message has, half of them on the queue that is sent to."""
    for first in range(numbers.start, numbers.stop, HELD_PER_CONNECTION):
        client = await growing.opened()
        for number in range(first, min(first + HELD_PER_CONNECTION, numbers.stop)):
            offset, queue_id = (1 << 30, 0) if number % 2 else (1, 1)
            command = pull_request(offset, queue_id, hold_ms=3_000_000, tags=f"tag-{number % 100}")
            await client.oneway_in_time(command, TIMEOUT_MS)
        await client.request(pull_request(0, queue_id=1), TIMEOUT_MS)


async def add_mebibytes(growing: Growing, numbers: range) -> None:
    """Store a backlog, in batches of messages of 1 KiB."""
    command = batch_request(BATCH, BODY)
    await growing.ask_all([command] * max(1, len(numbers) * 1024 // BATCH))


ADDING: dict[str, tuple[Add, Sequence[int]]] = {
    "topics": (add_topics, (1, 10, 100, 1000, 10_000)),
    "queues": (add_queues, (4, 16, 64, 256, 1024)),
    "groups": (add_groups, (1, 10, 100, 1000)),
    "members": (add_members, (1, 10, 100, 1000)),
    "connections": (add_connections, (1, 10, 100, 1000, 5000)),
    "held pulls": (add_held_pulls, (10, 100, 1000, 10_000, 50_000)),
    "backlog, MiB": (add_mebibytes, (1, 16, 128, 1024)),
}


TITLES = {
    "topics": ("topics", "topic with 4 empty queues"),
    "queues": ("queues of the topic", "queue with a message"),
    "groups": ("groups, each with a member", "group with its retry topic and one member"),
    "members": ("members of one group", "member, with its connection"),
    "connections": ("connections", "connection"),
    "held pulls": ("held pulls, half of them on the queue sent to", "held pull"),
    "backlog, MiB": ("backlog, MiB", "MiB of backlog"),
}
"""Table titles: the plural, and the singular."""


@asynccontextmanager
async def growing() -> AsyncIterator[Growing]:
    """Run a broker with one topic that has messages."""
    with server() as running:
        async with AsyncExitStack() as stack:
            connection = await stack.enter_async_context(connected(running.address))
            made = Growing(running, connection, stack)
            await made.ask_all([topic("Bench", 4), *(send_request(queue) for queue in range(4))])
            await flood(running.address, AT_ONCE, 0.5, send_request())
            yield made
            # Nothing that it has yet to write is needed.
            running.process.kill()


async def measured(name: str, add: Add, sizes: Sequence[int], seconds: float) -> list[Size]:
    """Add things up to each size, and measure the broker there."""
    found = []
    async with growing() as made:
        for size in sizes:
            print(f"{name}: {size:,}", file=sys.stderr)
            added = range(made.count, size)
            cpu_s, memory = made.running.cpu_s, made.running.memory_mib
            await add(made, added)
            made.count = size
            used_s = made.running.cpu_s - cpu_s
            add_us = used_s / len(added) * 1e6 if used_s >= MEASURABLE_S else None
            grown = (made.running.memory_mib - memory) * 2**20 / len(added)
            # The minimum: other work on the machine adds to the CPU time, too.
            send_us = min([await send_cost_us(made.running, seconds) for _ in range(ROUNDS)])
            found.append(Size(size, send_us, add_us, grown))
    return found


async def send_cost_us(running: Server, seconds: float) -> float:
    cpu_s = running.cpu_s
    sent = await flood(running.address, AT_ONCE, seconds, send_request())
    return (running.cpu_s - cpu_s) / sent * 1e6


Cost = Callable[[Size], float | None]
COSTS: dict[str, Cost] = {
    "CPU µs a send": lambda size: size.send_us,
    "CPU µs to add one": lambda size: size.add_us,
}


def points(sizes: Sequence[Size], cost: Cost) -> list[tuple[float, float]]:
    """Return numbers of things with their costs, where measured."""
    found = ((float(size.count), cost(size)) for size in sizes)
    return [(count, value) for count, value in found if value is not None]


def slope(sizes: Sequence[Size], cost: Cost) -> str:
    """Return the least-squares slope of cost against size on logarithmic axes."""
    logs = [(math.log(count), math.log(value)) for count, value in points(sizes, cost)]
    if len(logs) < 3:
        return ""
    middle_x, middle_y = (math.fsum(each) / len(logs) for each in zip(*logs, strict=True))
    above = math.fsum((x - middle_x) * (y - middle_y) for x, y in logs)
    return f"{above / math.fsum((x - middle_x) ** 2 for x, _ in logs):.2f}"


def report(name: str, sizes: Sequence[Size]) -> None:
    rows = [
        [
            f"{size.count:,}",
            f"{size.send_us:.1f}",
            "" if size.add_us is None else f"{size.add_us:,.0f}",
            f"{size.memory_bytes:,.0f}",
        ]
        for size in sizes
    ]
    print(f"\n{name}\n")
    slopes = ["slope", *(slope(sizes, cost) for cost in COSTS.values()), ""]
    print_table([name, *COSTS, "bytes each"], [*rows, slopes])


def tables(found: dict[str, list[Size]]) -> dict[str, str]:
    """Return the tables for the documentation: the cost of sends, and the memory of idle things."""
    costs = [
        [
            TITLES[name][0],
            f"{sizes[0].count:,} · {sizes[-1].count:,}",
            f"{sizes[0].send_us:.1f} · {sizes[-1].send_us:.1f}",
            *(slope(sizes, cost) for cost in COSTS.values()),
        ]
        for name, sizes in found.items()
    ]
    columns = ["things", "from · to", "CPU µs per send, fewest · most things", "slope"]
    # From the largest number: small numbers fit into memory that was already free.
    idle = [[TITLES[name][1], f"{sizes[-1].memory_bytes:,.0f}"] for name, sizes in found.items()]
    return {
        "growth": table([*columns, "slope of adding one"], costs),
        "idle-memory": table(["one more idle", "bytes"], idle),
    }


def write_plot(found: dict[str, list[Size]], path: Path) -> None:
    """Plot the cost of a send, and of adding one more thing, against the number of things."""
    figure, (drawn,) = panels(1, 2, (9, 3.6))
    for panel, (title, cost) in zip(drawn, COSTS.items(), strict=True):
        for name, sizes in found.items():
            known = points(sizes, cost)
            counts, costs = [count for count, _ in known], [value for _, value in known]
            panel.loglog(counts, costs, marker=".", label=name)
        panel.set_title(title, loc="left")
        panel.set_xlabel("things")
        # Same range as the x axis, or differences of a few percent would look like growth.
        panel.set_ylim(1, 1e5)
    drawn[0].legend(fontsize="small", ncols=2)
    figure.savefig(path)


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="leave out the largest size of each")
    parser.add_argument("--seconds", type=float, default=1.0, help="of sends at each size")
    parser.add_argument("--only", default=",".join(ADDING).replace(", ", " "))
    parser.add_argument("--backlog-gib", type=int, default=0, help="one more size of the backlog")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument(
        "--update-docs", action="store_true", help="write tables into README.md here"
    )
    parser.add_argument("--plot", type=Path, help="draw the costs (PNG or SVG; matplotlib)")
    options = parser.parse_args()
    wanted = options.only.split(",")
    found = {}
    for name, (add, sizes) in ADDING.items():
        if not any(name.startswith(each.split()[0]) for each in wanted):
            continue
        if options.quick:
            sizes = sizes[:-1]
        if name.startswith("backlog") and options.backlog_gib:
            sizes = (*sizes, options.backlog_gib * 1024)
        found[name] = await measured(name, add, sizes, options.seconds)
        report(name, found[name])
    for text in tables(found).values():
        print(f"\n{text}")
    if options.update_docs:
        update_docs(tables(found))
    if options.json is not None:
        value = {name: [asdict(size) for size in sizes] for name, sizes in found.items()}
        options.json.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    if options.plot is not None:
        write_plot(found, options.plot)


if __name__ == "__main__":
    run(main())
