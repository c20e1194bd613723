"""Sends the rows of a task of Spark's sink through its session only, in virtual time too."""

from __future__ import annotations

from turbopump.spark.writing.retrying_sender import RetryingSender
from turbopump.spark.writing.row_converter import ConvertedRows
from turbopump.spark.writing.row_encoder import EncodedRows
from turbopump.spark.writing.send_planner import sends


async def take(task: RetryingSender, rows: ConvertedRows | EncodedRows) -> None:
    """Begin to send rows; raises if a send has failed."""
    queues = (await task.targets(rows)).queues
    for send in sends(rows, queues, task.cuts, task.partition):
        await task.begin(send)
