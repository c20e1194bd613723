"""Encoding Arrow columns directly as batches, without an object per cell.

Most rows take this path. `RowConverter` converts the others: invalid or delayed rows, rows large
enough to be compressed, and all rows of a record batch with such a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from turbopump.client.outgoing import MessageRules
from turbopump.spark.records.arrow_arrays import Column, Int64s, cells, contents, of_widths
from turbopump.spark.writing.options import SinkOptions
from turbopump.spark.writing.row_converter import STAMP_PROPERTY, ConvertedRows, Origin
from turbopump.spark.writing.sink_columns import SinkColumns
from turbopump.wire import properties
from turbopump.wire.ids import COUNTER_DIGITS, UniqueIds, with_counter
from turbopump.wire.names import RETRY_PREFIX

ROWS_MAX = 32768
"""Rows encoded together: half as many as there are unique ids in a millisecond."""

_FIRST_PLAIN, _LAST_PLAIN = 0x21, 0x7E
"""ASCII without blanks and property separators."""


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Rows as encoded in batches; None for what no row chooses."""

    first_row: int
    topics: Sequence[str]
    entries: Column
    body_sizes: Int64s
    ids: tuple[str, int]
    """The prefix of their unique ids, and the counter of the first one."""

    sharding_keys: Sequence[str | int | None] | None = None
    queue_ids: Sequence[int | None] | None = None
    brokers: Sequence[str | None] | None = None

    def message_id(self, place: int) -> str:
        prefix, first = self.ids
        return with_counter(prefix, first + place)


Rows: TypeAlias = ConvertedRows | EncodedRows


class RowEncoder:
    """Encodes the rows of one task."""

    def __init__(
        self, columns: SinkColumns, options: SinkOptions, origin: Origin, ids: UniqueIds
    ) -> None:
        self._columns = columns
        self._topic = options.topic
        self._rules = options.rules()
        self._is_stamped = options.stamp != "false"
        self._is_stamp_key = options.stamp == "true"
        self._stamp = origin.prefix
        # A row that has a stamp is refused, or gets the new one in its place.
        stamps = {STAMP_PROPERTY} if self._is_stamped else set()
        self._refused = properties.RESERVED | stamps
        self._drops_reserved = options.reserved_properties == "drop"
        self._ids = ids

    def rows(self, batch: pa.RecordBatch, first_row: int) -> EncodedRows | None:
        """Encode a batch, given the number of its first row; None if its rows need another path."""
        count = batch.num_rows
        if not 0 < count <= ROWS_MAX or self._is_special(batch):
            return None
        topics, bodies = self._topics(batch), plain_bodies(batch.column("body"), self._rules)
        tags, keys, own = self._tags(batch), self._keys(batch), self._own(batch)
        if topics is None or bodies is None or tags is None or keys is None or own is None:
            return None
        ids = self._ids.claim(count)
        named = [*_unique(ids, count), *tags, *self._stamped(keys, own, first_row, count)]
        made = entries(bodies, named)
        if made is None:
            return None
        return EncodedRows(
            first_row,
            topics,
            made,
            sizes(bodies),
            ids,
            self._values(batch, "shardingKey"),
            self._values(batch, "queueId"),
            self._values(batch, "broker"),
        )

    def _is_special(self, batch: pa.RecordBatch) -> bool:
        """Whether there are delays, or the stamps are not keys."""
        if self._is_stamped and not _is_key(self._stamp):
            return True
        if "delayLevel" not in self._columns:
            return False
        return bool(batch.column("delayLevel").fill_null(0).to_numpy().any())

    def _topics(self, batch: pa.RecordBatch) -> Sequence[str] | None:
        if self._topic is not None:
            topics = distinct = [self._topic]
        else:
            column = batch.column("topic")
            if column.null_count:
                return None
            distinct = cells(column.unique())
            topics = cells(column) if len(distinct) > 1 else distinct
        if any(topic.startswith(RETRY_PREFIX) for topic in distinct):
            return None
        return topics if len(distinct) > 1 else topics * batch.num_rows

    def _tags(self, batch: pa.RecordBatch) -> Pieces | None:
        if "tags" not in self._columns:
            return []
        column = batch.column("tags").cast(pa.string())
        given = column.drop_null() if column.null_count else column
        if not _is_plain(given) and not all(map(is_text, cells(given))):
            return None
        if given is column:
            return [_name(properties.TAGS), column.cast(pa.binary())]
        mark = _where(column.is_valid(), _name(properties.TAGS))
        return [mark, column.fill_null("").cast(pa.binary())]

    def _keys(self, batch: pa.RecordBatch) -> Column | None:
        """Return the keys of each row as one text, empty if there are none."""
        if "keys" not in self._columns:
            return pa.array([], pa.string())
        column = batch.column("keys")
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            return _joined_keys(column)
        column = column.cast(pa.string()).fill_null("")
        if _is_plain(column):
            return column
        texts = [" ".join(each.split()) for each in cells(column)]
        return None if any(mark in each for each in texts for mark in MARKS) else pa.array(texts)

    def _own(self, batch: pa.RecordBatch) -> Pieces | None:
        if "properties" not in self._columns:
            return []
        column = batch.column("properties")
        left_out = properties.RESERVED if self._drops_reserved else ()
        return user_properties(column, left_out, self._refused)

    def _stamped(self, keys: Column, own: Pieces, first_row: int, count: int) -> Pieces:
        """Return the keys, the properties and the stamps of rows."""
        numbers = pa.array(np.arange(first_row, first_row + count)).cast(pa.string())
        rows, stamp = numbers.cast(pa.binary()), self._stamp.encode()
        has_keys = pa.array(sizes(keys) > 0) if len(keys) else None
        pieces: Pieces = []
        if self._is_stamp_key:
            pieces += [_name(properties.KEYS)]
            if has_keys is not None:
                pieces += [keys.cast(pa.binary()), _where(has_keys, b" ")]
            pieces += [stamp, rows]
        elif has_keys is not None:
            pieces += [_where(has_keys, _name(properties.KEYS)), keys.cast(pa.binary())]
        pieces += own
        if self._is_stamped:
            pieces += [_name(STAMP_PROPERTY) + stamp, rows]
        return pieces

    def _values(self, batch: pa.RecordBatch, name: str) -> list[Any] | None:
        return cells(batch.column(name)) if name in self._columns else None


def plain_bodies(column: Column, rules: MessageRules) -> Column | None:
    """Return bodies as binaries; None if one is missing, invalid, or to be compressed."""
    if column.null_count:
        return None
    bodies = column.cast(pa.binary())
    found = sizes(bodies)
    largest = min(rules.body_bytes_max, rules.compress_from_bytes - 1)
    return bodies if found.min() > 0 and found.max() <= largest else None


def _unique(ids: tuple[str, int], count: int) -> Pieces:
    """Return the properties that start every message."""
    prefix, first = ids
    counters = np.arange(first, first + count).astype(">u2").tobytes().hex().upper()
    digits = np.frombuffer(counters.encode(), f"V{COUNTER_DIGITS}")
    name = f"{properties.UNIQUE_KEY}{properties.NAME_END}{prefix}"
    wait = f"{properties.ENTRY_END}{properties.WAIT}{properties.NAME_END}true"
    return [name.encode(), of_widths(pa.binary(), digits), wait.encode()]


def _where(there: Column, piece: bytes) -> Column:
    made: Column = pc.if_else(there, pa.scalar(piece, pa.binary()), pa.scalar(b"", pa.binary()))
    return made


def _name(name: str) -> bytes:
    """Return what precedes the value of a property that is not the first."""
    return f"{properties.ENTRY_END}{name}{properties.NAME_END}".encode()


def _joined_keys(column: Column) -> Column | None:
    """Join the keys of each row; None if one of them is invalid."""
    values: Column = pc.list_flatten(column).cast(pa.string())
    if values.null_count or not (_is_plain(values) or all(map(_is_key, cells(values)))):
        return None
    texts: Any = pc.binary_join(column.cast(pa.list_(pa.string())), " ")
    joined: Column = texts.fill_null("")
    return joined


def _is_plain(texts: Column) -> bool:
    """Whether no text is empty or contains characters that need further checks."""
    if not len(texts):
        return True
    ends, data = contents(texts)
    if np.diff(ends).min(initial=1) == 0:
        return False
    used = data[ends[0] :]
    return bool(
        used.min(initial=_LAST_PLAIN) >= _FIRST_PLAIN and used.max(initial=0) <= _LAST_PLAIN
    )


def _is_key(text: str) -> bool:
    return text.split() == [text] and not any(mark in text for mark in MARKS)


# --- entries of a batch ---------------------------------------------------------------------------

Pieces: TypeAlias = "list[bytes | Column]"
"""The adjacent pieces of each row: the same bytes in all rows, or binaries."""

_HEAD = np.dtype(
    [("size", ">i4"), ("magic", ">i4"), ("crc", ">i4"), ("flag", ">i4"), ("body_size", ">i4")]
)
_PROPERTIES_SIZE = np.dtype(">i2")
_BYTES_MAX = 2**31 - 1
"""The maximum of Arrow's offsets."""


def entries(bodies: Column, named: Pieces) -> Column | None:
    """Return a batch's message for each body and its properties; None if one is too large.

    The result's bytes are adjacent: a slice of them is the body of a batch.
    """
    body_sizes = sizes(bodies)
    named_sizes = np.zeros(len(bodies), np.int64)
    for piece in named:
        named_sizes += len(piece) if isinstance(piece, bytes) else sizes(piece)
    own = _HEAD.itemsize + _PROPERTIES_SIZE.itemsize
    totals = body_sizes + named_sizes + own
    if named_sizes.max() > properties.BYTES_MAX or totals.sum() > _BYTES_MAX:
        return None
    heads = np.zeros(len(bodies), _HEAD)
    heads["size"] = totals
    heads["body_size"] = body_sizes
    lengths = of_widths(pa.binary(), named_sizes.astype(">i2"))
    return joined([of_widths(pa.binary(), heads), bodies, lengths, *named])


def joined(pieces: Pieces) -> Column:
    """Concatenate the pieces of each row; none of them is null."""
    kind = pa.binary()
    given: list[Any] = [
        pa.scalar(each, kind) if isinstance(each, bytes) else each for each in _merged(pieces)
    ]
    made: Column = pc.binary_join_element_wise(*given, pa.scalar(b"", kind))
    return made


def _merged(pieces: Pieces) -> Pieces:
    """Join neighbours that are the same in all rows: the cost depends on the number of pieces."""
    merged: Pieces = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if isinstance(piece, bytes) and isinstance(last, bytes):
            merged[-1] = last + piece
        else:
            merged.append(piece)
    return merged


def sizes(column: Column) -> Int64s:
    """Return the sizes of texts or binaries, of which none is null."""
    return np.diff(contents(column)[0]).astype(np.int64)


# --- user properties ------------------------------------------------------------------------------

MARKS = (properties.NAME_END, properties.ENTRY_END)


def is_text(text: str) -> bool:
    """Whether a property may have this value."""
    return bool(text.strip()) and not any(mark in text for mark in MARKS)


def user_properties(
    column: Column, left_out: Iterable[str], refused: frozenset[str]
) -> Pieces | None:
    """Return the maps as encoded after other properties; None if one needs further checks."""
    entries = _Entries.of(column)
    if entries is None:
        return None
    entries = entries.without(frozenset(left_out))
    if not len(entries.values):
        return []
    if not entries.are_allowed(refused):
        return None
    parts: Pieces = [
        properties.ENTRY_END.encode(),
        entries.names.cast(pa.binary()),
        properties.NAME_END.encode(),
        entries.values.cast(pa.binary()),
    ]
    flat = joined(parts)
    firsts = contents(flat)[0][entries.offsets]
    buffers = [None, pa.py_buffer(firsts.data), flat.buffers()[2]]
    return [pa.Array.from_buffers(pa.binary(), len(column), buffers)]


class _Entries:
    """The entries of many maps, back to back."""

    def __init__(self, offsets: npt.NDArray[np.int32], names: Column, values: Column) -> None:
        self.offsets = offsets
        """Where the entries of each map start, and the end."""
        self.names = names
        self.values = values
        found = cast("Any", names.dictionary_encode())
        self._codes: npt.NDArray[np.int32] = found.indices.to_numpy()
        self._known = cells(found.dictionary)

    @classmethod
    def of(cls, column: Column) -> _Entries | None:
        """Return the entries; None if one is null, or a map that is null has some."""
        given = cast("Any", column)
        offsets = given.offsets.to_numpy()
        counts = np.diff(offsets)
        if column.null_count and counts[column.is_null().to_numpy(zero_copy_only=False)].any():
            return None
        start, count = int(offsets[0]), int(offsets[-1] - offsets[0])
        names, values = given.keys.slice(start, count), given.items.slice(start, count)
        if names.null_count or values.null_count:
            return None
        return cls(offsets - offsets[0], names.cast(pa.string()), values.cast(pa.string()))

    def without(self, names: frozenset[str]) -> _Entries:
        if not names.intersection(self._known):
            return self
        kept = ~np.isin(self._codes, [n for n, name in enumerate(self._known) if name in names])
        places = np.concatenate(([0], np.cumsum(kept))).astype(np.int32)
        mask = pa.array(kept)
        return _Entries(places[self.offsets], self.names.filter(mask), self.values.filter(mask))

    def are_allowed(self, refused: frozenset[str]) -> bool:
        """Whether all entries are valid, and no map has a duplicate name."""
        if any(name in refused or not is_text(name) for name in self._known):
            return False
        if not all(map(is_text, cells(self.values.unique()))):
            return False
        rows = np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))
        pairs = rows * len(self._known) + self._codes
        return len(np.unique(pairs)) == len(pairs)
