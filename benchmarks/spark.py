"""Spark reading and writing topics, compared with the limit of its Python interface and Parquet.

    python benchmarks/spark.py [--rows 300000] [--cores 1,2]
                               [--only read,stream,write,latency,queues]

The broker is a separate process and shares the processors with Spark's JVM and Python workers: the
cost of a row for each of them is shown, too.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from broker_process import NAMED_CONFIG, server
from measure import print_table
from spark_process import ROWS_MIN, SparkProcess, fill, spark_process
from spark_queries import QUERIES, Bodies, Result
from spark_queues import EACH, create_topic, look_results, read_results, send_to_each
from turbopump.net.loop import run

PARTS = ("read", "stream", "write", "latency", "queues")
BODIES = (Bodies(128, 128), Bodies(1024, 1024), Bodies(64, 192))
ROUNDS = {"read": 3, "stream": 2, "write": 2}
MANY_QUEUES = 10_000
MOST_QUEUES = 64_000
LATENCY_S = 10.0

Found = dict[str, Any]


def results(rows: int, parts: Sequence[str], numbers_of_cores: Sequence[int]) -> list[Found]:
    """Measure everything that needs Spark."""
    found: list[Found] = []
    with tempfile.TemporaryDirectory() as name, server(config=NAMED_CONFIG) as running:
        folder = Path(name)
        for bodies in BODIES:
            fill(running.nameserver, folder, rows, bodies)
        for cores in numbers_of_cores:
            with spark_process(running, folder, cores, rows) as spark:
                for bodies, part in itertools.product(BODIES, QUERIES):
                    if part in parts:
                        found += ({"cores": cores, **each} for each in best(spark, part, bodies))
                # Once is enough: so few messages need only one task at a time.
                if "latency" in parts and cores == max(numbers_of_cores):
                    measured = spark.latencies(BODIES[0], LATENCY_S)
                    found += ({"part": "latency", **each} for each in measured)
    return found


def best(spark: SparkProcess, part: str, bodies: Bodies) -> Iterator[Found]:
    """Run queries in turn, and yield each one's highest rows per second and lowest CPU time.

    In turn, because the JVM gets faster the longer it runs; the best, because other work on the
    machine disturbed it least.
    """
    measured: dict[str, list[Result]] = {name: [] for name in QUERIES[part]}
    for _ in range(ROUNDS[part]):
        for name, rounds in measured.items():
            print(f"{part}, {bodies.name}, {name}", file=sys.stderr)
            rounds.append(spark.measure(part, bodies, name))
    for name, rounds in measured.items():
        rows = rounds[0].rows
        yield {
            "part": part,
            "query": name,
            "bodies": bodies.name,
            "rows_s": rows / min(each.seconds for each in rounds),
            "jvm_us": min(each.jvm_s for each in rounds) / rows * 1e6,
            "python_us": min(each.python_s for each in rounds) / rows * 1e6,
            "broker_us": min(each.broker_s for each in rounds) / rows * 1e6,
        }


def measure_queues() -> list[list[str]]:
    """Measure the cost of many queues, without Spark."""
    with server(config=NAMED_CONFIG) as running:
        nameserver, pid = running.nameserver, running.process.pid
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
    """Print a row for each query, compared with the limit of Spark's interface."""
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
    # A stream's CPU time is mostly its startup.
    shown = 3 if part == "stream" else len(columns)
    print_table(columns[:shown], [row[:shown] for row in rows])
    print()


def spark_us(found: Found) -> float:
    """Return the CPU time of a row without the broker, which may run elsewhere."""
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
        parser.error(f"--only must be some of {', '.join(PARTS)}, got {', '.join(unknown)}")
    if options.rows < ROWS_MIN:
        parser.error(f"--rows must be at least {ROWS_MIN}, got {options.rows}")
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
