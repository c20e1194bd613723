"""A broker in a process of its own, and clients in this one: sends, pulls, waiting, latency.

    python benchmarks/broker.py [--seconds 1] [--only sends,batches,pulls,held,latency,delays]

Clients speak in plain frames, so that what is measured is the broker. The Java original's figures
on a machine of this size are printed beside ours.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import cast

from msgspec.structs import replace

from measure import print_table
from turbopump.net.connection import Connection
from turbopump.net.loop import run
from turbopump.net.pool import ConnectionPool
from turbopump.net.sockets import SocketNetwork
from turbopump.wire.batch import BatchEntry, encode_batch
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command, request, whole_body
from turbopump.wire.framing import FrameDecoder, encode
from turbopump.wire.headers import PullMessage, PullMessageAnswer, SendMessageV2
from turbopump.wire.hosts import split_address
from turbopump.wire.record import decode_records
from turbopump.wire.sysflag import PULL_SUBSCRIPTION, PULL_SUSPEND

TIMEOUT_MS = 10_000
BODY = b"x" * 128
PROPERTIES = "UNIQ_KEY\x017F00000100002A9F0000000000000000\x02WAIT\x01true\x02TAGS\x01TagA"
BATCH = 32
HELD = 50_000
HOLDERS = 50
DUE_PER_SECOND = 10_000
JAVA_SENDS = {1: "2,500–4,000", 8: "9,400–11,500", 64: "18,000–19,000 (32)", 512: "51,000–59,000"}

Ask = Callable[[Command], Awaitable[Command]]


def send_request(
    queue_id: int = 0, body: bytes = BODY, *, batch: bool = False, properties: str = PROPERTIES
) -> Command:
    header = SendMessageV2(
        producer_group="benchmark",
        topic="Bench",
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=queue_id,
        sys_flag=0,
        born_timestamp=int(time.time() * 1000),
        flag=0,
        properties=properties,
        batch=batch,
    )
    return request(320 if batch else 310, header, body)


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

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process = process
        self.address = address

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def memory_mib(self) -> float:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.partition("VmRSS:")[2].split()[0]) / 1024


@contextmanager
def server(*options: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "turbopump", "standalone", "--dir", directory]
        ports = ["--nameserver-port", "0", "--broker-port", "0"]
        process = subprocess.Popen(
            [*command, *ports, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        ready = process.stdout.readline()
        try:
            yield Server(process, ready.rpartition("broker=")[2].strip())
        finally:
            process.terminate()
            process.wait(10)


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Connection]:
    async with ConnectionPool(SocketNetwork()) as pool:
        yield await pool.connection(address)


class Flood(asyncio.Protocol):
    """Keeps requests in flight: each answer is checked, and makes room for the next request."""

    def __init__(self, command: Command, in_flight: int, seconds: float) -> None:
        self.answered = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._command = command
        self._in_flight = in_flight
        self._end = time.perf_counter() + seconds
        self._decoder = FrameDecoder()
        self._waiting: set[int] = set()
        self._opaque = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send(self._in_flight)

    def data_received(self, data: bytes) -> None:
        before = len(self._waiting)
        for answer in self._decoder.feed(data):
            assert answer.code == ResponseCode.SUCCESS, answer
            self._waiting.remove(answer.opaque)
        answered = before - len(self._waiting)
        self.answered += answered
        if time.perf_counter() < self._end:
            self._send(answered)
        elif not self._waiting:
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionResetError("closed by the broker"))

    def _send(self, count: int) -> None:
        numbers = range(self._opaque, self._opaque + count)
        self._opaque += count
        self._waiting.update(numbers)
        frames = [encode(replace(self._command, opaque=number)) for number in numbers]
        self._transport.write(b"".join(frames))


async def flood(address: str, in_flight: int, seconds: float, command: Command) -> int:
    """Keep so many requests in flight on a connection; return how many were answered."""
    host, port = split_address(address)
    transport, requests = await asyncio.get_running_loop().create_connection(
        lambda: Flood(command, in_flight, seconds), host, port
    )
    try:
        await requests.done
    finally:
        transport.close()
    return requests.answered


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


async def sends(seconds: float) -> None:
    rows = []
    with server() as running:
        for in_flight in (1, 8, 64, 512):
            rate, server_us, client_us = await measured(running, in_flight, seconds, send_request())
            row = [str(in_flight), f"{rate:,.0f}", JAVA_SENDS[in_flight]]
            rows.append([*row, f"{server_us:.1f}", f"{client_us:.1f}"])
    print("\nSends of 128 bytes, asynchronous flush\n")
    columns = ["in flight", "sends/s", "Java original", "server CPU µs", "client CPU µs"]
    print_table(columns, rows)


async def batches(seconds: float) -> None:
    entries = [BatchEntry(BODY, PROPERTIES.encode()) for _ in range(BATCH)]
    command = send_request(body=encode_batch(entries), batch=True)
    with server() as running:
        rate, server_us, _ = await measured(running, 16, seconds, command)
    print(f"\nBatches of {BATCH}\n")
    columns = ["batches/s", "messages/s", "server CPU µs per message"]
    print_table(columns, [[f"{rate:,.0f}", f"{rate * BATCH:,.0f}", f"{server_us / BATCH:.1f}"]])


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
    "sends": sends,
    "batches": batches,
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
