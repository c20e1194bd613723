"""Echo over loopback: the cost of a request and its answer, compared with a minimal prototype.

The server runs in one process and the client in another. "Prototype" is the shortest protocol that
exchanges the same frames: a dictionary of futures and one write per frame, without timeouts,
limits, backpressure or corking. Both are measured in turn within one run, so their ratio is
reliable even on a noisy machine, where the absolute figures are not.

    python benchmarks/echo.py [--seconds 0.5] [--rounds 5] [--body-bytes 256]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

from msgspec.structs import replace

from measure import print_table
from turbopump.net.connection import Connection
from turbopump.net.deadlines import Deadlines
from turbopump.net.loop import run
from turbopump.net.router import Router
from turbopump.net.server import Server
from turbopump.net.sockets import SocketNetwork
from turbopump.wire.command import Command, body_parts
from turbopump.wire.framing import FrameDecoder, encode

IN_FLIGHT = (1, 8, 64, 512)
ECHO = 310
CPU_TIME = 1
TIMEOUT_MS = 3000

SEND_HEADER = {
    "a": "please_rename_unique_group_name",
    "b": "TopicTest",
    "c": "TBW102",
    "d": "4",
    "e": "3",
    "f": "0",
    "g": "1700000000000",
    "h": "0",
    "i": "UNIQ_KEY\x017F00000100002A9F0000000000000000\x02WAIT\x01true\x02TAGS\x01TagA",
    "j": "0",
    "k": "false",
    "m": "false",
}

COLUMNS = [
    "in flight",
    "requests/s",
    "server CPU µs",
    "client CPU µs",
    "prototype requests/s",
    "ratio",
    "CPU ratio",
]

Call = Callable[[Command], Awaitable[Command]]


# --- the prototype --------------------------------------------------------------------------------


class Prototype(asyncio.Protocol):
    """Both sides of the prototype."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.decoder = FrameDecoder()
        self.pending: dict[int, asyncio.Future[Command]] = {}
        self.opaque = 0

    def data_received(self, data: bytes) -> None:
        for command in self.decoder.feed(data):
            if command.is_response:
                self.pending.pop(command.opaque).set_result(command)
            else:
                self.transport.write(encode(answered(command)))

    def request(self, command: Command) -> asyncio.Future[Command]:
        self.opaque += 1
        future = self.pending[self.opaque] = asyncio.get_running_loop().create_future()
        self.transport.write(encode(replace(command, opaque=self.opaque)))
        return future


def answered(request: Command) -> Command:
    """Echo a request, or return the CPU time of this process."""
    if request.code == CPU_TIME:
        return request.answer(0, body=str(time.process_time_ns()).encode())
    return request.answer(0, body=request.body)


# --- the server's process -------------------------------------------------------------------------


async def serve() -> None:
    """Serve both kinds on two ports until stdin is closed."""
    prototypes = await asyncio.get_running_loop().create_server(Prototype, "127.0.0.1", 0)
    router = Router({code: lambda request, _: answered(request) for code in (ECHO, CPU_TIME)})
    async with Server(SocketNetwork(), router) as server:
        print(server.port, prototypes.sockets[0].getsockname()[1], flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    prototypes.close()


# --- the client's process -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """One round: the cost of one request."""

    per_s: float
    server_us: float
    client_us: float


async def server_cpu_ns(call: Call) -> int:
    return int(b"".join(body_parts((await call(Command(CPU_TIME))).body)))


async def measure(call: Call, command: Command, in_flight: int, seconds: float) -> Sample:
    """Keep ``in_flight`` requests in flight for a duration."""
    count = 0

    async def caller() -> None:
        nonlocal count
        while time.perf_counter() < end:
            await call(command)
            count += 1

    server_ns = await server_cpu_ns(call)
    client_ns, start = time.process_time_ns(), time.perf_counter()
    end = start + seconds
    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(caller())
    elapsed = time.perf_counter() - start
    client_ns = time.process_time_ns() - client_ns
    server_ns = await server_cpu_ns(call) - server_ns
    return Sample(count / elapsed, server_ns / count / 1000, client_ns / count / 1000)


async def compare(ports: tuple[int, int], options: argparse.Namespace) -> None:
    """Measure both kinds in turn and print the table."""
    router, deadlines = Router(), Deadlines()
    ours = await SocketNetwork().connect(
        "127.0.0.1", ports[0], lambda: Connection(router, deadlines)
    )
    theirs = await SocketNetwork().connect("127.0.0.1", ports[1], Prototype)
    command = Command(ECHO, ext_fields=SEND_HEADER, body=b"x" * options.body_bytes)
    print(f"{options.body_bytes} bytes of body, {type(asyncio.get_running_loop()).__module__} loop")
    rows: list[list[str]] = []
    for in_flight in IN_FLIGHT:
        samples: tuple[list[Sample], list[Sample]] = ([], [])
        for _ in range(options.rounds):
            for kind, call in enumerate((lambda c: ours.request(c, TIMEOUT_MS), theirs.request)):
                samples[kind].append(await measure(call, command, in_flight, options.seconds))
        rows.append(row(in_flight, median(samples[0]), median(samples[1])))
    print_table(COLUMNS, rows)
    ours.close()
    theirs.transport.close()


def median(samples: list[Sample]) -> Sample:
    return Sample(
        statistics.median(sample.per_s for sample in samples),
        statistics.median(sample.server_us for sample in samples),
        statistics.median(sample.client_us for sample in samples),
    )


def row(in_flight: int, ours: Sample, theirs: Sample) -> list[str]:
    cpu_ratio = (ours.server_us + ours.client_us) / (theirs.server_us + theirs.client_us)
    return [
        str(in_flight),
        f"{ours.per_s:,.0f}",
        f"{ours.server_us:.1f}",
        f"{ours.client_us:.1f}",
        f"{theirs.per_s:,.0f}",
        f"{ours.per_s / theirs.per_s:.2f}",
        f"{cpu_ratio:.2f}",
    ]


async def main(options: argparse.Namespace) -> None:
    server = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        "--serve",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    ours, theirs = map(int, (await server.stdout.readline()).split())
    try:
        await compare((ours, theirs), options)
    finally:
        server.stdin.close()
        await server.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each; the median counts")
    parser.add_argument("--body-bytes", type=int, default=256, help="size of the echoed body")
    parser.add_argument("--serve", action="store_true", help="be the server (used by itself)")
    arguments = parser.parse_args()
    run(serve() if arguments.serve else main(arguments))
