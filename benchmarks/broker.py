"""A broker in a separate process, with clients in this one: pulls, latency, delays.

    python benchmarks/broker.py [--seconds 1] [--only pulls,latency,delays]

Clients exchange bare frames, so that the broker dominates the figures. `benchmarks/run` measures
sends, `benchmarks/growth.py` the cost of waiting long polls.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable

from bare_frames import PROPERTIES, flood, pull_request, send_request
from broker_process import TIMEOUT_MS, Server, connected, server
from measure import print_table
from turbopump.net.connection import Connection
from turbopump.net.loop import run
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command, whole_body
from turbopump.wire.headers import PullMessageAnswer
from turbopump.wire.record import decode_records

DUE_PER_SECOND = 10_000


async def measured(
    running: Server, in_flight: int, seconds: float, command: Command
) -> tuple[float, float, float]:
    """Return requests per second, and the server's and client's CPU microseconds per request."""
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
    """Send probes at a steady rate, under load on another queue; time each until it is pulled."""
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
    """Send delayed messages at a fixed rate, and measure how late they are delivered."""
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
    """Read delayed messages as they are delivered; return the lateness of each."""
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
    """Send at a rate, in small bursts as timers permit; return the number sent."""
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
    """Send a message, and require that it is stored: the reader waits for every one."""
    answer = await connection.request(command, TIMEOUT_MS)
    assert answer.code == ResponseCode.SUCCESS, answer


PARTS: dict[str, Callable[[float], Awaitable[None]]] = {
    "pulls": pulls,
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
