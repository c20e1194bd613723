"""Spark's source and sink in `benchmarks/run`, compared with the limit of its Python interface."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker_process import Server
from compare_plan import ClientFailed
from compare_report import BASES, USUAL_BYTES, Case
from spark_process import SparkFailed, SparkProcess, fill, spark_process
from spark_queries import Bodies

CORES = 2
PARTS = {"source": ("read", "ready rows"), "sink": ("write", "counting")}
VARYING = Bodies(64, 192)


@dataclass(frozen=True, slots=True)
class SparkRun:
    """A case and the query that Spark runs for it."""

    case: Case
    spark: SparkProcess
    bodies: Bodies
    query: str

    def measure(self) -> dict[str, Any]:
        part, _ = PARTS[self.case.work]
        try:
            found = self.spark.measure(part, self.bodies, self.query)
        except SparkFailed as error:
            raise ClientFailed(str(error)) from None
        micros = 1e6 / found.rows
        return {
            "messages": found.rows,
            "seconds": round(found.seconds, 6),
            "messages_per_second": round(found.rows / found.seconds, 1),
            "bytes": found.rows * (self.bodies.least_bytes + self.bodies.most_bytes) // 2,
            "client_cpu_us": round((found.jvm_s + found.python_s) * micros, 3),
            "jvm_cpu_us": round(found.jvm_s * micros, 3),
            "python_cpu_us": round(found.python_s * micros, 3),
            "watched_cpu_us": round(found.broker_s * micros, 3),
            "p50_ms": None,
            "p99_ms": None,
        }


@contextmanager
def spark_runs(
    works: Sequence[str], sizes: Sequence[int], broker: Server, folder: Path, rows: int
) -> Iterator[list[SparkRun]]:
    """Start Spark, and yield the cases of ``source`` and ``sink``."""
    every = [*(Bodies(size, size) for size in sizes), VARYING]
    if "source" in works:
        for bodies in every:
            fill(broker.nameserver, folder, rows, bodies)
    with spark_process(broker, folder, CORES, rows) as spark:
        yield [
            SparkRun(_case(work, system, bodies), spark, bodies, query)
            for work in works
            for bodies in every
            for system, query in ((BASES[work], PARTS[work][1]), ("turbopump", "topic"))
        ]


def _case(work: str, system: str, bodies: Bodies) -> Case:
    if bodies == VARYING:
        return Case(work, f"{system}, {bodies.name}", CORES, USUAL_BYTES)
    return Case(work, system, CORES, bodies.most_bytes)
