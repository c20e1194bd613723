"""Rows of Arrow columns as the messages of a batch, each with its properties in their text form.

A message of a batch is its size, 8 bytes that peers ignore, flag, body and properties, both with
their lengths.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from turbopump.core.reference.layout import ENTRY_END, NAME_END, PROPERTIES_BYTES_MAX

Buffer = bytes | bytearray | memoryview

_HEAD = struct.Struct(">i12xi")
_TEXT_LENGTH = struct.Struct(">H")
_OFFSET = struct.Struct("=i")
_COUNTER_MASK = 0xFFFF


class TextColumn(NamedTuple):
    """The buffers of an Arrow array of strings or binaries."""

    validity: Buffer | None
    offsets: Buffer
    data: Buffer
    first: int
    """The element that is row 0."""


class ListColumn(NamedTuple):
    """The buffers of an Arrow array of lists or maps, without their elements."""

    validity: Buffer | None
    offsets: Buffer
    first: int


class RowColumns(NamedTuple):
    """The columns of rows to send; None for those that they do not have."""

    bodies: TextColumn
    tags: TextColumn | None = None
    keys: TextColumn | None = None
    """Keys separated by blanks, or, with ``key_lists``, one of a list each."""
    key_lists: ListColumn | None = None
    names: TextColumn | None = None
    values: TextColumn | None = None
    """Of properties; ``maps`` has the first one of each row."""
    maps: ListColumn | None = None


class RowStyle(NamedTuple):
    """What all rows of a write have in common."""

    body_bytes_max: int
    stamp: bytes | None
    """What precedes the row's number in its stamp; None for rows without one."""
    stamp_name: bytes
    """The property that the stamp is."""
    is_stamp_key: bool
    """Whether the stamp is also a key."""
    left_out: frozenset[bytes]
    """Names of properties that are omitted."""
    refused: frozenset[bytes]
    """Names of properties that make a row a special one."""


class _Special(Exception):
    """A row cannot be encoded without a closer look."""


def encode_rows(
    columns: RowColumns,
    count: int,
    first_row: int,
    id_prefix: bytes,
    first_id: int,
    style: RowStyle,
    texts: Mapping[int, bytes],
) -> tuple[array[int], bytearray, list[int]]:
    """Encode rows as the messages of a batch, and return where each ends, their bytes, and others.

    ``id_prefix`` and a counter in four hexadecimal digits, for the first row ``first_id``, are
    their unique keys. ``texts`` are the whole properties of some rows. Rows that are invalid, or
    have several properties of one name, are the others, unless there is a text for them: they have
    no bytes. Raises ValueError if the columns are inconsistent.
    """
    data = bytearray()
    ends = array("q", [0])
    special = []
    for row in range(count):
        counter = first_id + row & _COUNTER_MASK
        try:
            body = _value(columns.bodies, row) or b""
            _require(0 < len(body) <= style.body_bytes_max)
            text = texts.get(row)
            if text is None:
                unique = b"UNIQ_KEY\x01%s%04X\x02WAIT\x01true" % (id_prefix, counter)
                text = unique + b"".join(_properties(columns, row, first_row + row, style))
            _require(len(text) <= PROPERTIES_BYTES_MAX)
        except _Special:
            special.append(row)
        else:
            data += _HEAD.pack(_HEAD.size + len(body) + 2 + len(text), len(body))
            data += body + _TEXT_LENGTH.pack(len(text)) + text
        ends.append(len(data))
    return ends, data, special


def _properties(columns: RowColumns, row: int, number: int, style: RowStyle) -> Iterator[bytes]:
    """Yield the properties of a row after those that all have."""
    tags = None if columns.tags is None else _value(columns.tags, row)
    if tags is not None:
        _require(_is_text(tags))
        yield _entry(b"TAGS", tags)
    stamp = None if style.stamp is None else b"%s%d" % (style.stamp, number)
    keys = list(_keys(columns, row))
    if style.is_stamp_key and stamp is not None:
        keys.append(stamp)
    if keys:
        yield _entry(b"KEYS", b" ".join(keys))
    seen: set[bytes] = set()
    for name, value in _pairs(columns, row):
        if name not in style.left_out:
            _require(name not in style.refused and _is_text(name) and name not in seen)
            _require(value is not None and _is_text(value))
            seen.add(name)
            yield _entry(name, value or b"")
    if stamp is not None:
        yield _entry(style.stamp_name, stamp)


def _keys(columns: RowColumns, row: int) -> Iterator[bytes]:
    if columns.keys is None:
        return
    if columns.key_lists is None:
        text = _value(columns.keys, row) or b""
        _require(not _has_marks(text))
        # Of what is not UTF-8, only blanks count.
        yield from (each.encode() for each in text.decode("utf-8", "replace").split())
        return
    for element in _elements(columns.key_lists, row):
        key = _value(columns.keys, element)
        _require(key is not None and not _has_marks(key))
        one = (key or b"").decode("utf-8", "replace")
        _require(one.split() == [one])
        yield one.encode()


def _pairs(columns: RowColumns, row: int) -> Iterator[tuple[bytes, bytes | None]]:
    names, values, maps = columns.names, columns.values, columns.maps
    if names is None or values is None or maps is None:
        return
    for element in _elements(maps, row):
        name = _value(names, element)
        _require(name is not None)
        yield name or b"", _value(values, element)


def _entry(name: bytes, value: bytes) -> bytes:
    return ENTRY_END + name + NAME_END + value


def _require(condition: bool) -> None:
    if not condition:
        raise _Special


def _is_text(raw: bytes) -> bool:
    return not _has_marks(raw) and bool(raw.decode("utf-8", "replace").strip())


def _has_marks(raw: bytes) -> bool:
    return NAME_END in raw or ENTRY_END in raw


def _value(column: TextColumn, row: int) -> bytes | None:
    """Return a value, None for null."""
    number = column.first + row
    if not _is_valid(column.validity, number):
        return None
    start, end = _range(column.offsets, number)
    if end > len(column.data):
        raise ValueError(f"a value ends at byte {end} of {len(column.data)}")
    return bytes(column.data[start:end])


def _elements(column: ListColumn, row: int) -> range:
    """Return the elements of a list, none for null; numbered as rows of theirs."""
    number = column.first + row
    return (
        range(*_range(column.offsets, number)) if _is_valid(column.validity, number) else range(0)
    )


def _is_valid(validity: Buffer | None, number: int) -> bool:
    if number < 0:
        raise ValueError(f"no element {number}")
    if validity is None:
        return True
    if number >> 3 >= len(validity):
        raise ValueError(f"no element {number}")
    return bool(validity[number >> 3] >> (number & 7) & 1)


def _range(offsets: Buffer, number: int) -> tuple[int, int]:
    at = _OFFSET.size * number
    if at + 2 * _OFFSET.size > len(offsets):
        raise ValueError(f"no element {number}")
    (start,), (end,) = _OFFSET.unpack_from(offsets, at), _OFFSET.unpack_from(offsets, at + 4)
    if not 0 <= start <= end:
        raise ValueError(f"a value lies between {start} and {end}")
    return start, end
