"""Send the rows of a Spark sink task through its session only, which also works in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from turbopump.errors import InvalidArgument, NetworkError, NoRoute, RemoteError
from turbopump.message import MessageQueue
from turbopump.spark.writing.blocking_sender import in_turn
from turbopump.spark.writing.retrying_sender import (
    Attempt,
    RetryingSender,
    SendCounts,
    Targets,
    UnfinishedSend,
)
from turbopump.spark.writing.row_converter import ConvertedRows
from turbopump.spark.writing.row_encoder import EncodedRows
from turbopump.spark.writing.send_planner import EncodedSend, Send, sends


async def take(task: RetryingSender, rows: ConvertedRows | EncodedRows) -> SendCounts:
    """Send rows as `BlockingSender` does, a window at a time; return when all are stored."""
    targets = await task.targets(rows)
    planned = list(in_turn(sends(rows, targets.queues, task.cuts, task.partition)))
    for together in _windows(planned, task.window.most):
        tried = await asyncio.gather(*(_first_attempt(task, each, targets) for each in together))
        await task.retry(each for each in tried if not task.is_stored(each.outcome))
        for each in tried:
            if task.is_stored(each.outcome):
                task.counts.add(each.send)
    return task.counts


def _windows(planned: list[Send | EncodedSend], size: int) -> Iterator[list[Send | EncodedSend]]:
    """Split sends, so that only one per queue is in flight."""
    window: list[Send | EncodedSend] = []
    for send in planned:
        is_busy = any(
            isinstance(send.destination, MessageQueue) and each.destination == send.destination
            for each in window
        )
        if is_busy or len(window) == size:
            yield window
            window = []
        window.append(send)
    yield window


async def _first_attempt(
    task: RetryingSender, send: Send | EncodedSend, targets: Targets
) -> UnfinishedSend:
    queue = (
        send.destination
        if isinstance(send.destination, MessageQueue)
        else targets.queues[send.destination][0]
    )
    outcome: Attempt
    try:
        outcome = await task._send(send, queue)
    except (InvalidArgument, NetworkError, NoRoute, RemoteError) as error:
        outcome = error
    return UnfinishedSend(send, queue, outcome)
