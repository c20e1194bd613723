"""Columns of stored records: each field of many records as the buffers of an Arrow array.

Numbers come as arrays, texts as `Texts`. Unlike in a log, records of release 5 count, and topics
and queue ids may be anything: what to do with them is up to the reader.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from turbopump.core.reference.hashing import body_crc
from turbopump.core.reference.layout import (
    ENTRY_END,
    FIXED,
    FIXED_BYTES,
    HOST_BITS_SHIFT,
    MAGIC,
    MAGIC_V2,
    NAME_END,
    SYS_FLAG_LOW_BYTE_AT,
    TEXT_LENGTH,
    UNIQUE_KEY,
    V2_TOPIC_LENGTH,
)
from turbopump.errors import InvalidArgument

Buffer = bytes | bytearray | memoryview

_BYTES_MAX = 2**31 - 1
_COMPRESSED_BIT = 1
_PORT = struct.Struct(">i")
_POSITION = struct.Struct(">q")
_EARLIEST_MS = -62_135_596_800_000
_LATEST_MS = 253_402_300_799_999
"""The years 1 to 9999. A sender's clock may show anything; other times are null."""


class Texts(NamedTuple):
    """Byte strings as Arrow has them: those of one row lie between two offsets."""

    validity: bytes | None
    """A bit for each row, the lowest first, zero for null; None if no row is null."""
    offsets: array[int]
    data: bytes


class Times(NamedTuple):
    """Microseconds since 1970."""

    validity: bytes | None
    values: array[int]


class Maps(NamedTuple):
    """Maps of strings: the entries of one row lie between two of ``firsts``."""

    firsts: array[int]
    names: Texts
    values: Texts


class _Cell(NamedTuple):
    """Where a record and its parts lie in the buffer."""

    at: int
    body_at: int
    body_end: int
    topic_at: int
    text_at: int
    end: int
    span: int
    """The number of the part of the buffer it is in."""
    fields: tuple[int | bytes, ...]
    """Of the fixed part, as `StoredRecord` has them."""


def scan_records(
    data: Buffer, spans: Sequence[tuple[int, int]] | None = None
) -> tuple[RecordTable, int | None]:
    """Find records that lie back to back in a buffer, or in parts of it, given in its order.

    Returns those before the first damaged one, and its position, if there is one. A checksum is not
    checked, see `RecordTable.damaged_bodies`.
    """
    view = memoryview(data).cast("B")
    if len(view) > _BYTES_MAX:
        raise InvalidArgument(f"records must be at most {_BYTES_MAX} bytes, got {len(view)}")
    cells: list[_Cell] = []
    for number, (at, end) in enumerate([(0, len(view))] if spans is None else spans):
        if not 0 <= at <= end:
            raise InvalidArgument(f"records cannot lie between bytes {at} and {end}")
        while at < end:
            cell = _cell(view, at, min(end, len(view)), number)
            if cell is None:
                return RecordTable(view, cells), at
            cells.append(cell)
            at = cell.end
    return RecordTable(view, cells), None


def _cell(data: memoryview, at: int, limit: int, span: int) -> _Cell | None:
    left = limit - at
    fixed = FIXED[data[at + SYS_FLAG_LOW_BYTE_AT] >> HOST_BITS_SHIFT & 0b11] if (
        left >= FIXED_BYTES
    ) else FIXED[-1]  # fmt: skip
    if left < fixed.size:
        return None
    fields = fixed.unpack_from(data, at)
    size, magic, body_length = fields[0], fields[1], fields[-1]
    end, body_at = at + size, at + fixed.size
    body_end = body_at + body_length
    lengths = 1 if magic == MAGIC else V2_TOPIC_LENGTH.size
    topic_at = body_end + lengths
    if magic not in {MAGIC, MAGIC_V2} or size > left or body_length < 0 or topic_at > end:
        return None
    topic_bytes: int = (
        data[body_end] if magic == MAGIC else V2_TOPIC_LENGTH.unpack_from(data, body_end)[0]
    )
    text_at = topic_at + topic_bytes + TEXT_LENGTH.size
    if topic_bytes < 0 or text_at > end:
        return None
    (text_bytes,) = TEXT_LENGTH.unpack_from(data, text_at - TEXT_LENGTH.size)
    if text_at + text_bytes != end:
        return None
    return _Cell(at, body_at, body_end, topic_at, text_at, end, span, fields)


class RecordTable:
    """Records of a buffer as the rows of a table; it holds the buffer, not copies."""

    __slots__ = ("_cells", "_data")

    def __init__(self, data: memoryview, cells: Sequence[_Cell]) -> None:
        self._data = data
        self._cells = cells

    def __len__(self) -> int:
        return len(self._cells)

    def __getitem__(self, rows: slice) -> RecordTable:
        return RecordTable(self._data, self._cells[rows])

    def where(self, chosen: Buffer) -> RecordTable:
        """Return the rows that have a byte other than zero."""
        mask = bytes(chosen)
        if len(mask) != len(self):
            raise ValueError(f"{len(mask)} choices for {len(self)} records")
        cells = [cell for cell, is_chosen in zip(self._cells, mask, strict=True) if is_chosen]
        return RecordTable(self._data, cells)

    def between(self, offsets: Sequence[tuple[int, int]]) -> RecordTable:
        """Return the rows whose queue offsets are in a range, given for each part of the buffer."""
        cells = [
            cell
            for cell in self._cells
            if offsets[cell.span][0] <= _number(cell, 5) < offsets[cell.span][1]
        ]
        return RecordTable(self._data, cells)

    # --- parts of single rows ---------------------------------------------------------------------

    def record(self, row: int) -> bytes:
        """Return the bytes of a record."""
        cell = self._cells[row]
        return bytes(self._data[cell.at : cell.end])

    def body(self, row: int) -> bytes:
        """Return a body as it is stored."""
        cell = self._cells[row]
        return bytes(self._data[cell.body_at : cell.body_end])

    def text(self, row: int) -> bytes:
        """Return the properties of a record, in their text form."""
        cell = self._cells[row]
        return bytes(self._data[cell.text_at : cell.end])

    # --- columns of numbers -----------------------------------------------------------------------

    def spans(self) -> array[int]:
        """Return which part of the buffer each record is in."""
        return array("i", (cell.span for cell in self._cells))

    def starts(self) -> array[int]:
        """Return where in the buffer each record starts."""
        return array("q", (cell.at for cell in self._cells))

    def sizes(self) -> array[int]:
        return array("i", (cell.end - cell.at for cell in self._cells))

    def queue_ids(self) -> array[int]:
        return self._numbers("i", 3)

    def queue_offsets(self) -> array[int]:
        return self._numbers("q", 5)

    def physical_offsets(self) -> array[int]:
        return self._numbers("q", 6)

    def sys_flags(self) -> array[int]:
        return self._numbers("i", 7)

    def store_times_ms(self) -> array[int]:
        return self._numbers("q", 11)

    def reconsume_times(self) -> array[int]:
        return self._numbers("i", 14)

    def born_times(self) -> Times:
        return _times(self._numbers("q", 8))

    def store_times(self) -> Times:
        return _times(self._numbers("q", 11))

    def compressed(self) -> list[int]:
        """Return the rows whose bodies are compressed."""
        flags = enumerate(self.sys_flags())
        return [row for row, flag in flags if flag & _COMPRESSED_BIT]

    def damaged_bodies(self) -> list[int]:
        """Return the rows whose bodies do not match their checksums."""
        return [
            row
            for row, cell in enumerate(self._cells)
            if body_crc(self._data[cell.body_at : cell.body_end]) != cell.fields[2]
        ]

    # --- columns of few values --------------------------------------------------------------------

    def topics(self) -> tuple[list[bytes], array[int]]:
        """Return the distinct topics, and each row's index into them."""
        return _distinct(
            bytes(self._data[cell.topic_at : cell.text_at - TEXT_LENGTH.size])
            for cell in self._cells
        )

    def born_hosts(self) -> tuple[list[bytes], array[int]]:
        """Return the distinct hosts, the bytes of IP address and port, and each row's index."""
        return _distinct(map(_born_host, self._cells))

    def store_hosts(self) -> tuple[list[bytes], array[int]]:
        return _distinct(map(_store_host, self._cells))

    # --- columns of texts -------------------------------------------------------------------------

    def bodies(self, others: Mapping[int, bytes | None]) -> Texts:
        """Return bodies as they are stored; ``others`` stand in their place, None for null."""
        return _texts(others[row] if row in others else self.body(row) for row in range(len(self)))

    def offset_ids(self) -> Texts:
        """Return store host and position, in hexadecimal digits."""
        return _texts(map(_offset_id, self._cells))

    def message_ids(self) -> Texts:
        """Return unique keys, or offset ids for records without one."""
        names = UNIQUE_KEY.decode()
        return _texts(
            properties[names] if names in properties else _offset_id(cell)
            for cell, properties in zip(self._cells, self._properties(), strict=True)
        )

    def property_values(self, name: str) -> Texts:
        """Return the values of one property, null for records without it."""
        return _texts(properties.get(name) for properties in self._properties())

    def properties(self) -> Maps:
        """Return all properties; of a name given twice, the last value counts, in its place."""
        found = list(self._properties())
        firsts = array("i", [0])
        for properties in found:
            firsts.append(firsts[-1] + len(properties))
        names = _texts(name.encode() for properties in found for name in properties)
        return Maps(firsts, names, _texts(_chained(properties.values() for properties in found)))

    def _numbers(self, kind: str, field: int) -> array[int]:
        return array(kind, (_number(cell, field) for cell in self._cells))

    def _properties(self) -> Iterator[dict[str, bytes]]:
        """Yield the properties of each record; bytes that are not UTF-8 are replaced."""
        name_end, entry_end = NAME_END.decode(), ENTRY_END.decode()
        for row in range(len(self)):
            found: dict[str, bytes] = {}
            for entry in self.text(row).decode("utf-8", "replace").split(entry_end):
                name, _, value = entry.partition(name_end)
                if name and value:
                    found.pop(name, None)
                    found[name] = value.encode()
            yield found


def _number(cell: _Cell, field: int) -> int:
    value = cell.fields[field]
    assert isinstance(value, int)
    return value


def _host(cell: _Cell, field: int) -> bytes:
    ip, port = cell.fields[field], _number(cell, field + 1)
    assert isinstance(ip, bytes)
    return ip + _PORT.pack(port)


def _born_host(cell: _Cell) -> bytes:
    return _host(cell, 9)


def _store_host(cell: _Cell) -> bytes:
    return _host(cell, 12)


def _offset_id(cell: _Cell) -> bytes:
    return (_store_host(cell) + _POSITION.pack(_number(cell, 6))).hex().upper().encode()


def _distinct(values: Iterable[bytes]) -> tuple[list[bytes], array[int]]:
    numbers: dict[bytes, int] = {}
    indices = array("i", (numbers.setdefault(value, len(numbers)) for value in values))
    return list(numbers), indices


def _chained(parts: Iterable[Collection[bytes]]) -> Iterator[bytes]:
    return (value for part in parts for value in part)


def _times(times_ms: array[int]) -> Times:
    shown = [_EARLIEST_MS <= time_ms <= _LATEST_MS for time_ms in times_ms]
    pairs = zip(times_ms, shown, strict=True)
    values = (time_ms * 1000 if is_shown else 0 for time_ms, is_shown in pairs)
    return Times(_validity(shown), array("q", values))


def _texts(values: Iterable[bytes | None]) -> Texts:
    found = list(values)
    offsets, at = array("i", [0]), 0
    for value in found:
        at += len(value or b"")
        if at > _BYTES_MAX:
            raise InvalidArgument(f"a column must be at most {_BYTES_MAX} bytes: read fewer rows")
        offsets.append(at)
    data = b"".join(value for value in found if value)
    return Texts(_validity([value is not None for value in found]), offsets, data)


def _validity(is_valid: Sequence[bool]) -> bytes | None:
    if all(is_valid):
        return None
    bits = bytearray((len(is_valid) + 7) // 8)
    for row, valid in enumerate(is_valid):
        bits[row >> 3] |= valid << (row & 7)
    return bytes(bits)
