"""The process that runs queries for `spark_process.py`: one Spark session, one number of cores.

``python benchmarks/spark_queries.py '{...}'`` with a `Setting` in JSON. Each line of its input is a
`Request` in JSON, which it runs and answers with a line of JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import unix_millis
from pyspark.sql.streaming.listener import StreamingQueryProgress

import turbopump.spark
from spark_api import Converting, Counting, ReadyRows
from turbopump import Message, Producer
from turbopump.spark.records.schema import spark_schema

STEP = 7919
"""Step between the sizes of varying bodies: a prime, so that all sizes occur."""
DIGITS_MAX = 6
SCRATCH_MIB = 512
LATENCY_RATE = 200
LATENCY_WARM_S = 4.0


@dataclass(frozen=True)
class Bodies:
    """The range of body sizes; if sizes vary, keys do too."""

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
        """Return the body size of the message with a number."""
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


SOURCES = ("ready rows", "topic", "topic, pulls of 32", "Parquet")
SINKS = ("counting", "converting", "topic", "topic, idempotent", "Parquet")
QUERIES = {"read": SOURCES, "stream": SOURCES, "write": SINKS}


@dataclass(frozen=True)
class Setting:
    """The settings of one process."""

    cores: int
    nameserver: str
    broker_pid: int
    folder: str
    """Holds, for each kind of bodies, ``<topic>.arrow`` with ready rows."""
    rows: int
    written_rows: int
    queues: int


@dataclass(frozen=True)
class Request:
    """A query to be run once; the first of its kind is preceded by a warm-up run."""

    part: str
    """One of `QUERIES`."""
    bodies: Bodies
    query: str


@dataclass(frozen=True)
class LatencyRequest:
    """Latencies to be measured, with bodies that have ready rows."""

    bodies: Bodies
    latency_s: float


@dataclass(frozen=True)
class Result:
    """The duration of one query, and the CPU time of each process during it."""

    rows: int
    seconds: float
    jvm_s: float
    python_s: float
    broker_s: float


# --- CPU time -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Used:
    """CPU time used so far in seconds, by process ID."""

    jvm: dict[int, float]
    python: dict[int, float]
    broker: dict[int, float]


class Meter:
    """Reads the CPU time of Spark's JVM, its Python workers and the broker."""

    def __init__(self, spark: SparkSession, broker_pid: int) -> None:
        jvm = spark.sparkContext._jvm  # noqa: SLF001 - there is no other way to get its process ID
        assert jvm is not None
        self._jvm_pid = int(jvm.java.lang.ProcessHandle.current().pid())
        self._broker_pid = broker_pid

    def used(self) -> Used:
        parents: dict[int, int] = {}
        seconds: dict[int, float] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:  # it has exited meanwhile
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
    """Return the CPU time between two readings; workers may have started or exited."""
    return sum(now - before.get(pid, 0.0) for pid, now in after.items())


# --- queries --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where rows are read from or written to."""

    kind: str
    options: dict[str, str]


class Queries:
    """Runs queries in one session, and caches those that have run before."""

    def __init__(self, spark: SparkSession, setting: Setting) -> None:
        self.spark = spark
        self.setting = setting
        self._meter = Meter(spark, setting.broker_pid)
        self._known: dict[Request, Callable[[], float]] = {}

    def measure(self, request: Request) -> Result:
        query = self._known.get(request)
        if query is None:
            query = self._known[request] = self._query(request)
            query()
        # Pending disk writes of the previous query would take CPU time from this one.
        os.sync()
        before = self._meter.used()
        seconds = query()
        after = self._meter.used()
        return Result(
            self.setting.written_rows if request.part == "write" else self.setting.rows,
            seconds,
            spent_s(before.jvm, after.jvm),
            spent_s(before.python, after.python),
            spent_s(before.broker, after.broker),
        )

    def _query(self, request: Request) -> Callable[[], float]:
        """Return a function that runs a query and returns its seconds."""
        bodies, setting = request.bodies, self.setting
        if request.part == "write":
            frame = rows_to_write(self.spark, setting.written_rows, bodies, setting.cores)
            return partial(written, frame, self._sink(bodies, request.query), setting.folder)
        source = self._source(bodies, request.query)
        if request.part == "read":
            return partial(to_noop, self._load(source))
        reader = self.spark.readStream.format(source.kind).options(**source.options)
        # Files need an explicit schema; our sources have one.
        is_file = source.kind == "parquet"
        return partial(drained, (reader.schema(spark_schema()) if is_file else reader).load())

    def _load(self, source: Place) -> DataFrame:
        return self.spark.read.format(source.kind).options(**source.options).load()

    def _source(self, bodies: Bodies, name: str) -> Place:
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
        match name:
            case "ready rows":
                return Place("ready-rows", ready)
            case "topic":
                return Place("rocketmq", topic)
            case "topic, pulls of 32":
                # The most that an Apache RocketMQ broker returns, whatever is requested.
                return Place("rocketmq", {**topic, "pullBatchSize": "32"})
            case _:
                return Place("parquet", {"path": self._parquet(bodies)})

    def _parquet(self, bodies: Bodies) -> str:
        """Return the path of a topic's rows as Parquet files, written on first use."""
        path = Path(self.setting.folder, f"{bodies.topic}-{self.setting.cores}.parquet")
        if not path.exists():
            self._load(self._source(bodies, "topic")).write.parquet(str(path))
        return str(path)

    def _sink(self, bodies: Bodies, name: str) -> Place:
        target = f"{bodies.topic}-written-{self.setting.cores}"
        topic = {"nameserver": self.setting.nameserver, "topic": target}
        match name:
            case "topic":
                return Place("rocketmq", topic)
            case "topic, idempotent":
                return Place("rocketmq", {**topic, "idempotent": "true"})
            case "Parquet":
                return Place("parquet", {"path": f"{self.setting.folder}/{target}"})
            case _:
                return Place(name, {})


def to_noop(frame: DataFrame) -> float:
    """Read everything, and return the seconds it took."""
    started = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - started


def drained(frame: DataFrame) -> float:
    """Read the topic as a stream, and return the seconds of the batches with rows."""
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
    """Return the duration of each batch with rows."""
    found = (json.loads(each.json) for each in progress)
    return [each["durationMs"]["triggerExecution"] for each in found if each["numInputRows"]]


def rows_to_write(spark: SparkSession, rows: int, bodies: Bodies, cores: int) -> DataFrame:
    return spark.range(0, rows, 1, cores).selectExpr(
        f"cast(rpad(cast(id as string), cast({bodies.size_sql} as int), 'x') as binary) body",
        "'created' tags",
        f"concat('order-', {bodies.key_sql}) keys",
    )


def written(frame: DataFrame, to: Place, folder: str) -> float:
    """Write everything, and return the seconds it took."""
    have_memory(Path(folder, "scratch"))
    started = time.perf_counter()
    frame.write.format(to.kind).options(**to.options).mode("append").save()
    return time.perf_counter() - started


def have_memory(scratch: Path) -> None:
    """Make sure that the page cache has memory for the files to be written.

    A virtual machine may have returned unused memory to its host. Getting it back takes ten times
    as long as writing to it, so a random query would seem slow.
    """
    with scratch.open("wb") as file:
        for _ in range(SCRATCH_MIB):
            file.write(bytes(1 << 20))
    scratch.unlink()


# --- latency --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Latency:
    """Median and 99th percentile in milliseconds."""

    query: str
    p50_ms: float
    p99_ms: float


def latencies(queries: Queries, wanted: LatencyRequest) -> Iterator[Latency]:
    """Stream a topic that gets 200 messages per second, and ready rows at the same rate."""
    spark, setting, latency_s = queries.spark, queries.setting, wanted.latency_s
    ready = {
        "path": f"{setting.folder}/{wanted.bodies.topic}.arrow",
        "partitions": "1",
        "rate": str(LATENCY_RATE),
    }
    topic = {"nameserver": setting.nameserver, "topic": "latency", "startingOffsets": "latest"}
    yield latency("ready rows, a batch", batches(spark, "ready-rows", ready, latency_s))
    with sending(setting.nameserver, "latency"):
        found = batches(spark, "rocketmq", topic, latency_s)
        yield latency("topic, a batch", found)
        yield latency("topic, from send to handled", ages(spark, topic, latency_s))


def latency(query: str, found_ms: list[float]) -> Latency:
    cuts = statistics.quantiles(found_ms, n=100)
    return Latency(query, cuts[49], cuts[98])


def batches(spark: SparkSession, kind: str, options: dict[str, str], seconds: float) -> list[float]:
    """Return the durations of micro-batches, without the first, with a sink that drops rows."""
    frame = spark.readStream.format(kind).options(**options).load()
    with tempfile.TemporaryDirectory() as checkpoint:
        query = frame.writeStream.format("noop").option("checkpointLocation", checkpoint).start()
        time.sleep(LATENCY_WARM_S)
        skipped = len(batch_ms(query.recentProgress))
        query.awaitTermination(int(seconds))
        query.stop()
        return batch_ms(query.recentProgress)[skipped:]


def ages(spark: SparkSession, options: dict[str, str], seconds: float) -> list[float]:
    """Return the age of each message when a function received the rows of its batch."""
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
    """Send messages at the measured rate while the block runs."""
    is_over = threading.Event()
    with Producer("benchmark", nameserver=nameserver) as producer:
        # Create the topic before any stream reads it.
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
    queries = Queries(spark, setting)
    for line in sys.stdin:
        asked = msgspec.json.decode(line)
        if "latency_s" in asked:
            latency = msgspec.convert(asked, LatencyRequest)
            answer: Any = [asdict(each) for each in latencies(queries, latency)]
        else:
            answer = asdict(queries.measure(msgspec.convert(asked, Request)))
        print(json.dumps(answer), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
