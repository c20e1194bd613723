"""A broker in a process of its own, and clients in this one: pulls, waiting, latency, delays.

    python benchmarks/broker.py [--seconds 1] [--only pulls,held,latency,delays]

Clients exchange bare frames, so that what is measured is the broker. `benchmarks/run` measures
sends.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from bare_frames import PROPERTIES, flood, send_request
from measure import print_table
from turbopump.bench.sample import process_cpu_s
from turbopump.net.connection import Connection
from turbopump.net.loop import run
from turbopump.net.pool import ConnectionPool
from turbopump.net.sockets import SocketNetwork
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command, request, whole_body
from turbopump.wire.headers import PullMessage, PullMessageAnswer
from turbopump.wire.record import decode_records
from turbopump.wire.sysflag import PULL_SUBSCRIPTION, PULL_SUSPEND

TIMEOUT_MS = 10_000
HELD = 50_000
HOLDERS = 50
DUE_PER_SECOND = 10_000

Ask = Callable[[Command], Awaitable[Command]]


def pull_request(offset: int, queue_id: int = 0, hold_ms: int = 0, tags: str = "*") -> Command:
    header = PullMessage(
        consumer_group="benchmark",
        topic="Bench",
        queue_id=queue_id,
        queue_offset=offset,
        max_msg_nums=32,
        sys_flag=PULL_SUBSCRIPTION | (PULL_SUSPEND if hold_ms else 0),
        commit_offset=0,
        suspend_timeout_millis=hold_ms,
        subscription=tags,
        sub_version=0,
    )
    return request(11, header)


class Server:
    """The broker's process."""

    def __init__(self, process: subprocess.Popen[str], address: str, nameserver: str = "") -> None:
        self.process = process
        self.address = address
        self.nameserver = nameserver

    @property
    def cpu_s(self) -> float:
        return process_cpu_s(self.process.pid)

    @property
    def memory_mib(self) -> float:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.partition("VmRSS:")[2].split()[0]) / 1024


@contextmanager
def started(*arguments: str) -> Iterator[Server]:
    """Run a command that prints where its broker listens, in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "turbopump", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    ready = process.stdout.readline()
    try:
        addresses = dict(word.split("=") for word in ready.split()[1:])
        yield Server(process, addresses["broker"], addresses.get("nameserver", ""))
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def server(*options: str) -> Iterator[Server]:
    ports = ("--nameserver-port", "0", "--broker-port", "0")
    with (
        tempfile.TemporaryDirectory() as directory,
        started("standalone", "--dir", directory, *ports, *options) as made,
    ):
        yield made


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Connection]:
    async with ConnectionPool(SocketNetwork()) as pool:
        yield await pool.connection(address)


async def measured(
    running: Server, in_flight: int, seconds: float, command: Command
) -> tuple[float, float, float]:
    """Return requests a second, and CPU microseconds of server and client for each."""
    await flood(running.address, in_flight, seconds / 4, command)
    server_s, client_s, started = running.cpu_s, time.process_time(), time.perf_counter()
    done = await flood(running.address, in_flight, seconds, command)
    rate = done / (time.perf_counter() - started)
    server_us = (running.cpu_s - server_s) / done * 1e6
    return rate, server_us, (time.process_time() - client_s) / done * 1e6


async def pulls(seconds: float) -> None:
    with server() as running:
        async with connected(running.address) as connection:
            await flood(running.address, 64, seconds, send_request())
            offset = count = 0
            server_s, started = running.cpu_s, time.perf_counter()
            while True:
                answer = await connection.request(pull_request(offset), TIMEOUT_MS)
                if answer.code != ResponseCode.SUCCESS:
                    break
                following = PullMessageAnswer.from_ext_fields(answer.ext_fields).next_begin_offset
                count += following - offset
                offset = following
            elapsed = time.perf_counter() - started
            server_us = (running.cpu_s - server_s) / count * 1e6
    print("\nPulling a backlog, 32 messages a pull, one pull at a time\n")
    columns = ["messages", "messages/s", "server CPU µs per message"]
    print_table(columns, [[f"{count:,}", f"{count / elapsed:,.0f}", f"{server_us:.1f}"]])


async def held(seconds: float) -> None:
    """Send with and without tens of thousands of pulls held, in turn."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    costs_us: dict[bool, list[float]] = {False: [], True: []}

    async def send(is_held: bool) -> None:
        rate, server_us, _ = await measured(running, 64, seconds, send_request())
        rates[is_held].append(rate)
        costs_us[is_held].append(server_us)

    with server() as running:
        async with connected(running.address) as connection:
            await connection.request(send_request(1), TIMEOUT_MS)
            held_mib = 0.0
            for _ in range(3):
                await send(is_held=False)
                before_mib = running.memory_mib
                async with AsyncExitStack() as stack:
                    for _ in range(HOLDERS):
                        await hold_many(await stack.enter_async_context(connected(running.address)))
                    held_mib = max(held_mib, running.memory_mib - before_mib)
                    await send(is_held=True)
    without, with_held = statistics.median(rates[False]), statistics.median(rates[True])
    print(f"\n{HELD:,} pulls held, half of them on the same queue, sends with 64 in flight\n")
    print_table(
        ["sends/s without", "sends/s with", "ratio", "server CPU µs", "KiB per held pull"],
        [
            [
                f"{without:,.0f}",
                f"{with_held:,.0f}",
                f"{with_held / without:.2f}",
                " → ".join(f"{statistics.median(costs):.1f}" for costs in costs_us.values()),
                f"{held_mib * 1024 / HELD:.1f}",
            ]
        ],
    )


async def hold_many(connection: Connection) -> None:
    """Leave pulls waiting, half of them on the queue that is sent to, for tags that no message has.

    One-way requests are held just the same, and need no answer here.
    """
    answer = await connection.request(pull_request(1 << 40), TIMEOUT_MS)
    end = PullMessageAnswer.from_ext_fields(answer.ext_fields).max_offset
    for number in range(HELD // HOLDERS):
        offset, queue_id = (end, 0) if number % 2 else (1, 1)
        command = pull_request(offset, queue_id, hold_ms=600_000, tags=f"tag-{number % 100}")
        await connection.oneway_in_time(command, TIMEOUT_MS)
    await connection.request(pull_request(0, queue_id=1), TIMEOUT_MS)


async def latency(seconds: float) -> None:
    rows = []
    with server() as running:
        async with connected(running.address) as sender:
            full_rate, _, _ = await measured(running, 64, seconds, send_request(2))
            async with connected(running.address) as puller:
                for name, rate in (("200 a second", 200.0), ("half of the most", full_rate / 2)):
                    times_ms = sorted(await send_to_pull(sender, puller, rate, seconds * 3))
                    middle = times_ms[len(times_ms) // 2]
                    rows.append(
                        [name, f"{middle:.2f}", f"{times_ms[int(len(times_ms) * 0.99)]:.2f}"]
                    )
    print("\nFrom send to answered pull\n")
    print_table(["load", "p50 ms", "p99 ms"], rows)


async def send_to_pull(
    sender: Connection, puller: Connection, rate: float, seconds: float
) -> list[float]:
    """Send probes at a steady pace, among a load on another queue; time each until it is pulled."""
    answer = await puller.request(pull_request(1 << 40), TIMEOUT_MS)
    offset = PullMessageAnswer.from_ext_fields(answer.ext_fields).max_offset
    times_ms: list[float] = []
    load = asyncio.create_task(steady(sender, rate, seconds))
    while not load.done():
        held_pull = asyncio.create_task(
            puller.request(pull_request(offset, hold_ms=5000), TIMEOUT_MS)
        )
        await asyncio.sleep(0.004)
        started = time.perf_counter()
        probe = asyncio.create_task(sender.request(send_request(), TIMEOUT_MS))
        answer = await held_pull
        times_ms.append((time.perf_counter() - started) * 1000)
        await probe
        offset = PullMessageAnswer.from_ext_fields(answer.ext_fields).next_begin_offset
    await load
    return times_ms


async def delays(seconds: float) -> None:
    """Let so many delayed messages fall due each second, and see how late they are delivered."""
    with server() as running:
        async with connected(running.address) as connection:
            await connection.request(send_request(), TIMEOUT_MS)
            delayed = f"{PROPERTIES}\x02DELAY\x011"
            server_s = running.cpu_s
            sent = await steady(connection, DUE_PER_SECOND, seconds * 4, delayed)
            late_ms = await lateness(connection, sent)
            server_us = (running.cpu_s - server_s) / sent * 1e6
    late_ms.sort()
    middle, most = late_ms[len(late_ms) // 2], late_ms[-1]
    print(f"\nDelayed messages, {DUE_PER_SECOND:,} due a second\n")
    columns = ["messages", "earliest ms", "p50 late ms", "most late ms", "server CPU µs"]
    row = [f"{sent:,}", str(late_ms[0]), str(middle), str(most), f"{server_us:.1f}"]
    print_table(columns, [row])


async def lateness(connection: Connection, count: int) -> list[int]:
    """Read delayed messages as they are delivered; return how late each of them was."""
    late_ms: list[int] = []
    offset = 0
    while len(late_ms) < count:
        answer = await connection.request(pull_request(offset, queue_id=2, hold_ms=5000), 10_000)
        offset = PullMessageAnswer.from_ext_fields(answer.ext_fields).next_begin_offset
        late_ms += [
            view.store_timestamp_ms - view.born_timestamp_ms - 1000
            for view in decode_records(whole_body(answer))
        ]
    return late_ms


async def steady(
    connection: Connection, rate: float, seconds: float, properties: str = PROPERTIES
) -> int:
    """Send at a rate, in small bursts as timers allow; return how many."""
    started, sent = time.perf_counter(), 0
    async with asyncio.TaskGroup() as pending:
        while (elapsed := time.perf_counter() - started) < seconds:
            for _ in range(int(elapsed * rate) - sent):
                sent += 1
                command = send_request(2, properties=properties)
                pending.create_task(stored(connection, command))
            await asyncio.sleep(0.001)
    return sent


async def stored(connection: Connection, command: Command) -> None:
    """Send a message that must be stored, or there would be none to wait for."""
    answer = await connection.request(command, TIMEOUT_MS)
    assert answer.code == ResponseCode.SUCCESS, answer


PARTS: dict[str, Callable[[float], Awaitable[None]]] = {
    "pulls": pulls,
    "held": held,
    "latency": latency,
    "delays": delays,
}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--only", default=",".join(PARTS))
    options = parser.parse_args()
    for part in options.only.split(","):
        await PARTS[part](options.seconds)


if __name__ == "__main__":
    run(main())
