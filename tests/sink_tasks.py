"""Send the rows of a Spark sink task through its session only, which also works in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from turbopump.clock import SYSTEM_CLOCK
from turbopump.errors import InvalidArgument, NetworkError, NoRoute, RemoteError
from turbopump.message import Message, MessageQueue
from turbopump.spark.writing.blocking_sender import in_turn
from turbopump.spark.writing.options import SinkOptions
from turbopump.spark.writing.retrying_sender import (
    Attempt,
    RetryingSender,
    SendCounts,
    Targets,
    UnfinishedSend,
)
from turbopump.spark.writing.row_encoder import EncodedRows, Origin, RowEncoder
from turbopump.spark.writing.send_planner import Send, sends
from turbopump.wire.ids import UniqueIds

ORIGIN = Origin("query", "7", 3)
IDS = UniqueIds(SYSTEM_CLOCK, b"\x0a\x00\x00\x01", 77, 99)
MAP = pa.map_(pa.string(), pa.string())


def encoded(
    messages: Sequence[Message],
    first_row: int = 0,
    *,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> EncodedRows:
    """Return messages as the encoded rows of a task; ``more`` are fields of theirs."""
    columns: dict[str, pa.Array[Any]] = {
        "topic": pa.array([message.topic for message in messages], pa.string()),
        "body": pa.array([message.body for message in messages], pa.binary()),
        "tags": pa.array([message.tags for message in messages], pa.string()),
        "keys": pa.array([list(message.keys) for message in messages], pa.list_(pa.string())),
        "properties": pa.array([list(message.properties.items()) for message in messages], MAP),
        "delayLevel": pa.array([message.delay_level for message in messages], pa.int32()),
    }
    chosen = SinkOptions(**{"nameserver": "10.0.0.1:9876", "stamp": "false", **(options or {})})
    encoder = RowEncoder(frozenset(columns), chosen, ORIGIN, IDS)
    return replace(encoder.rows(pa.RecordBatch.from_pydict(columns), first_row), **more)


async def take(task: RetryingSender, rows: EncodedRows) -> SendCounts:
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


def _windows(planned: list[Send], size: int) -> Iterator[list[Send]]:
    """Split sends, so that only one per queue is in flight."""
    window: list[Send] = []
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


async def _first_attempt(task: RetryingSender, send: Send, targets: Targets) -> UnfinishedSend:
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
