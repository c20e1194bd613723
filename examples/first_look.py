"""A first look: a cluster in one process, orders sent, consumed, failed, retried, buried, kept.

Run by ``scripts/demo``. Everything goes over real sockets into a real store in a temporary
directory; the delay levels are shortened, so that retries take seconds. Every number in the summary
is checked against what was sent, and the exit code says whether all of them hold.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from turbopump.broker.broker import Broker
from turbopump.broker.config_keys import parse
from turbopump.message import MessageQueue
from turbopump.nameserver import NameServer, NameServerConfig
from turbopump.net.loop import run
from turbopump.net.pool import ConnectionPool
from turbopump.net.sockets import SocketNetwork
from turbopump.wire import properties
from turbopump.wire.bodies import TopicRoute
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request, whole_body
from turbopump.wire.headers import (
    PullMessage,
    PullMessageAnswer,
    RouteOf,
    SendBack,
    SendMessageV2,
    UpdateConsumerOffset,
)
from turbopump.wire.record import MessageView, decode_records
from turbopump.wire.sysflag import PULL_SUBSCRIPTION, PULL_SUSPEND

ORDERS = 3000
HOPELESS_EVERY = 100
FLAKY_EVERY = 25
RETRIES_MAX = 3
IN_FLIGHT = 64
TIMEOUT_MS = 5000
TAGS = ("created", "paid", "shipped")
FAST_DELAYS = " ".join(["1s"] * 18)


@dataclass
class Seen:
    """What a group has seen of each order."""

    orders: Counter[str] = field(default_factory=Counter)
    retried: int = 0

    def note(self, message: MessageView) -> None:
        self.orders[message.keys[0]] += 1
        self.retried += message.reconsume_times > 0


@asynccontextmanager
async def cluster(directory: Path) -> AsyncIterator[str]:
    """Run a name server and a broker; give the name server's address."""
    names_config = NameServerConfig(port=0, kv_config_path=directory / "kvConfig.json")
    async with NameServer(names_config, SocketNetwork()) as names:
        settings = {
            "storePathRootDir": str(directory / "store"),
            "namesrvAddr": names.address,
            "brokerName": "demo",
            "listenPort": "0",
            "messageDelayLevel": FAST_DELAYS,
        }
        async with Broker(parse(settings)):
            yield names.address


class Client:
    """Finds queues by asking the name server, then talks to their brokers."""

    def __init__(self, pool: ConnectionPool, nameserver: str) -> None:
        self._pool = pool
        self._nameserver = nameserver
        self._brokers: dict[str, str] = {}

    async def ask(self, address: str, command: Command, timeout_ms: int = TIMEOUT_MS) -> Command:
        answer = await self._pool.request(address, command, timeout_ms)
        if answer.code not in _FINE:
            raise RuntimeError(f"request {command.code}: code {answer.code}, {answer.remark}")
        return answer

    async def queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues of a topic."""
        command = request(RequestCode.GET_ROUTEINFO_BY_TOPIC, RouteOf(topic=topic))
        route = TopicRoute.decode(whole_body(await self.ask(self._nameserver, command)))
        for broker in route.broker_datas:
            self._brokers[broker.broker_name] = broker.broker_addrs[0]
        return [
            MessageQueue(topic, data.broker_name, number)
            for data in route.queue_datas
            for number in range(data.read_queue_nums)
        ]

    async def send(self, queue: MessageQueue, key: str, tag: str, body: bytes) -> None:
        header = SendMessageV2(
            producer_group="demo-producer",
            topic=queue.topic,
            default_topic="TBW102",
            default_topic_queue_nums=4,
            queue_id=queue.queue_id,
            sys_flag=0,
            born_timestamp=int(time.time() * 1000),
            flag=0,
            properties=properties.encode({"KEYS": key, "TAGS": tag}),
        )
        await self.ask(
            self._brokers[queue.broker], request(RequestCode.SEND_MESSAGE_V2, header, body)
        )

    async def pull(
        self, group: str, queue: MessageQueue, offset: int, tags: str, hold_ms: int
    ) -> tuple[list[MessageView], int]:
        """Return messages and the next offset; waits for a message if there is none yet."""
        header = PullMessage(
            consumer_group=group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            queue_offset=offset,
            max_msg_nums=32,
            sys_flag=PULL_SUBSCRIPTION | PULL_SUSPEND,
            commit_offset=0,
            suspend_timeout_millis=hold_ms,
            subscription=tags,
            sub_version=0,
        )
        command = request(RequestCode.PULL_MESSAGE, header)
        answer = await self.ask(self._brokers[queue.broker], command, hold_ms + TIMEOUT_MS)
        following = PullMessageAnswer.from_ext_fields(answer.ext_fields).next_begin_offset
        return list(decode_records(whole_body(answer))), following

    async def send_back(self, group: str, queue: MessageQueue, message: MessageView) -> None:
        header = SendBack(
            offset=message.physical_offset,
            group=group,
            delay_level=0,
            max_reconsume_times=RETRIES_MAX,
        )
        command = request(RequestCode.CONSUMER_SEND_MSG_BACK, header)
        await self.ask(self._brokers[queue.broker], command)

    async def commit(self, group: str, queue: MessageQueue, offset: int) -> None:
        header = UpdateConsumerOffset(
            consumer_group=group, topic=queue.topic, queue_id=queue.queue_id, commit_offset=offset
        )
        command = request(RequestCode.UPDATE_CONSUMER_OFFSET, header)
        await self.ask(self._brokers[queue.broker], command)


_FINE = {
    ResponseCode.SUCCESS,
    ResponseCode.PULL_NOT_FOUND,
    ResponseCode.PULL_RETRY_IMMEDIATELY,
    ResponseCode.PULL_OFFSET_MOVED,
}


async def produce(client: Client) -> float:
    """Send all orders, many at a time; return how many a second."""
    await client.queues("TBW102")
    first = MessageQueue("orders", "demo", 0)
    started = time.perf_counter()
    numbers = iter(range(ORDERS))

    async def sender() -> None:
        for number in numbers:
            queue = MessageQueue(first.topic, first.broker, number % 4)
            tag = TAGS[number % len(TAGS)]
            await client.send(queue, f"order-{number}", tag, b'{"order": %d}' % number)

    async with asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(sender())
    return ORDERS / (time.perf_counter() - started)


async def consume(
    client: Client, group: str, topic: str, tags: str, fails: Iterable[str], wanted: int
) -> Seen:
    """Read a topic until so many messages were handled; those of failing orders are sent back."""
    seen, failing = Seen(), set(fails)
    queues = await client.queues(topic)

    async def reader(queue: MessageQueue) -> None:
        offset = 0
        while sum(seen.orders.values()) < wanted:
            messages, offset = await client.pull(group, queue, offset, tags, 300)
            for message in messages:
                seen.note(message)
                hopeless = int(message.keys[0].partition("-")[2]) % HOPELESS_EVERY == 0
                if message.keys[0] in failing and (hopeless or message.reconsume_times == 0):
                    await client.send_back(group, queue, message)
            await client.commit(group, queue, offset)

    async with asyncio.TaskGroup() as group_of_tasks:
        for queue in queues:
            group_of_tasks.create_task(reader(queue))
    return seen


async def demo(console: Console, directory: Path) -> bool:
    hopeless = [f"order-{n}" for n in range(0, ORDERS, HOPELESS_EVERY)]
    flaky = [f"order-{n}" for n in range(0, ORDERS, FLAKY_EVERY) if n % HOPELESS_EVERY]
    async with AsyncExitStack() as stack:
        nameserver = await stack.enter_async_context(cluster(directory))
        client = Client(
            await stack.enter_async_context(ConnectionPool(SocketNetwork())), nameserver
        )
        console.print(f"[bold]cluster up[/] name server {nameserver}")
        rate = await produce(client)
        console.print(f"[bold]sent[/] {ORDERS} orders, {rate:,.0f} a second")
        audit = await consume(client, "audit", "orders", "*", (), ORDERS)
        paid = ORDERS // len(TAGS)
        billing = await consume(client, "billing", "orders", "paid", (), paid)
        console.print("[bold]consumed[/] by [cyan]audit[/] (all) and [cyan]billing[/] (paid)")
        fails = [*hopeless, *flaky]
        first = await consume(client, "flaky", "orders", "*", fails, ORDERS)
        console.print(f"[bold]failed[/] {len(fails)} orders in [cyan]flaky[/]: retrying …")
        retries = len(flaky) + len(hopeless) * RETRIES_MAX
        again = await consume(client, "flaky", "%RETRY%flaky", "*", hopeless, retries)
        dead = await consume(client, "undertaker", "%DLQ%flaky", "*", (), len(hopeless))
        console.print(f"[bold]buried[/] {len(dead.orders)} orders after {RETRIES_MAX} retries")
    async with cluster(directory) as nameserver, ConnectionPool(SocketNetwork()) as pool:
        reread = await consume(Client(pool, nameserver), "reread", "orders", "*", (), ORDERS)
        console.print("[bold]restarted[/] the broker and read everything again")
    rows = [
        ("orders seen by audit", len(audit.orders), ORDERS),
        ("of them seen twice", sum(n > 1 for n in audit.orders.values()), 0),
        ("paid orders seen by billing", len(billing.orders), paid),
        ("orders seen by flaky", len(first.orders), ORDERS),
        ("retries delivered", again.retried, retries),
        ("orders in the dead letters", len(dead.orders), len(hopeless)),
        ("orders there after a restart", len(reread.orders), ORDERS),
    ]
    return summary(console, rows)


def summary(console: Console, rows: list[tuple[str, int, int]]) -> bool:
    """Print what was seen beside what must be; return whether all of it holds."""
    table = Table(title="What happened")
    for column in ("", "seen", "expected", ""):
        table.add_column(column, justify="right" if column else "left")
    for name, seen, expected in rows:
        table.add_row(name, f"{seen:,}", f"{expected:,}", "✓" if seen == expected else "✗")
    console.print(table)
    return all(seen == expected for _, seen, expected in rows)


def main() -> int:
    logging.basicConfig(level=logging.WARNING)
    started = time.perf_counter()
    console = Console()
    with tempfile.TemporaryDirectory() as directory:
        holds = run(demo(console, Path(directory)))
    verdict = "[green]all of it holds[/]" if holds else "[red]something is wrong[/]"
    console.print(f"{verdict}, after {time.perf_counter() - started:.1f} s")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
