"""The queries of `spark.py`, for one number of cores: a process has one Spark session.

``python benchmarks/spark_queries.py '{...}'`` with a `Setting` in JSON; prints results in JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import unix_millis
from pyspark.sql.streaming.listener import StreamingQueryProgress

import turbopump.spark
from spark_api import Converting, Counting, ReadyRows
from turbopump import Message, Producer
from turbopump.spark.records.schema import spark_schema

READ_ROUNDS = 3
STREAM_ROUNDS = 2
WRITE_ROUNDS = 2
STEP = 7919
"""From one size of varying bodies to the next: a prime number, so that all come."""
DIGITS_MAX = 6
SCRATCH_MIB = 512
LATENCY_RATE = 200
LATENCY_WARM_S = 4.0


@dataclass(frozen=True)
class Bodies:
    """How large the bodies of messages are, from and to; where that varies, keys do too."""

    least_bytes: int
    most_bytes: int

    @property
    def name(self) -> str:
        sizes = sorted({self.least_bytes, self.most_bytes})
        return f"{' to '.join(map(str, sizes))} B"

    @property
    def topic(self) -> str:
        return f"read-{self.least_bytes}-{self.most_bytes}"

    def size(self, number: int) -> int:
        """Return how large that of the message with a number is."""
        return self.least_bytes + number * STEP % (self.most_bytes - self.least_bytes + 1)

    def key(self, number: int) -> int:
        """Return the number in its key."""
        if self.least_bytes == self.most_bytes:
            return number
        return number % int(10 ** (1 + number % DIGITS_MAX))

    @property
    def size_sql(self) -> str:
        """The same for the column ``id``."""
        return f"{self.least_bytes} + id * {STEP} % {self.most_bytes - self.least_bytes + 1}"

    @property
    def key_sql(self) -> str:
        if self.least_bytes == self.most_bytes:
            return "id"
        return f"id % cast(pow(10, 1 + id % {DIGITS_MAX}) as bigint)"


@dataclass(frozen=True)
class Setting:
    """What one process measures."""

    cores: int
    nameserver: str
    broker_pid: int
    folder: str
    """Holds, for each kind of bodies, ``<topic>.arrow`` with ready rows."""
    bodies: tuple[Bodies, ...]
    rows: int
    written_rows: int
    queues: int
    latency_s: float
    parts: tuple[str, ...]
    """Of ``read``, ``stream``, ``write``, ``latency``."""


@dataclass(frozen=True)
class Result:
    """How fast one query was, and the processor time of one row in each process, in µs."""

    part: str
    query: str
    bodies: str
    rows_s: float
    jvm_us: float
    python_us: float
    broker_us: float


# --- processor time -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Used:
    """Processor time of each process so far, in seconds, by its number."""

    jvm: dict[int, float]
    python: dict[int, float]
    broker: dict[int, float]


class Meter:
    """Reads the processor time of Spark's JVM, of the Python workers under it, of the broker."""

    def __init__(self, spark: SparkSession, broker_pid: int) -> None:
        jvm = spark.sparkContext._jvm  # noqa: SLF001 - there is no other way to ask for its number
        assert jvm is not None
        self._jvm_pid = int(jvm.java.lang.ProcessHandle.current().pid())
        self._broker_pid = broker_pid

    def used(self) -> Used:
        parents: dict[int, int] = {}
        seconds: dict[int, float] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            pid = int(stat.parent.name)
            parents[pid] = int(fields[1])
            seconds[pid] = (int(fields[11]) + int(fields[12])) / 100
        return Used(
            {self._jvm_pid: seconds[self._jvm_pid]},
            {pid: seconds[pid] for pid in parents if self._is_worker(pid, parents)},
            {self._broker_pid: seconds[self._broker_pid]},
        )

    def _is_worker(self, pid: int, parents: dict[int, int]) -> bool:
        while (pid := parents.get(pid, 0)) > 1:
            if pid == self._jvm_pid:
                return True
        return False


def spent_s(before: dict[int, float], after: dict[int, float]) -> float:
    """Return the processor time between; workers may have begun or ended."""
    return sum(now - before.get(pid, 0.0) for pid, now in after.items())


Figures = tuple[float, float, float, float]
"""Rows a second, and the processor time of a row in the JVM, in Python and at the broker, in µs."""


def best_of(
    rounds: int, rows: int, meter: Meter, queries: Mapping[str, Callable[[], float]]
) -> Iterator[tuple[str, Figures]]:
    """Run queries in turn, and yield for each its most rows a second and least processor time.

    A query returns its seconds. In turn, because the JVM gets faster the longer it runs; the best,
    because it is what other work on the machine disturbed least.
    """
    measured: dict[str, list[Figures]] = {name: [] for name in queries}
    for _ in range(rounds):
        for name, query in queries.items():
            # What the query before has left to the disk would take the next one's processor time.
            os.sync()
            before = meter.used()
            seconds = query()
            after = meter.used()
            spent = (
                spent_s(before.jvm, after.jvm),
                spent_s(before.python, after.python),
                spent_s(before.broker, after.broker),
            )
            jvm_us, python_us, broker_us = (each / rows * 1e6 for each in spent)
            measured[name].append((rows / seconds, jvm_us, python_us, broker_us))
    for name, figures in measured.items():
        rates, *costs = zip(*figures, strict=True)
        jvm_us, python_us, broker_us = map(min, costs)
        yield name, (max(rates), jvm_us, python_us, broker_us)


# --- queries --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where rows are read from or written to."""

    kind: str
    options: dict[str, str]


@dataclass(frozen=True)
class Queries:
    """Runs what a setting asks for in one session."""

    spark: SparkSession
    setting: Setting
    meter: Meter

    def run(self) -> Iterator[Result]:
        parts = {"read": self.read, "stream": self.stream, "write": self.write}
        for bodies in self.setting.bodies:
            self.save_parquet(bodies)
            for name, part in parts.items():
                if name in self.setting.parts:
                    yield from part(bodies)

    def sources(self, bodies: Bodies) -> dict[str, Place]:
        setting = self.setting
        ready = {
            "path": f"{setting.folder}/{bodies.topic}.arrow",
            "rows": str(setting.rows),
            "partitions": str(setting.queues),
        }
        topic = {
            "nameserver": setting.nameserver,
            "topic": bodies.topic,
            "startingOffsets": "earliest",
        }
        return {
            "ready rows": Place("ready-rows", ready),
            "topic": Place("rocketmq", topic),
            # As a broker of the original gives them, whatever it is asked for.
            "topic, pulls of 32": Place("rocketmq", {**topic, "pullBatchSize": "32"}),
            "Parquet": Place("parquet", {"path": self.parquet(bodies)}),
        }

    def parquet(self, bodies: Bodies) -> str:
        return f"{self.setting.folder}/{bodies.topic}-{self.setting.cores}.parquet"

    def save_parquet(self, bodies: Bodies) -> None:
        """Have the same rows in files; this also wakes everything up."""
        source = self.sources(bodies)["topic"]
        rows = self.spark.read.format(source.kind).options(**source.options).load()
        rows.write.parquet(self.parquet(bodies))

    def read(self, bodies: Bodies) -> Iterator[Result]:
        queries = {}
        for name, source in self.sources(bodies).items():
            frame = self.spark.read.format(source.kind).options(**source.options).load()
            to_noop(frame)
            queries[name] = partial(to_noop, frame)
        for name, figures in best_of(READ_ROUNDS, self.setting.rows, self.meter, queries):
            yield Result("read", name, bodies.name, *figures)

    def stream(self, bodies: Bodies) -> Iterator[Result]:
        queries = {}
        for name, source in self.sources(bodies).items():
            reader = self.spark.readStream.format(source.kind).options(**source.options)
            # Files must be told their columns; our sources know them.
            is_file = source.kind == "parquet"
            frame = (reader.schema(spark_schema()) if is_file else reader).load()
            queries[name] = partial(drained, frame)
        for name, figures in best_of(STREAM_ROUNDS, self.setting.rows, self.meter, queries):
            yield Result("stream", name, bodies.name, *figures)

    def write(self, bodies: Bodies) -> Iterator[Result]:
        setting = self.setting
        frame = rows_to_write(self.spark, setting.written_rows, bodies, setting.cores)
        name = f"{bodies.topic}-written-{setting.cores}"
        topic = {"nameserver": setting.nameserver, "topic": name}
        files = {"path": f"{setting.folder}/{name}"}
        sinks = {
            "counting": Place("counting", {}),
            "converting": Place("converting", {}),
            "topic": Place("rocketmq", topic),
            "topic, idempotent": Place("rocketmq", {**topic, "idempotent": "true"}),
            "Parquet": Place("parquet", files),
        }
        queries = {}
        for name, sink in sinks.items():
            written(frame, sink, setting.folder)
            queries[name] = partial(written, frame, sink, setting.folder)
        for name, figures in best_of(WRITE_ROUNDS, setting.written_rows, self.meter, queries):
            yield Result("write", name, bodies.name, *figures)


def to_noop(frame: DataFrame) -> float:
    """Read everything, and return how long that took."""
    started = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - started


def drained(frame: DataFrame) -> float:
    """Read what there is as a stream, and return how long the batches with rows took."""
    with tempfile.TemporaryDirectory() as checkpoint:
        query = (
            frame.writeStream.format("noop")
            .trigger(availableNow=True)
            .option("checkpointLocation", checkpoint)
            .start()
        )
        query.awaitTermination()
        return sum(batch_ms(query.recentProgress)) / 1000


def batch_ms(progress: Sequence[StreamingQueryProgress]) -> list[float]:
    """Return how long each batch with rows took."""
    found = (json.loads(each.json) for each in progress)
    return [each["durationMs"]["triggerExecution"] for each in found if each["numInputRows"]]


def rows_to_write(spark: SparkSession, rows: int, bodies: Bodies, cores: int) -> DataFrame:
    return spark.range(0, rows, 1, cores).selectExpr(
        f"cast(rpad(cast(id as string), cast({bodies.size_sql} as int), 'x') as binary) body",
        "'created' tags",
        f"concat('order-', {bodies.key_sql}) keys",
    )


def written(frame: DataFrame, to: Place, folder: str) -> float:
    """Write everything, and return how long that took."""
    have_memory(Path(folder, "scratch"))
    started = time.perf_counter()
    frame.write.format(to.kind).options(**to.options).mode("append").save()
    return time.perf_counter() - started


def have_memory(scratch: Path) -> None:
    """Have the memory at hand that files are written to.

    A virtual machine may have given away what it has not used for a while. To get it back takes
    ten times as long as writing to it, and whoever writes would seem slow by chance.
    """
    with scratch.open("wb") as file:
        for _ in range(SCRATCH_MIB):
            file.write(bytes(1 << 20))
    scratch.unlink()


# --- latency --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Latency:
    """Milliseconds, half and 99 of 100 are below."""

    query: str
    p50_ms: float
    p99_ms: float


def latencies(spark: SparkSession, setting: Setting) -> Iterator[Latency]:
    """Follow a topic that gets 200 messages a second, and ready rows at the same rate."""
    ready = {
        "path": f"{setting.folder}/{setting.bodies[0].topic}.arrow",
        "partitions": "1",
        "rate": str(LATENCY_RATE),
    }
    topic = {"nameserver": setting.nameserver, "topic": "latency", "startingOffsets": "latest"}
    yield latency("ready rows, a batch", batches(spark, "ready-rows", ready, setting.latency_s))
    with sending(setting.nameserver, "latency"):
        found = batches(spark, "rocketmq", topic, setting.latency_s)
        yield latency("topic, a batch", found)
        yield latency("topic, from send to handled", ages(spark, topic, setting.latency_s))


def latency(query: str, found_ms: list[float]) -> Latency:
    cuts = statistics.quantiles(found_ms, n=100)
    return Latency(query, cuts[49], cuts[98])


def batches(spark: SparkSession, kind: str, options: dict[str, str], seconds: float) -> list[float]:
    """Return how long each micro-batch took with a sink that drops its rows, the first left out."""
    frame = spark.readStream.format(kind).options(**options).load()
    with tempfile.TemporaryDirectory() as checkpoint:
        query = frame.writeStream.format("noop").option("checkpointLocation", checkpoint).start()
        time.sleep(LATENCY_WARM_S)
        skipped = len(batch_ms(query.recentProgress))
        query.awaitTermination(int(seconds))
        query.stop()
        return batch_ms(query.recentProgress)[skipped:]


def ages(spark: SparkSession, options: dict[str, str], seconds: float) -> list[float]:
    """Return how old each message was when a function had the rows of its batch in hand."""
    found: list[float] = []
    until = time.monotonic() + LATENCY_WARM_S

    def handle(batch: DataFrame, _: int) -> None:
        rows = batch.select(unix_millis("bornTimestamp")).toArrow()
        now_ms = time.time() * 1000
        if time.monotonic() > until:
            found.extend(now_ms - born_ms for born_ms in rows.column(0).to_numpy())

    frame = spark.readStream.format("rocketmq").options(**options).load()
    with tempfile.TemporaryDirectory() as checkpoint:
        started = frame.writeStream.foreachBatch(handle)
        query = started.option("checkpointLocation", checkpoint).start()
        query.awaitTermination(int(LATENCY_WARM_S + seconds))
        query.stop()
    return found


@contextmanager
def sending(nameserver: str, topic: str) -> Iterator[None]:
    """Send messages at the rate of the measurement while the block runs."""
    is_over = threading.Event()
    with Producer("benchmark", nameserver=nameserver) as producer:
        # Once before anybody follows the topic, so that there is one.
        producer.send(Message(topic, b"first"))
        thread = threading.Thread(target=send_steadily, args=(producer, topic, is_over))
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def send_steadily(producer: Producer, topic: str, is_over: threading.Event) -> None:
    due = time.monotonic()
    while not is_over.wait(max(0.0, due - time.monotonic())):
        producer.send(Message(topic, b"x" * 128))
        due += 1 / LATENCY_RATE


def main() -> None:
    setting = msgspec.json.decode(sys.argv[1], type=Setting)
    spark = turbopump.spark.session(
        "benchmark",
        master=f"local[{setting.cores}]",
        settings={
            "spark.sql.streaming.numRecentProgressUpdates": "100000",
            "spark.sql.streaming.minBatchesToRetain": "10",
            "spark.local.dir": f"{setting.folder}/local",
            "spark.sql.warehouse.dir": f"{setting.folder}/warehouse",
        },
    )
    for source in (ReadyRows, Counting, Converting):
        spark.dataSource.register(source)
    queries = Queries(spark, setting, Meter(spark, setting.broker_pid))
    for result in queries.run():
        print(json.dumps(asdict(result)), flush=True)
    if "latency" in setting.parts:
        for found in latencies(spark, setting):
            print(json.dumps({"part": "latency", **asdict(found)}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
