"""Topics read and written by Spark, beside what its Python interface can do and beside Parquet.

    python benchmarks/spark.py [--rows 300000] [--cores 1,2]
                               [--only read,stream,write,latency,queues]

The broker is a process of its own and shares the processors with Spark, as do Spark's JVM and its
Python workers: what a row costs each of them is shown, too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from measure import print_table
from spark_queries import Bodies, Setting
from spark_queues import EACH, create_topic, look_results, read_results, send_to_each
from turbopump.client.outgoing import split_batch
from turbopump.client.producer import Producer
from turbopump.errors import RemoteError
from turbopump.message import Message
from turbopump.net.loop import run
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.reading.partition_planner import QueueRange
from turbopump.spark.reading.partition_reader import PartitionReader

HERE = Path(__file__).parent
PARTS = ("read", "stream", "write", "latency", "queues")
BODIES = (Bodies(128, 128), Bodies(1024, 1024), Bodies(64, 192))
QUEUES = 4
"""What a topic has by default."""
MANY_QUEUES = 10_000
MOST_QUEUES = 64_000
READY_ROWS = 8192
LATENCY_S = 10.0
BROKER = "brokerName=broker-a\n"

_READY = re.compile(r"ready nameserver=(\S+) broker=(\S+)\n")

Found = dict[str, Any]


@contextmanager
def server(folder: Path) -> Iterator[tuple[str, int]]:
    """Run name server and broker; give the name server's address and the process."""
    config = folder / "broker.conf"
    config.write_text(BROKER)
    command = [sys.executable, "-m", "turbopump", "standalone", "--dir", str(folder / "store")]
    options = ["--nameserver-port", "0", "--broker-port", "0", "--config", str(config)]
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            ready = _READY.fullmatch(process.stdout.readline())
            assert ready is not None
            yield ready[1], process.pid
        finally:
            process.terminate()


async def fill(nameserver: str, rows: int, bodies: Bodies) -> None:
    """Store messages with a tag and a key, the same number in each queue."""
    async with Producer("benchmark", nameserver=nameserver) as producer:
        longest = b"x" * bodies.most_bytes
        messages = (
            Message(
                bodies.topic,
                longest[: bodies.size(number)],
                tags="TagA",
                keys=f"order-{bodies.key(number)}",
            )
            for number in range(rows)
        )
        for batch in split_batch(messages, count_max=500):
            await send(producer, batch)


async def send(producer: Producer, batch: list[Message]) -> None:
    """Send until the broker takes it: what counts is what it has, not how long it took."""
    while True:
        try:
            await producer.send_batch(batch, timeout_ms=30_000)
        except RemoteError as error:
            if not error.retriable:
                raise
        else:
            return


def save_ready_rows(nameserver: str, folder: Path, topic: str) -> None:
    """Save some rows of a topic as Spark gets them, for the source of ready rows."""
    options = SourceOptions.for_batch({"nameserver": nameserver, "topic": topic})
    first = QueueRange(topic, "broker-a", 0, 0, READY_ROWS)
    rows = pa.Table.from_batches(PartitionReader.of(options).read((first,)))
    batch = rows.combine_chunks().to_batches()[0]
    path = str(folder / f"{topic}.arrow")
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def measured(setting: Setting) -> Iterator[Found]:
    """Run queries in a process of their own, and yield what they print."""
    # Workers import the modules here; what else the caller has put on the path stays there.
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, str(HERE / "spark_queries.py"), json.dumps(asdict(setting))]
    log = Path(setting.folder, "queries.log")
    with (
        log.open("w+") as noise,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=noise, text=True, env=environment
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", file=sys.stderr)
            yield {"cores": setting.cores, **json.loads(line)}
    if process.returncode:
        sys.exit(f"{log.read_text()[-5000:]}\nthe queries with {setting.cores} cores failed")


def results(rows: int, parts: tuple[str, ...], numbers_of_cores: tuple[int, ...]) -> list[Found]:
    """Measure everything."""
    found: list[Found] = []
    with tempfile.TemporaryDirectory() as name, server(Path(name)) as (nameserver, pid):
        for bodies in BODIES:
            run(fill(nameserver, rows, bodies))
            save_ready_rows(nameserver, Path(name), bodies.topic)
        for cores in numbers_of_cores:
            setting = Setting(
                cores=cores,
                nameserver=nameserver,
                broker_pid=pid,
                folder=name,
                bodies=BODIES,
                rows=rows,
                written_rows=rows // 3,
                queues=QUEUES,
                latency_s=LATENCY_S,
                # Once is enough: a task at a time reads so few messages.
                parts=tuple(p for p in parts if p != "latency" or cores == max(numbers_of_cores)),
            )
            found += measured(setting)
    return found


def measure_queues() -> list[list[str]]:
    """Measure what many queues cost, without Spark."""
    with tempfile.TemporaryDirectory() as name, server(Path(name)) as (nameserver, pid):
        run(create_topic(nameserver, "many", MANY_QUEUES))
        run(send_to_each(nameserver, "many", range(MANY_QUEUES), EACH))
        run(create_topic(nameserver, "most", MOST_QUEUES))
        return [
            *read_results(nameserver, pid, "many", MANY_QUEUES),
            *look_results(nameserver, pid, "many", MANY_QUEUES, (0, 1, MANY_QUEUES)),
            *look_results(nameserver, pid, "most", MOST_QUEUES, (0, 1)),
        ]


# --- tables ---------------------------------------------------------------------------------------


def print_rates(found: list[Found], part: str, title: str, ceiling: str) -> None:
    """Print a row for each query, beside the one that is the most Spark's interface can do."""
    of_part = [each for each in found if each["part"] == part]
    most = {(each["cores"], each["bodies"]): each for each in of_part if each["query"] == ceiling}
    rows = []
    for each in of_part:
        best = most[each["cores"], each["bodies"]]
        name = f"{each['cores']}, {each['bodies']}, {each['query']}"
        rates = [f"{each['rows_s']:,.0f}", f"{each['rows_s'] / best['rows_s']:.2f}"]
        costs = [f"{each[process]:.1f}" for process in ("jvm_us", "python_us", "broker_us")]
        rows.append([name, *rates, *costs, f"{spark_us(best) / spark_us(each):.2f}"])
    columns = [title, "rows/s", "ratio", "JVM µs", "Python µs", "broker µs", "CPU ratio"]
    # A stream's processor time is mostly that of starting it.
    shown = 3 if part == "stream" else len(columns)
    print_table(columns[:shown], [row[:shown] for row in rows])
    print()


def spark_us(found: Found) -> float:
    """Return the processor time of a row without the broker, which need not be on the machine."""
    return float(found["jvm_us"]) + float(found["python_us"])


def print_latencies(found: list[Found]) -> None:
    rows = [
        [each["query"], f"{each['p50_ms']:.0f}", f"{each['p99_ms']:.0f}"]
        for each in found
        if each["part"] == "latency"
    ]
    print_table(["200 messages a second", "p50 ms", "p99 ms"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--cores", default="1,2")
    options = parser.parse_args()
    parts = tuple(options.only.split(","))
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only {', '.join(unknown)}: {', '.join(PARTS)} are allowed")
    if options.rows < READY_ROWS * QUEUES:
        parser.error(f"--rows {options.rows}: {READY_ROWS * QUEUES} or more are allowed")
    with_spark = tuple(part for part in parts if part != "queues")
    cores = tuple(map(int, options.cores.split(",")))
    found = results(options.rows, with_spark, cores) if with_spark else []
    print()
    for part, title, ceiling in (
        ("read", "batch read: cores, body, source", "ready rows"),
        ("stream", "stream, `availableNow`: cores, body, source", "ready rows"),
        ("write", "write: cores, body, sink", "counting"),
    ):
        if part in parts:
            print_rates(found, part, title, ceiling)
    if "latency" in parts:
        print_latencies(found)
        print()
    if "queues" in parts:
        print_table(["many queues", "CPU driver or task", "CPU broker"], measure_queues())


if __name__ == "__main__":
    main()
