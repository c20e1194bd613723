"""A separate driver with a consumer, for tests that kill it or its executors.

Its function records every message. For one body it kills the executor that it runs on, once; for
another it never ends, and writes ``half_done`` to the pipe.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from turbopump import MessageView
from turbopump.spark import SparkConsumer, session


def main(nameserver: str, topic: str, group: str, directory: str, master: str) -> None:
    notes, killed, half_done = (Path(directory) / name for name in ("notes", "killed", "half_done"))

    def handle(message: MessageView) -> bool:
        with notes.open("a") as file:
            file.write(message.body.decode() + "\n")
        if message.body == b"kills" and not killed.exists():
            killed.touch()
            # This process was forked by one that the executor started.
            forked_by = os.getppid()
            executor = Path(f"/proc/{forked_by}/stat").read_text().rpartition(")")[2].split()[1]
            os.kill(int(executor), signal.SIGKILL)
        if message.body == b"hangs":
            half_done.write_text("now")
            threading.Event().wait()
        return True

    spark = session("to be killed", master=master, settings={"spark.executor.memory": "512m"})
    (Path(directory) / "application").write_text(spark.sparkContext.applicationId)
    consumer = SparkConsumer(
        group,
        handle,
        spark=spark,
        nameserver=nameserver,
        subscriptions={topic: "*"},
        checkpoint=Path(directory) / "checkpoint",
        start_from="first",
        options={"maxOffsetsPerTrigger": "10"},
    )
    consumer.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
