"""Spark in a separate process, and a broker whose topics it reads and writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from broker_process import BROKER, Server
from spark_queries import Bodies, LatencyRequest, Request, Result, Setting
from turbopump.client.outgoing import split_batch
from turbopump.client.producer import Producer
from turbopump.errors import RemoteError
from turbopump.message import Message
from turbopump.net.loop import run
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.reading.partition_planner import QueueRange
from turbopump.spark.reading.partition_reader import PartitionReader

HERE = Path(__file__).parent
QUEUES = 4
"""A topic's default."""
READY_ROWS = 8192
BATCH = 500
ROWS_MIN = QUEUES * (READY_ROWS + BATCH)
"""Enough rows in the first queue, whichever queues get the last batches."""


class SparkFailed(Exception):
    """The process with the queries has exited."""


@dataclass(frozen=True, slots=True)
class SparkProcess:
    """Runs requests one at a time."""

    process: subprocess.Popen[str]
    log: Path

    def measure(self, part: str, bodies: Bodies, query: str) -> Result:
        return Result(**self._asked(asdict(Request(part, bodies, query))))

    def latencies(self, bodies: Bodies, seconds: float) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._asked(asdict(LatencyRequest(bodies, seconds)))
        return found

    def _asked(self, request: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            return json.loads(self.process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            raise SparkFailed(f"{request} failed:\n{self.log.read_text()[-5000:]}") from None


@contextmanager
def spark_process(running: Server, folder: Path, cores: int, rows: int) -> Iterator[SparkProcess]:
    """Run Spark with this many cores; it writes a third of the rows."""
    setting = Setting(
        cores=cores,
        nameserver=running.nameserver,
        broker_pid=running.process.pid,
        folder=str(folder),
        rows=rows,
        written_rows=rows // 3,
        queues=QUEUES,
    )
    # Workers import the modules here; the caller's own path entries are kept.
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(HERE / "spark_queries.py"), json.dumps(asdict(setting))]
    log = folder / "queries.log"
    with (
        log.open("w") as noise,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=noise,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        ) as process,
    ):
        # Leaving the block closes its stdin, and it exits.
        yield SparkProcess(process, log)


def fill(nameserver: str, folder: Path, rows: int, bodies: Bodies) -> None:
    """Store messages to be read, and save some of their rows for the source of ready rows."""
    run(_store(nameserver, rows, bodies))
    _save_ready_rows(nameserver, folder, bodies.topic)


async def _store(nameserver: str, rows: int, bodies: Bodies) -> None:
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
        for batch in split_batch(messages, count_max=BATCH):
            await _send(producer, batch)


async def _send(producer: Producer, batch: list[Message]) -> None:
    """Send until the broker accepts it: what it has stored matters, not how long that took."""
    while True:
        try:
            await producer.send_batch(batch, timeout=30)
        except RemoteError as error:
            if not error.retriable:
                raise
        else:
            return


def _save_ready_rows(nameserver: str, folder: Path, topic: str) -> None:
    options = SourceOptions.for_batch({"nameserver": nameserver, "topic": topic})
    first = QueueRange(topic, BROKER, 0, 0, READY_ROWS)
    rows = pa.Table.from_batches(PartitionReader(options).read((first,)))
    batch = rows.combine_chunks().to_batches()[0]
    path = str(folder / f"{topic}.arrow")
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
