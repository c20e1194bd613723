"""How long sends take while a consumer drains messages that are not in memory.

    python benchmarks/cold_reads.py [--megabytes 1024] [--pulls 100] [--seconds 5] [--directory DIR]

A backlog is stored and dropped from the page cache. Sends at a steady rate are timed alone, beside
a drain of a part of that backlog, and beside the same drain once more, when it is in memory: both
drains pull at the same rate, so that the disk is the only difference. The page faults that made the
event loop's thread wait for the disk are counted too, as other work on the machine does not change
their number.

The system's disk may be too fast to show a difference. Run the benchmark in a cgroup that limits
reads (``blkio.throttle.read_iops_device``, or ``io.max`` with ``riops``) to see a slower one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TypeAlias

from bare_frames import batch_request, flood, pull_request, send_request
from broker_process import TIMEOUT_MS, Server, connected, started
from measure import print_table
from turbopump.net.connection import Connection
from turbopump.net.loop import run
from turbopump.wire.codes import ResponseCode
from turbopump.wire.headers import PullMessageAnswer

BODY = b"x" * 8000
"""32 of them are the most that a pull returns of messages recent enough to be in memory."""
SENDS_PER_SECOND = 500
PARALLEL_DRAINS = 4
BESIDE = ("nothing", "a cold drain", "a warm drain")
SHARES = (0.5, 0.9, 0.99, 1.0)

Round: TypeAlias = tuple[str, list[float], float, int]
"""What was measured, times of the sends, megabytes a second of the drain, and page faults."""


async def fill(address: str, size: int) -> int:
    """Store a backlog of at least a size in queue 0; return the offset of its end."""
    count = 0
    while count * len(BODY) < size:
        count += 32 * await flood(address, 4, 0.2, batch_request(32, BODY))
    return count


def drop(directory: Path) -> None:
    """Drop a store's files from the page cache; parts that a process has mapped stay."""
    for file in directory.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


async def drain(address: str, rate: float, seconds: float, offsets: range) -> int:
    """Pull some offsets at a rate, over a connection of its own; return the bytes received."""
    async with connected(address) as puller:
        return await pulled(puller, rate, seconds, offsets)


async def pulled(connection: Connection, rate: float, seconds: float, offsets: range) -> int:
    begun, pulls, size, offset = time.perf_counter(), 0, 0, offsets.start
    while offset in offsets and (elapsed := time.perf_counter() - begun) < seconds:
        if pulls > elapsed * rate:
            await asyncio.sleep(pulls / rate - elapsed)
        answer = await connection.request(pull_request(offset), TIMEOUT_MS)
        assert answer.code == ResponseCode.SUCCESS, answer
        offset = PullMessageAnswer.from_ext_fields(answer.ext_fields).next_begin_offset
        size += sum(map(len, answer.body)) if isinstance(answer.body, tuple) else len(answer.body)
        pulls += 1
    return size


async def timed_sends(connection: Connection, seconds: float) -> list[float]:
    """Send at a steady rate, however long answers take; return their times in milliseconds."""
    times_ms: list[float] = []

    async def send() -> None:
        begun = time.perf_counter()
        answer = await connection.request(send_request(2), TIMEOUT_MS)
        assert answer.code == ResponseCode.SUCCESS, answer
        times_ms.append((time.perf_counter() - begun) * 1000)

    begun = time.perf_counter()
    async with asyncio.TaskGroup() as pending:
        for number in range(int(seconds * SENDS_PER_SECOND)):
            left_s = begun + number / SENDS_PER_SECOND - time.perf_counter()
            await asyncio.sleep(max(0.0, left_s))
            pending.create_task(send())
    return sorted(times_ms)


async def measured(
    address: str, pulls: float, seconds: float, offsets: range
) -> tuple[list[float], float]:
    """Return the times of sends beside a drain, and the megabytes a second that it received."""
    sizes: list[asyncio.Task[int]] = []
    share = len(offsets) // PARALLEL_DRAINS
    async with asyncio.TaskGroup() as together:
        for first in offsets[::share][:PARALLEL_DRAINS] if pulls else ():
            part = range(first, first + share)
            job = drain(address, pulls / PARALLEL_DRAINS, seconds, part)
            sizes.append(together.create_task(job))
        async with connected(address) as sender:
            times_ms = await timed_sends(sender, seconds)
    return times_ms, sum(size.result() for size in sizes) / seconds / 1e6


async def rounds(options: argparse.Namespace, store: Path, running: Server) -> list[Round]:
    """Measure with another part of the backlog in each round, as the broker keeps what it read."""
    end = await fill(running.address, options.megabytes << 20)
    await asyncio.sleep(2)
    drop(store)
    found: list[Round] = []
    for number in range(options.rounds):
        part = range(end * number // options.rounds, end * (number + 1) // options.rounds)
        for beside, pulls in zip(BESIDE, (0, options.pulls, options.pulls), strict=True):
            before = loop_faults(running.process.pid)
            times_ms, rate = await measured(running.address, pulls, options.seconds, part)
            found.append((beside, times_ms, rate, loop_faults(running.process.pid) - before))
    return found


def loop_faults(pid: int) -> int:
    """Return how often the main thread of a process waited for the disk to read a page."""
    text = Path(f"/proc/{pid}/task/{pid}/stat").read_text(encoding="utf-8")
    return int(text.rpartition(")")[2].split()[9])


def report(found: list[Round]) -> None:
    """Print the medians of all rounds."""
    rows, p99s = [], []
    for name in BESIDE:
        mine = [each for each in found if each[0] == name]
        shares = [median(quantile(each[1], share) for each in mine) for share in SHARES]
        drained, faults = median(each[2] for each in mine), median(each[3] for each in mine)
        times = [f"{share:.2f}" for share in shares]
        rows.append([name, f"{drained:.0f}", f"{faults:.0f}", *times])
        p99s.append(shares[SHARES.index(0.99)])
    columns = ["drained MB/s", "faults of the loop", "p50 ms", "p90 ms", "p99 ms", "max ms"]
    print_table(["sends beside", *columns], rows)
    print(f"\np99 beside a cold drain: {p99s[1] / p99s[2]:.1f} times that beside a warm one")


def quantile(times_ms: list[float], share: float) -> float:
    return times_ms[min(len(times_ms) - 1, int(len(times_ms) * share))]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1024, help="stored before the drains")
    parser.add_argument("--pulls", type=float, default=100, help="per second, up to 256 KB each")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", help="where to store: not a file system in memory")
    options = parser.parse_args()
    ports = ("--nameserver-port", "0", "--broker-port", "0")
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        store = Path(directory, "store")
        with started("standalone", "--dir", str(store), *ports) as running:
            report(await rounds(options, store, running))


if __name__ == "__main__":
    run(main())
