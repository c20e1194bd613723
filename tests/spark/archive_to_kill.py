"""Archives a topic, and is killed in its second batch with rows, after writing it."""

from __future__ import annotations

import os
import signal
import sys

from pyspark.sql import DataFrame

from turbopump.spark import session
from turbopump.spark.pipelines import archive, archive_writer

write = archive_writer._Writer.write


def write_and_die(writer: archive_writer._Writer, frame: DataFrame, batch_id: int) -> None:
    write(writer, frame, batch_id)
    if len(writer.batches) > 1:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    path, nameserver, topic = sys.argv[1:]
    setattr(archive_writer._Writer, "write", write_and_die)  # noqa: B010 - a method is not assigned
    source = {"nameserver": nameserver, "topic": topic, "maxOffsetsPerTrigger": "15"}
    archive(session("to be killed", master="local[2]"), path, source)
