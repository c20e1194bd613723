"""Rows of Arrow columns, encoded as the messages of batches; the core does so without objects.

A row is identified by its number in its task, from 0 on. The number also makes the stamp: the same
rows in the same order get the same stamps when a task is retried.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from turbopump.client.names import check_topic_for_sending, with_namespace
from turbopump.client.outgoing import MessageRules, check_message, properties_text
from turbopump.core import ListColumn, RowColumns, RowStyle, TextColumn, encode_rows
from turbopump.errors import InvalidArgument
from turbopump.message import Message
from turbopump.spark.records.arrow_arrays import Column, Int64s, cells
from turbopump.spark.writing.options import SinkOptions
from turbopump.spark.writing.sink_columns import SinkColumns
from turbopump.wire import properties
from turbopump.wire.ids import UniqueIds, with_counter

ROWS_MAX = 32768
"""Rows encoded together: half as many as there are unique ids in a millisecond."""

STAMP_PROPERTY = "SPARK_ROW"
"""Which row of which write a message comes from: ``query/batch/partition/row``."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The identity of the rows of one task, the same on every attempt."""

    query: str
    batch: str
    partition: int

    @property
    def prefix(self) -> str:
        """The common prefix of all stamps; the row number follows."""
        return f"{self.query}/{self.batch}/{self.partition}/"


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Rows as encoded in batches; None for what no row chooses."""

    first_row: int
    topics: Sequence[str]
    entries: Column
    """The message of each row; those of adjacent rows are adjacent."""

    body_sizes: Int64s
    ids: tuple[str, int]
    """The prefix of their unique ids, and the counter of the first one."""

    delay_levels: Sequence[int] | None = None
    sharding_keys: Sequence[str | int | None] | None = None
    queue_ids: Sequence[int | None] | None = None
    brokers: Sequence[str | None] | None = None
    sent: Collection[int] = ()
    """Numbers of rows that are already stored."""

    def message_id(self, place: int) -> str:
        prefix, first = self.ids
        return with_counter(prefix, first + place)


class RowEncoder:
    """Encodes the rows of one task."""

    def __init__(
        self, columns: SinkColumns, options: SinkOptions, origin: Origin, ids: UniqueIds
    ) -> None:
        self._columns = columns
        self._topic = options.topic
        self._namespace = options.namespace
        self._rules = options.rules()
        self._origin = origin
        self._ids = ids
        self._is_stamped = options.stamp != "false"
        self._is_stamp_key = options.stamp == "true"
        self._drops_reserved = options.reserved_properties == "drop"
        stamps = {STAMP_PROPERTY} if self._is_stamped else set()
        self._style = RowStyle(
            body_bytes_max=self._rules.body_bytes_max,
            stamp=origin.prefix.encode() if self._is_stamped else None,
            stamp_name=STAMP_PROPERTY.encode(),
            is_stamp_key=self._is_stamp_key,
            left_out=_encoded(properties.RESERVED if self._drops_reserved else ()),
            refused=_encoded(properties.RESERVED | stamps),
        )
        # The core does not look into stamps.
        self._is_stamp_plain = not self._is_stamped or _is_plain_key(origin.prefix)

    def rows(self, batch: pa.RecordBatch, first_row: int) -> EncodedRows:
        """Encode a batch, given the number of its first row; raises InvalidArgument for a row."""
        count = batch.num_rows
        topics = self._topics(batch, first_row)
        self._require_no_null(batch, "body", first_row)
        columns, delays = self._row_columns(batch), self._delays(batch)
        ids = prefix, first_id = self._ids.claim(count) if count else ("", 0)
        given = columns, count, first_row, prefix.encode(), first_id, self._style
        ends, data, special = encode_rows(*given, {})
        if special or delays is not None or not self._is_stamp_plain:
            rows = {*special, *self._wrong_delays(delays)} if self._is_stamp_plain else range(count)
            texts = {}
            for place in sorted(rows):
                name = with_counter(prefix, first_id + place)
                row = first_row + place
                texts[place] = self._text(batch.slice(place, 1), row, topics[place], name)
            ends, data, special = encode_rows(*given, texts)
            assert not special, "each of them has a text"
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(data)]
        return EncodedRows(
            first_row,
            topics,
            pa.Array.from_buffers(pa.large_binary(), count, buffers),
            _sizes(columns.bodies, count),
            ids,
            delays,
            self._values(batch, "shardingKey"),
            self._values(batch, "queueId"),
            self._values(batch, "broker"),
        )

    def _topics(self, batch: pa.RecordBatch, first_row: int) -> Sequence[str]:
        if self._topic is not None:
            return [self._topic] * batch.num_rows
        self._require_no_null(batch, "topic", first_row)
        return cells(batch.column("topic"))

    def _delays(self, batch: pa.RecordBatch) -> Sequence[int] | None:
        levels = self._values(batch, "delayLevel")
        return [level or 0 for level in levels] if levels and any(levels) else None

    def _wrong_delays(self, delays: Sequence[int] | None) -> list[int]:
        wrong = {level for level in set(delays or ()) if not self._is_delay(level)}
        return [place for place, level in enumerate(delays or ()) if level in wrong]

    def _is_delay(self, level: int) -> bool:
        return _wrong(Message("-", b"-", delay_level=level), self._rules) is None

    def _row_columns(self, batch: pa.RecordBatch) -> RowColumns:
        found = RowColumns(_text_column(batch.column("body").cast(pa.binary())))
        if "tags" in self._columns:
            found = found._replace(tags=_text_column(batch.column("tags").cast(pa.string())))
        if "keys" in self._columns:
            keys: Any = batch.column("keys")
            if pa.types.is_list(keys.type) or pa.types.is_large_list(keys.type):
                lists: Any = keys.cast(pa.list_(pa.string()))
                found = found._replace(
                    keys=_text_column(lists.values), key_lists=_list_column(lists)
                )
            else:
                found = found._replace(keys=_text_column(keys.cast(pa.string())))
        if "properties" in self._columns:
            maps: Any = batch.column("properties")
            found = found._replace(
                names=_text_column(maps.keys.cast(pa.string())),
                values=_text_column(maps.items.cast(pa.string())),
                maps=_list_column(maps),
            )
        return found

    def _values(self, batch: pa.RecordBatch, name: str) -> list[Any] | None:
        return cells(batch.column(name)) if name in self._columns else None

    # --- single rows ------------------------------------------------------------------------------

    def _text(self, one: pa.RecordBatch, row: int, topic: str, message_id: str) -> bytes:
        """Return the properties of a row that is unusual; raises InvalidArgument if it is wrong."""
        message = self._message(one, row, topic)
        wrong = wrong_column(message, self._rules, self._namespace)
        if wrong is not None:
            raise InvalidArgument(f"{self._place(row, wrong[0])}: {wrong[1]}")
        try:
            # The delay level is added to what is sent alone.
            return properties_text(_without_delay(message), message_id).encode()
        except InvalidArgument as error:
            place = f"row {row} of partition {self._origin.partition}"
            raise InvalidArgument(f"{place}: {error}") from error

    def _message(self, one: pa.RecordBatch, row: int, topic: str) -> Message:
        cell = {name: cells(one.column(name))[0] for name in self._columns if name in _OF_MESSAGE}
        body, keys = cell["body"], cell.get("keys") or ()
        # A text may contain several keys separated by blanks, as messages carry them.
        keys = keys.split() if isinstance(keys, str) else keys
        own = dict(cell.get("properties") or ())
        if self._drops_reserved:
            own = {name: value for name, value in own.items() if name not in properties.RESERVED}
        if self._is_stamped:
            stamp = f"{self._origin.prefix}{row}"
            if STAMP_PROPERTY in own and not self._drops_reserved:
                raise InvalidArgument(
                    f"{self._place(row, 'properties')}: {STAMP_PROPERTY} is reserved for this "
                    "sink's stamps: remove it, set the option reservedProperties to drop, or set "
                    "stamp to false to keep the old stamps"
                )
            own[STAMP_PROPERTY] = stamp
            keys = (*keys, stamp) if self._is_stamp_key else keys
        return Message(
            topic,
            body.encode() if isinstance(body, str) else body,
            tags=cell.get("tags"),
            keys=keys,
            properties=own,
            delay_level=cell.get("delayLevel") or 0,
        )

    def _require_no_null(self, batch: pa.RecordBatch, name: str, first_row: int) -> None:
        column = batch.column(name)
        if column.null_count:
            row = first_row + cells(column.is_null()).index(True)
            raise InvalidArgument(f"{self._place(row, name)}: must not be null")

    def _place(self, row: int, column: str) -> str:
        """Return the name of a cell in errors."""
        return f"row {row} of partition {self._origin.partition}, column {column}"


_OF_MESSAGE = frozenset({"body", "tags", "keys", "properties", "delayLevel"})


def wrong_column(message: Message, rules: MessageRules, namespace: str) -> tuple[str, str] | None:
    """Return the invalid column of a message and the error, None if all are valid."""
    topic, body = message.topic, b"-"
    parts = {
        "topic": Message(topic, body),
        "body": Message(topic, message.body),
        "tags": Message(topic, body, tags=message.tags),
        "keys": Message(topic, body, keys=message.keys),
        "properties": Message(topic, body, properties=message.properties),
        "delayLevel": Message(topic, body, delay_level=message.delay_level),
    }
    for column, part in parts.items():
        try:
            check_topic_for_sending(with_namespace(namespace, part.topic))
        except InvalidArgument as error:
            return column, str(error)
        wrong = _wrong(part, rules)
        if wrong is not None:
            return column, wrong
    return None


def _wrong(message: Message, rules: MessageRules) -> str | None:
    """Return what is wrong with a message, whatever its topic."""
    try:
        check_message(message, rules)
        properties_text(message, "")
    except InvalidArgument as error:
        return str(error)
    return None


def _without_delay(message: Message) -> Message:
    return Message(
        message.topic,
        message.body,
        tags=message.tags,
        keys=message.keys,
        properties=message.properties,
    )


def _is_plain_key(text: str) -> bool:
    marks = (properties.NAME_END, properties.ENTRY_END)
    return text.split() == [text] and not any(mark in text for mark in marks)


def _encoded(names: Iterable[str]) -> frozenset[bytes]:
    return frozenset(name.encode() for name in names)


# --- the buffers of columns -----------------------------------------------------------------------


def _text_column(column: Column) -> TextColumn:
    validity, offsets, data = map(_memory, column.buffers())
    return TextColumn(validity, offsets or _NO_OFFSETS, data or b"", column.offset)


def _list_column(column: Column) -> ListColumn:
    validity, offsets = map(_memory, column.buffers()[:2])
    return ListColumn(validity, offsets or _NO_OFFSETS, column.offset)


def _memory(buffer: pa.Buffer | None) -> memoryview | None:
    return None if buffer is None else memoryview(buffer)


_NO_OFFSETS = bytes(4)


def _sizes(bodies: TextColumn, count: int) -> Int64s:
    """Return the sizes of binaries, of which none is null."""
    offsets = np.frombuffer(bodies.offsets, np.int32, count + 1, 4 * bodies.first)
    return np.diff(offsets).astype(np.int64)
