"""Every message is handled at least once, whichever process is killed."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark
from pyspark.sql import SparkSession

from servers import Standalone
from turbopump import Message, MessageView, Producer
from turbopump.admin import Admin
from turbopump.spark import SparkConsumer

TIMEOUT_S = 400.0
"""Far longer than it takes, even on a busy machine."""

SPARK_HOME = Path(pyspark.__file__).parent
PROGRAM = Path(__file__).with_name("consumer_to_kill.py")


def send(nameserver: str, topic: str, bodies: list[str]) -> None:
    """Send to one queue, so that it is known which messages form a batch."""
    with Producer("shop", nameserver=nameserver) as producer:
        queue = producer.queues(topic)[0]
        for body in bodies:
            producer.send(Message(topic, body.encode()), to=queue)


@contextmanager
def driver(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the program in its own process group, which is killed at the end."""
    command = [sys.executable, str(PROGRAM), *arguments]
    # A killed process does not clean up. The names of sockets must be short, hence no `tmp_path`.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        places = dict.fromkeys(("TMPDIR", "SPARK_LOCAL_DIRS"), scratch)
        places["JAVA_TOOL_OPTIONS"] = f"-Djava.io.tmpdir={scratch} -XX:-UsePerfData"
        environment = {**os.environ, **places}
        with subprocess.Popen(command, start_new_session=True, env=environment) as it:
            try:
                yield it
            finally:
                # All of its processes: the driver's Java, executors and their workers.
                os.killpg(it.pid, signal.SIGKILL)


def await_writer(pipe: Path) -> None:
    """Wait until another process writes to a pipe."""
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        readable, _, _ = select.select([reading], [], [], TIMEOUT_S)
        assert readable, f"no process wrote to {pipe}"
    finally:
        os.close(reading)


def test_no_message_is_missed_when_executor_and_driver_are_killed(
    spark: SparkSession, broker: Standalone, tmp_path: Path
) -> None:
    topic, group = "killed-orders", "killed-billing"
    bodies = [str(n) for n in range(40)]
    bodies[14], bodies[27] = "kills", "hangs"
    send(broker.nameserver, topic, bodies)
    notes, half_done = tmp_path / "notes", tmp_path / "half_done"
    os.mkfifo(half_done)
    arguments = (broker.nameserver, topic, group, str(tmp_path), "local-cluster[2,1,1024]")
    with driver(*arguments):
        await_writer(half_done)
    # The working directory of executors cannot be chosen for a cluster of one machine.
    shutil.rmtree(SPARK_HOME / "work" / (tmp_path / "application").read_text())
    assert (tmp_path / "killed").exists()
    before = notes.read_text().split()
    assert set(before) < set(bodies)

    def handle(message: MessageView) -> bool:
        with notes.open("a") as file:
            file.write(message.body.decode() + "\n")
        return True

    report = SparkConsumer(
        group,
        handle,
        spark=spark,
        nameserver=broker.nameserver,
        subscriptions={topic: "*"},
        checkpoint=tmp_path / "checkpoint",
    ).run(available_now=True)
    calls = Counter(notes.read_text().split())
    assert set(calls) == set(bodies)
    # Complete batches are not repeated, incomplete ones are.
    assert {calls[body] for body in bodies[:10] + bodies[30:]} == {1}
    assert calls["kills"] > 1
    assert calls["hangs"] > 1
    assert report.handled == 20
    with Admin(broker.nameserver) as admin:
        progress = admin.groups.progress(group)
    assert (progress.lag, sum(each.committed or 0 for each in progress.queues)) == (0, 40)


def test_message_whose_worker_dies_is_handled_by_the_next(
    spark: SparkSession, broker: Standalone, tmp_path: Path
) -> None:
    topic = "dying-workers"
    send(broker.nameserver, topic, [str(n) for n in range(10)])
    notes, died = tmp_path / "notes", tmp_path / "died"

    def handle(message: MessageView) -> bool:
        with notes.open("a") as file:
            file.write(message.body.decode() + "\n")
        if message.body == b"4" and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    report = SparkConsumer(
        "dying-billing",
        handle,
        spark=spark,
        nameserver=broker.nameserver,
        subscriptions={topic: "*"},
        checkpoint=tmp_path / "checkpoint",
        start_from="first",
    ).run(available_now=True)
    assert report.handled == 10
    calls = Counter(notes.read_text().split())
    assert calls.keys() == {str(n) for n in range(10)}
    assert calls["4"] == 2
