"""Archives a topic, and is killed in its second batch with rows: ``path nameserver topic [point]``.

Without a point, after writing the batch as Parquet. With ``files`` or ``commit``, after it has
written the files of the batch for a Delta table, or has committed them too.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame

from turbopump.spark import session
from turbopump.spark.pipelines import archive, archive_delta, archive_writer

write = archive_writer._Writer.write


def write_and_die(writer: archive_writer._Writer, frame: DataFrame, batch_id: int) -> None:
    write(writer, frame, batch_id)
    if len(writer.batches) > 1:
        os.kill(os.getpid(), signal.SIGKILL)


commit = archive_delta.DeltaArchive._commit


def die_before_commit(
    table: archive_delta.DeltaArchive, actions: Sequence[Any], query_id: str, batch_id: int
) -> None:
    if table.size.files:
        os.kill(os.getpid(), signal.SIGKILL)
    commit(table, actions, query_id, batch_id)


if __name__ == "__main__":
    path, nameserver, topic, *point = sys.argv[1:]
    if point == ["files"]:
        setattr(archive_delta.DeltaArchive, "_commit", die_before_commit)  # noqa: B010 - a method is not assigned
    else:
        setattr(archive_writer._Writer, "write", write_and_die)  # noqa: B010 - a method is not assigned
    source = {"nameserver": nameserver, "topic": topic, "maxOffsetsPerTrigger": "15"}
    spark = session("to be killed", master="local[2]")
    archive(spark, path, source, format="delta" if point else "parquet")
