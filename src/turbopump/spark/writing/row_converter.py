"""Converting Arrow record batches to messages, column by column.

A row is identified by its number in its task, from 0 on. The number also makes the stamp: the same
rows in the same order get the same stamps when a task is retried.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, repeat
from typing import Any

import pyarrow as pa

from turbopump.errors import InvalidArgument
from turbopump.message import Message
from turbopump.spark.writing.options import SinkOptions
from turbopump.spark.writing.sink_columns import SinkColumns
from turbopump.wire.properties import RESERVED

STAMP_PROPERTY = "SPARK_ROW"
"""Which row of which write a message comes from: ``query/batch/partition/row``."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The identity of the rows of one task, the same on every attempt."""

    query: str
    batch: str
    partition: int

    def stamps(self, first_row: int) -> Iterable[str]:
        """Return the stamps of rows from a number on, without end."""
        return map(self.prefix.__add__, map(str, count(first_row)))

    @property
    def prefix(self) -> str:
        """The common prefix of all stamps; the row number follows."""
        return f"{self.query}/{self.batch}/{self.partition}/"


@dataclass(frozen=True, slots=True)
class ConvertedRows:
    """Rows converted to messages; None for what no row chooses."""

    first_row: int
    messages: Sequence[Message]
    sharding_keys: Sequence[str | int | None] | None = None
    queue_ids: Sequence[int | None] | None = None
    brokers: Sequence[str | None] | None = None
    sent: Collection[int] = ()
    """Numbers of rows that are already stored."""

    @property
    def topics(self) -> Sequence[str]:
        return [message.topic for message in self.messages]


class RowConverter:
    """Converts the rows of one task to messages."""

    def __init__(self, columns: SinkColumns, options: SinkOptions, origin: Origin) -> None:
        self._columns = columns
        self._topic = options.topic
        self._origin = origin
        self._is_stamped = options.stamp != "false"
        self._is_stamp_key = options.stamp == "true"
        self._drops_reserved = options.reserved_properties == "drop"

    def rows(self, batch: pa.RecordBatch, first_row: int) -> ConvertedRows:
        """Convert a batch, given the number of its first row; raises InvalidArgument for a row."""
        bodies = self._required(batch, "body", first_row)
        topics = (
            repeat(self._topic)
            if self._topic is not None
            else self._required(batch, "topic", first_row)
        )
        columns = zip(
            topics,
            bodies,
            self._values(batch, "tags") or repeat(None),
            self._keys(batch, first_row),
            self._properties(batch, first_row),
            self._values(batch, "delayLevel") or repeat(0),
            strict=False,
        )
        messages = [
            Message(topic, body, tags=tags, keys=keys, properties=own, delay_level=delay or 0)
            for topic, body, tags, keys, own, delay in columns
        ]
        return ConvertedRows(
            first_row,
            messages,
            self._values(batch, "shardingKey"),
            self._values(batch, "queueId"),
            self._values(batch, "broker"),
        )

    def _values(self, batch: pa.RecordBatch, name: str) -> list[Any] | None:
        return batch.column(name).to_pylist() if name in self._columns else None

    def _required(self, batch: pa.RecordBatch, name: str, first_row: int) -> list[Any]:
        column = batch.column(name)
        if column.null_count:
            row = first_row + column.is_null().to_pylist().index(True)
            raise InvalidArgument(f"{self.place(row, name)}: must not be null")
        if name == "body" and not pa.types.is_binary(column.type):
            column = column.cast(pa.binary())
        return column.to_pylist()

    def _keys(self, batch: pa.RecordBatch, first_row: int) -> Iterable[Sequence[str]]:
        given = self._values(batch, "keys")
        # A text may contain several keys separated by blanks, as messages carry them.
        found: Iterable[Sequence[str]] = (
            repeat(())
            if given is None
            else [one.split() if isinstance(one, str) else one or () for one in given]
        )
        if not self._is_stamp_key:
            return found
        stamps = self._origin.stamps(first_row)
        return ((*keys, stamp) for keys, stamp in zip(found, stamps, strict=False))

    def _properties(self, batch: pa.RecordBatch, first_row: int) -> Iterable[Mapping[str, str]]:
        given = self._values(batch, "properties")
        if given is None:
            if not self._is_stamped:
                return repeat({})
            return ({STAMP_PROPERTY: stamp} for stamp in self._origin.stamps(first_row))
        own = [dict(pairs or ()) for pairs in given]
        if self._drops_reserved:
            own = [{k: v for k, v in one.items() if k not in RESERVED} for one in own]
        if self._is_stamped:
            self._add_stamps(own, first_row)
        return own

    def _add_stamps(self, own: list[dict[str, str]], first_row: int) -> None:
        stamps = self._origin.stamps(first_row)
        for row, (one, stamp) in enumerate(zip(own, stamps, strict=False), first_row):
            if STAMP_PROPERTY in one and not self._drops_reserved:
                raise InvalidArgument(
                    f"{self.place(row, 'properties')}: {STAMP_PROPERTY} is reserved for this "
                    "sink's stamps: remove it, set the option reservedProperties to drop, or set "
                    "stamp to false to keep the old stamps"
                )
            one[STAMP_PROPERTY] = stamp

    def place(self, row: int, column: str) -> str:
        """Return the name of a cell in errors."""
        return f"row {row} of partition {self._origin.partition}, column {column}"
