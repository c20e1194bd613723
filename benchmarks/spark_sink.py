"""How fast Spark writes rows to topics, beside writers that only count or only convert them.

::

    python benchmarks/spark_sink.py [rows]

The broker is a process of its own on the same machine and takes part of the processors that Spark
would have; its time is shown. Rows have a body, a tag and a key. "counts" is what Spark's interface
can do at most, "converts" makes Python values of all columns and drops them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

import turbopump.spark
from measure import print_table

ROUNDS = 3
_READY = re.compile(r"ready nameserver=(\S+) broker=(\S+)\n")


class CountingWriter(DataSourceArrowWriter):
    """Takes rows and does nothing with them."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:  # type: ignore[override]
        for _ in iterator:
            pass
        return WriterCommitMessage()


class ConvertingWriter(DataSourceArrowWriter):
    """Makes Python values of all cells."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:  # type: ignore[override]
        for batch in iterator:
            for column in batch.columns:
                column.to_pylist()
        return WriterCommitMessage()


class Counting(DataSource):
    @classmethod
    def name(cls) -> str:
        return "counting"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:  # noqa: ARG002
        return CountingWriter()


class Converting(DataSource):
    @classmethod
    def name(cls) -> str:
        return "converting"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:  # noqa: ARG002
        return ConvertingWriter()


@contextmanager
def server() -> Iterator[tuple[str, int]]:
    """Run name server and broker; give the name server's address and the process."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "turbopump", "standalone", "--dir", directory]
        ports = ["--nameserver-port", "0", "--broker-port", "0"]
        with subprocess.Popen(
            [*command, *ports], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout is not None
            try:
                ready = _READY.fullmatch(process.stdout.readline())
                assert ready is not None
                yield ready[1], process.pid
            finally:
                process.terminate()


def processor_s(pid: int) -> float:
    """Return the processor time that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def rows_of(spark: SparkSession, rows: int, body_bytes: int, cores: int) -> DataFrame:
    return spark.range(0, rows, 1, cores).selectExpr(
        f"cast(rpad(cast(id as string), {body_bytes}, 'x') as binary) body",
        "'created' tags",
        "concat('order-', id) keys",
    )


def seconds_to_write(rows: DataFrame, kind: str, options: dict[str, str]) -> float:
    """Return the best of several rounds, after one that warms up."""
    best = float("inf")
    for round_number in range(1 + ROUNDS):
        started = time.perf_counter()
        rows.write.format(kind).options(**options).mode("append").save()
        if round_number:
            best = min(best, time.perf_counter() - started)
    return best


def measured(cores: int, rows: int, nameserver: str, broker: int) -> Iterator[list[str]]:
    spark = turbopump.spark.session("benchmark", master=f"local[{cores}]")
    spark.dataSource.register(Counting)
    spark.dataSource.register(Converting)
    for body_bytes in (128, 1024):
        given = rows_of(spark, rows, body_bytes, cores)
        counts = rows / seconds_to_write(given, "counting", {})
        converts = rows / seconds_to_write(given, "converting", {})
        used_s = processor_s(broker)
        options = {"nameserver": nameserver, "topic": f"benchmark-{cores}-{body_bytes}"}
        sends = rows / seconds_to_write(given, "rocketmq", options)
        used_us = (processor_s(broker) - used_s) / (rows * (1 + ROUNDS)) * 1e6
        yield [
            f"{cores}, {body_bytes} B",
            *(f"{number:,.0f}" for number in (counts, converts, sends)),
            f"{sends / converts:.2f}",
            f"{used_us:.1f}",
        ]
    spark.stop()


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    table = []
    with server() as (nameserver, broker):
        for cores in (1, 2):
            table += list(measured(cores, rows, nameserver, broker))
    columns = ["cores, body", "counts/s", "converts/s", "sends/s", "sends : converts", "broker µs"]
    print_table(columns, table)


if __name__ == "__main__":
    main()
