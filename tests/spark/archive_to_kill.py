"""Archives a topic, and is killed in its second batch with rows: ``path nameserver topic format``.

It dies after it has written the batch, and, for a Delta table, committed it.
"""

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
    setattr(archive_writer._Writer, "write", write_and_die)  # noqa: B010 - a method is not assigned
    path, nameserver, topic, file_format = sys.argv[1:]
    source = {"nameserver": nameserver, "topic": topic, "maxOffsetsPerTrigger": "15"}
    spark = session("to be killed", master="local[2]")
    archive(spark, path, source, format=file_format)
