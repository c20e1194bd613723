"""Source rows as the user's function gets them, and as messages to send back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from turbopump.client.delivery.results import with_next_attempt
from turbopump.client.names import without_namespace
from turbopump.errors import SparkError
from turbopump.message import QueueOffset
from turbopump.spark.records.arrow_arrays import cells, renamed
from turbopump.wire import properties, sysflag
from turbopump.wire.hosts import Host, host, split_address
from turbopump.wire.ids import parse_offset_id
from turbopump.wire.names import retry_topic
from turbopump.wire.record import MAGIC, MessageView

_COMPRESSION_BITS = sysflag.COMPRESSED | 0x700
_US_PER_MS = 1000
_TIMES = ("bornTimestamp", "storeTimestamp")
_MESSAGE_COLUMNS = (
    "topic",
    "broker",
    "queueId",
    "queueOffset",
    "offsetMsgId",
    "properties",
    "body",
    *_TIMES,
    "bornHost",
    "reconsumeTimes",
    "sysFlag",
    "size",
)


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message and the broker that it was read from."""

    message: MessageView
    broker: str


class Messages:
    """Rows as messages, one object for each."""

    def __init__(self, delivered: Sequence[Delivered]) -> None:
        self._delivered = delivered

    def __len__(self) -> int:
        return len(self._delivered)

    def __iter__(self) -> Iterator[MessageView]:
        return (each.message for each in self._delivered)

    def part(self, start: int, end: int) -> Messages:
        return Messages(self._delivered[start:end])

    def tried(self, rows: Iterable[int]) -> Messages:
        """Return a copy with some rows counted as tried once more."""
        counted = list(self._delivered)
        for row in rows:
            each = counted[row]
            counted[row] = Delivered(with_next_attempt(each.message), each.broker)
        return Messages(counted)

    @property
    def reconsume_times(self) -> Sequence[int]:
        return [each.message.reconsume_times for each in self._delivered]

    def delivered(self, rows: Sequence[int]) -> list[Delivered]:
        """Return some rows as messages, for sending back."""
        return [self._delivered[row] for row in rows]


class Table:
    """Rows as an Arrow batch; only those to send back become messages."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return self.batch.num_rows

    def part(self, start: int, end: int) -> Table:
        return Table(self.batch.slice(start, end - start))

    def tried(self, rows: Iterable[int]) -> Table:
        times = list(self.reconsume_times)
        for row in rows:
            times[row] += 1
        return Table(_with_column(self.batch, "reconsumeTimes", pa.array(times, pa.int32())))

    @property
    def reconsume_times(self) -> Sequence[int]:
        return cells(self.batch.column("reconsumeTimes"))

    def delivered(self, rows: Sequence[int]) -> list[Delivered]:
        return delivered(self.batch.take(pa.array(rows, pa.int64())))


RowSlice: TypeAlias = Messages | Table
"""Rows for one call of the function."""


# --- from columns to messages ---------------------------------------------------------------------


def delivered(batch: pa.RecordBatch) -> list[Delivered]:
    """Return every row as a message, equal to what other consumers get.

    Rows lack the application's flag, which is 0 here, and bodies are already decompressed.
    """
    columns = [_values(name, batch.column(name)) for name in _MESSAGE_COLUMNS]
    return [_delivered(*cells) for cells in zip(*columns, strict=True)]


def _values(name: str, column: Any) -> list[Any]:
    if name not in _TIMES:
        return cells(column)
    times = column.cast(pa.int64()).to_pylist()
    # A sender's clock may show a time that no timestamp can hold; it is null in the column.
    return [0 if time is None else time // _US_PER_MS for time in times]


def _delivered(
    topic: str,
    broker: str,
    queue_id: int,
    queue_offset: QueueOffset,
    offset_id: str | None,
    named: list[tuple[str, str]] | None,
    body: bytes | None,
    born_ms: int,
    store_ms: int,
    born_host: str,
    reconsume_times: int,
    sys_flag: int,
    size: int,
) -> Delivered:
    """Return a message from the cells of a row, in the order of `_MESSAGE_COLUMNS`."""
    if body is None or offset_id is None:
        raise SparkError(
            f"topic {topic}, broker {broker}, queue {queue_id}, offset {queue_offset} could not be "
            "decoded, so it cannot be redelivered: let the handler succeed for rows with a "
            "decodeError, or set onBadRecord to skip or deadLetter"
        )
    store_host, physical_offset = parse_offset_id(offset_id)
    born = _host(born_host)
    message = MessageView(
        size=size,
        magic=MAGIC,
        body_crc=0,
        queue_id=queue_id,
        flag=0,
        queue_offset=queue_offset,
        physical_offset=physical_offset,
        sys_flag=sys_flag & ~_COMPRESSION_BITS,
        born_timestamp_ms=born_ms,
        born_ip=born.ip,
        born_port=born.port,
        store_timestamp_ms=store_ms,
        store_ip=store_host.ip,
        store_port=store_host.port,
        reconsume_times=reconsume_times,
        prepared_transaction_offset=0,
        body_length=len(body),
        stored_body=body,
        topic=topic,
        stored_properties=b"",
        _properties=dict(named or ()),
        _body=body,
    )
    return Delivered(message, broker)


@lru_cache(maxsize=4096)
def _host(text: str) -> Host:
    return host(*split_address(text))


# --- where a message belongs ----------------------------------------------------------------------


def with_original_topic(batch: pa.RecordBatch, group: str, namespace: str) -> pa.RecordBatch:
    """Return rows with their original topic, as the application knows it.

    Redelivered messages are in the group's retry topic; a property names the original one.
    """
    topics: Any = batch.column("topic")
    names = {retry_topic(group), without_namespace(namespace, retry_topic(group))}
    is_retry = pc.is_in(topics, value_set=pa.array(sorted(names), pa.string()))
    again = pc.any(is_retry).as_py()
    if not again and not namespace:
        return batch
    if again:
        origins = pc.map_lookup(
            batch.column("properties"), pa.scalar(properties.RETRY_TOPIC), "last"
        )
        topics = pc.if_else(is_retry, pc.coalesce(origins, topics), topics)
    if namespace:
        topics = renamed(topics, lambda name: without_namespace(namespace, name))
    return _with_column(batch, "topic", topics)


def _with_column(batch: pa.RecordBatch, name: str, column: Any) -> pa.RecordBatch:
    at = batch.schema.get_field_index(name)
    return batch.set_column(at, batch.schema.field(at), column)


def split_by_queue(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Split rows where the queue changes; a task may read several queues in sequence."""
    count = batch.num_rows - 1
    changes: Any = pa.array([False] * count, pa.bool_())
    for name in ("topic", "broker", "queueId"):
        column = batch.column(name)
        changes = pc.or_(changes, pc.not_equal(column.slice(1), column.slice(0, count)))
    ends: Any = pc.indices_nonzero(changes)
    cuts = [0, *(end + 1 for end in ends.to_pylist()), batch.num_rows]
    for start, end in pairwise(cuts):
        yield batch.slice(start, end - start)
