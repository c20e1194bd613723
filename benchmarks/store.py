"""The store: appends, reads, tag scans, many queues; compared with raw disk writes.

Run: ``python benchmarks/store.py [--directory DIR] [--quick]``. It writes some gigabytes into a new
directory under DIR (default: the temporary directory) and removes it afterwards. The raw figures
are a plain loop of ``os.write`` with the same sizes, interleaved with the store's.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from block_appends import append_all
from measure import print_table
from turbopump.machine import Machine
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store import (
    Files,
    Filter,
    FlushConfig,
    FlushMode,
    Found,
    ReadLimits,
    Store,
    StoreConfig,
)
from turbopump.wire.hashing import tags_code
from turbopump.wire.hosts import host
from turbopump.wire.record import Record

HOST = host("10.20.30.40", 10911)
ROUNDS = 5
IN_FLIGHT = 32
SYNC = StoreConfig(flush=FlushConfig(mode=FlushMode.SYNC))


def record(body: bytes, number: int, queue_id: int = 0, tags: str = "TagA") -> Record:
    text = f"UNIQ_KEY\x017F00000147CE4E0E2F2A499A{number:08X}\x02TAGS\x01{tags}\x02KEYS\x01order-42"
    return Record(
        topic=b"orders",
        queue_id=queue_id,
        body=body,
        properties=text.encode(),
        born_timestamp_ms=1_794_728_296_982,
        born_host=HOST,
        store_host=HOST,
    )


class Bench:
    """Runs everything in one directory and collects rows for the tables."""

    def __init__(self, directory: Path, quick: bool) -> None:
        self.directory = directory
        self.scale = 10 if quick else 1
        self.number = 0

    def fresh(self) -> Path:
        self.number += 1
        return self.directory / str(self.number)

    def appends(self) -> None:
        rows = [self.asynchronous(size, at_once) for size in (128, 1024) for at_once in (1, 32)]
        raw = ("raw, one a write", "ratio", "raw, as many a write", "ratio")
        columns = ("async append", "messages/s", "MB/s", *raw)
        print_table(columns, rows)
        print()
        print_table(
            ("sync append", "messages/s", "flushes/s", "raw write + fdatasync/s"),
            [
                self.synchronous(size, at_once, waiting)
                for size in (128, 1024)
                for at_once, waiting in ((1, 1), (1, 32), (32, 1), (32, 32))
            ],
        )

    def asynchronous(self, size: int, at_once: int) -> tuple[str, ...]:
        """Compare with the same number of raw writes of the same size, in turn."""
        count = 64_000 // self.scale
        body = os.urandom(size)
        records = [record(body, number, number % 4) for number in range(count)]
        groups = [records[at : at + at_once] for at in range(0, count, at_once)]
        encoded = records[0].encode(QueueOffset(0), PhysicalOffset(0), 0)
        ours: list[float] = []
        single: list[float] = []
        joined: list[float] = []
        gc.collect()
        gc.freeze()
        for _ in range(ROUNDS):
            for found, together in ((single, 1), (joined, at_once)):
                write = partial(raw_writes, self.fresh(), encoded, together, count)
                found.append(count / self.timed(write))
            with Store.open(self.fresh()) as store:
                ours.append(count / self.timed(lambda: append_groups(store, groups)))
        gc.unfreeze()
        rate, one, many = (statistics.median(found) for found in (ours, single, joined))
        row = [f"{size} B, {at_once} a call", f"{rate:,.0f}", f"{rate * len(encoded) / 1e6:.0f}"]
        return (*row, f"{one:,.0f}", f"{rate / one:.2f}", f"{many:,.0f}", f"{rate / many:.2f}")

    def synchronous(self, size: int, at_once: int, waiting: int) -> tuple[str, ...]:
        """Store messages with a number of writers waiting at any time, as in a broker."""
        calls = 3000 // self.scale
        body = os.urandom(size)
        groups = [[record(body, number, number % 4) for number in range(at_once)]] * calls
        data = b"".join(each.encode(QueueOffset(0), PhysicalOffset(0), 0) for each in groups[0])
        raw = calls / self.timed(lambda: raw_synced(self.fresh(), data, calls))
        files = CountingFiles()
        with Store.open(self.fresh(), SYNC, machine=Machine(files=files)) as store:
            before = files.syncs
            seconds = self.timed(lambda: append_waiting(store, groups, waiting))
            rate = (files.syncs - before) / seconds
        name = f"{size} B, {at_once} a call, {waiting} waiting"
        return name, f"{calls * at_once / seconds:,.0f}", f"{rate:,.0f}", f"{raw:,.0f}"

    def reads(self) -> None:
        count = 200_000 // self.scale
        with Store.open(self.fresh()) as store:
            fill(store, count, 1024)
            rows = [
                (
                    "sequential, 32 a read",
                    f"{count / self.timed(lambda: read_through(store)):,.0f}",
                ),
                ("random, 1 a read", self.random_reads(store, count)),
                ("by unique key", self.key_reads(store, count)),
                ("by store time", self.time_reads(store, count)),
            ]
        print_table(("read 1 KiB messages", "messages/s"), rows)

    def random_reads(self, store: Store, count: int) -> str:
        chosen = random.Random(1)
        offsets = [QueueOffset(chosen.randrange(count // 4)) for _ in range(count // 4)]

        def read() -> None:
            for offset in offsets:
                assert isinstance(store.read("orders", 1, offset, 1), Found)

        return f"{len(offsets) / self.timed(read):,.0f}"

    def key_reads(self, store: Store, count: int) -> str:
        chosen = random.Random(2)
        keys = [f"7F00000147CE4E0E2F2A499A{chosen.randrange(count):08X}" for _ in range(5000)]

        def read() -> None:
            for key in keys:
                assert store.messages_by_key("orders", key, 1, 0, 1 << 60)

        store.messages_by_key("orders", keys[0], 1, 0, 1 << 60)
        return f"{len(keys) / self.timed(read):,.0f}"

    def time_reads(self, store: Store, count: int) -> str:
        first = store.store_timestamp_ms("orders", 1, QueueOffset(0)) or 0
        last = store.store_timestamp_ms("orders", 1, QueueOffset(count // 4 - 1)) or 0
        chosen = random.Random(3)
        moments = [chosen.randint(first, last) for _ in range(5000)]

        def read() -> None:
            for moment in moments:
                store.offset_by_time("orders", 1, moment)

        return f"{len(moments) / self.timed(read):,.0f}"

    def tag_scan(self) -> None:
        count = 300_000 // self.scale
        wanted = Filter(tags_codes=frozenset({tags_code("Rare")}))
        rows = []
        with Store.open(self.fresh()) as store:
            for at in range(0, count, 500):
                rare = [record(b"", at, tags="Rare")] if at == count // 2 else []
                append_all(store, [record(b"", at)] * 500 + rare)
            for units in (800, 20_000):
                limits = ReadLimits(scan_units_max=units)
                seconds = self.timed(partial(scan_through, store, wanted, limits))
                rate = f"{count / seconds / 1e6:,.1f} million"
                rows.append((f"rare tag, {units} units a read", rate))
        print_table(("tag scan", "units/s"), rows)

    def many_queues(self) -> None:
        queues = 10_000 // self.scale
        path = self.fresh()
        before = memory_bytes()
        with Store.open(path) as store:
            started = time.perf_counter()
            for at in range(0, queues, 100):
                numbers = range(at, at + 100)
                append_all(store, [record(b"x" * 100, 1, number) for number in numbers])
            append_s = time.perf_counter() - started
            each = (memory_bytes() - before) / queues
            started = time.perf_counter()
        close_s = time.perf_counter() - started
        with Store.open(path):
            # Completes the work that closing left to the next start.
            pass
        idle = idle_bytes(path) / queues
        started = time.perf_counter()
        with Store.open(path) as store:
            open_s = time.perf_counter() - started
            open_files = len(list(Path("/proc/self/fd").iterdir()))
            started = time.perf_counter()
            for number in range(queues):
                assert isinstance(store.read("orders", number, QueueOffset(0), 1), Found)
            read_s = time.perf_counter() - started
        rows = [
            ("one message to each, s", f"{append_s:.2f}"),
            ("memory per queue with one unwritten unit, bytes", f"{each:,.0f}"),
            ("closing, s", f"{close_s:.2f}"),
            ("opening, s", f"{open_s:.2f}"),
            ("memory per idle queue, bytes", f"{idle:,.0f}"),
            ("open files then", f"{open_files}"),
            ("one read from each, s", f"{read_s:.2f}"),
        ]
        print_table((f"{queues:,} queues", ""), rows)

    @staticmethod
    def timed(action: Callable[[], None]) -> float:
        started = time.perf_counter()
        action()
        return time.perf_counter() - started


def append_groups(store: Store, calls: list[list[Record]]) -> None:
    for call in calls:
        append_all(store, call)


def append_waiting(store: Store, calls: list[list[Record]], waiting: int) -> None:
    """Append with a window of unacknowledged calls."""
    window = []
    for call in calls:
        window.append(append_all(store, call)[-1].durable)
        if len(window) == waiting:
            window.pop(0).result()
    for durable in window:
        durable.result()


class CountingFiles(Files):
    """Counts the number of syncs."""

    def __init__(self) -> None:
        self.syncs = 0

    def sync(self, fd: int) -> None:
        self.syncs += 1
        super().sync(fd)


def raw_writes(path: Path, data: bytes, at_once: int, count: int) -> None:
    joined = data * at_once
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    for _ in range(count // at_once):
        os.write(fd, joined)
    os.close(fd)
    path.unlink()


def raw_synced(path: Path, data: bytes, calls: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    for _ in range(calls):
        os.write(fd, data)
        os.fdatasync(fd)
    os.close(fd)
    path.unlink()


def fill(store: Store, count: int, size: int) -> None:
    body = os.urandom(size)
    for at in range(0, count, 100):
        batch = range(at, min(at + 100, count))
        append_all(store, [record(body, number, number % 4) for number in batch])


def read_through(store: Store) -> None:
    for queue_id in range(4):
        offset, end = store.queue_range("orders", queue_id)
        while offset < end:
            offset = store.read("orders", queue_id, offset, 32).next_offset


def scan_through(store: Store, wanted: Filter, limits: ReadLimits) -> None:
    offset, end = store.queue_range("orders", 0)
    while offset < end:
        offset = store.read("orders", 0, offset, 32, wanted, limits).next_offset


IDLE = """
import gc, sys, tracemalloc
from turbopump.store import Store
tracemalloc.start()
gc.collect()
before = tracemalloc.get_traced_memory()[0]
with Store.open(sys.argv[1]):
    gc.collect()
    print(tracemalloc.get_traced_memory()[0] - before)
"""


def idle_bytes(path: Path) -> int:
    """Return the memory of an open, idle store.

    Measured in a new process: this one would reuse memory that is already free.
    """
    command = [sys.executable, "-c", IDLE, str(path)]
    return int(subprocess.run(command, check=True, capture_output=True).stdout)


def memory_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    parser.add_argument("--only", choices=("appends", "reads", "tag_scan", "many_queues"))
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        bench = Bench(root, options.quick)
        parts = ("many_queues", "appends", "reads", "tag_scan")
        for part in (options.only,) if options.only else parts:
            getattr(bench, part)()
            print()
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
