"""Decoding stored records to Arrow columns, many at a time: the core fills their buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from turbopump.core import RecordTable, Texts, Times
from turbopump.errors import InvalidArgument, RecordError
from turbopump.spark.records.arrow_arrays import Column
from turbopump.spark.records.bad_records import BadRecord, BadRecords, OnBadRecord
from turbopump.spark.records.schema import DECODE_ERROR, arrow_schema
from turbopump.wire import properties, sysflag
from turbopump.wire.compression import inflate
from turbopump.wire.hosts import Host
from turbopump.wire.record import decode_record

BATCH_BYTES = 16 * 1024 * 1024
"""Bodies that inflate to more are split into batches: 1 MiB of stored text may be 1 GiB."""

DAMAGED_TOPIC = "topic is not UTF-8"
_TIMESTAMP = pa.timestamp("us", tz="UTC")


class RecordColumns:
    """Builds batches of some columns; a value that can be sent to where records are read."""

    def __init__(
        self,
        columns: Sequence[str],
        *,
        tags: frozenset[str] | None = None,
        check_bodies: bool = True,
        bad: BadRecords | None = None,
    ) -> None:
        self.columns = tuple(columns)
        self.tags = tags
        self.check_bodies = check_bodies
        self.bad = bad or BadRecords(OnBadRecord.FAIL)
        self.schema = arrow_schema(self.columns)

    def batches_of(
        self, table: RecordTable, *, broker: str, reason: str | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Decode records into as many batches as needed for none to be too large.

        Messages of other tags are dropped: a broker only compares hashes. Records that cannot be
        decoded go to ``bad``, by default an error; ``reason`` is why all are known to be bad.
        """
        wanted = self._of_tags(table)
        rows = range(len(wanted))
        errors = self._errors(wanted) if reason is None else dict.fromkeys(rows, reason)
        for piece in self._pieces(wanted, errors):
            if piece.errors:
                self.bad.take(bad_rows(piece.table, piece.errors, broker))
            shown = piece if self.bad.keeps_rows else piece.good()
            arrays = [_COLUMNS[name](shown, broker) for name in self.columns]
            yield pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def row(self, **known: object) -> pa.RecordBatch:
        """Return a row with the known columns of a malformed record."""
        cells = {name: known.get(name) for name in self.columns}
        return pa.RecordBatch.from_pylist([cells], schema=self.schema)

    def _of_tags(self, table: RecordTable) -> RecordTable:
        if self.tags is None:
            return table
        found = _strings(table.property_values(properties.TAGS))
        matches = pc.is_in(found, value_set=pa.array(sorted(self.tags), pa.string()))
        return table.where(matches.to_numpy(zero_copy_only=False).data)

    def _errors(self, table: RecordTable) -> dict[int, str]:
        """Return which records have an invalid body or topic, and why."""
        topics = damaged_topics(table) if "topic" in self.columns else []
        found = dict.fromkeys(topics, DAMAGED_TOPIC)
        if self.check_bodies:
            for row in table.damaged_bodies():
                found[row] = damage_at(table.record(row), 0).reason
        return found

    def _pieces(self, table: RecordTable, errors: dict[int, str]) -> Iterator[_Piece]:
        """Split records behind the one where the inflated bodies become too large.

        Plain bodies do not count: all of them are as large as what was pulled.
        """
        begin = size = 0
        bodies: dict[int, bytes] = {}
        rows = table.compressed() if "body" in self.columns else []
        flags = table.sys_flags() if rows else ()
        for row in rows:
            if row not in errors:
                bodies[row] = _inflated(row, table.body(row), flags[row], errors)
                size += len(bodies[row])
            if size >= BATCH_BYTES:
                yield _Piece.of(table, range(begin, row + 1), bodies, errors)
                begin, size, bodies = row + 1, 0, {}
        if begin < len(table) or not begin:
            yield _Piece.of(table, range(begin, len(table)), bodies, errors)


class _Piece(NamedTuple):
    """Records for one batch."""

    table: RecordTable
    inflated: Mapping[int, bytes]
    """The bodies of those that are compressed."""
    errors: Mapping[int, str]
    """Which records cannot be decoded, and why."""

    @classmethod
    def of(
        cls, table: RecordTable, rows: range, inflated: dict[int, bytes], errors: dict[int, str]
    ) -> _Piece:
        """Return some of the records of a table, whose rows the other arguments number."""
        if len(rows) == len(table):
            return cls(table, inflated, errors)
        own = {row - rows.start: body for row, body in inflated.items()}
        wrong = {row - rows.start: why for row, why in errors.items() if row in rows}
        return cls(table[rows.start : rows.stop], own, wrong)

    def good(self) -> _Piece:
        """Return a copy without records that cannot be decoded."""
        if not self.errors:
            return self
        rows = range(len(self.table))
        kept = {row: at for at, row in enumerate(row for row in rows if row not in self.errors)}
        bodies = {kept[row]: body for row, body in self.inflated.items() if row in kept}
        return _Piece(self.table.where(bytes(row in kept for row in rows)), bodies, {})


def damage_at(data: bytes | memoryview, at: int) -> RecordError:
    """Return why the bytes at a position are not a record."""
    try:
        decode_record(data, at, check_crc=True)
    except RecordError as error:
        return error
    return RecordError("incomplete record", at)


def damaged_topics(table: RecordTable) -> list[int]:
    """Return the records whose topics are not UTF-8."""
    topics, indices = table.topics()
    wrong = {number for number, topic in enumerate(topics) if not _is_utf8(topic)}
    return [row for row, number in enumerate(indices) if number in wrong] if wrong else []


def topic_names(table: RecordTable) -> tuple[list[str], Column]:
    """Return the distinct names of topics, and each record's index into them."""
    topics, indices = table.topics()
    names = [topic.decode("utf-8", "replace") for topic in topics]
    return names, _numbers(pa.int32(), indices)


def bad_rows(table: RecordTable, errors: Mapping[int, str], broker: str) -> list[BadRecord]:
    """Describe records that cannot be decoded, in the order of the log."""
    ids, offsets = table.queue_ids(), table.queue_offsets()
    topics, indices = table.topics()
    return [
        BadRecord(
            topics[indices[row]].decode("utf-8", "replace"),
            broker,
            ids[row],
            offsets[row],
            reason,
            table.record(row),
        )
        for row, reason in sorted(errors.items())
    ]


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _inflated(row: int, stored: bytes, flag: int, errors: dict[int, str]) -> bytes:
    """Return a decompressed body, or an empty one and note an error."""
    try:
        compression = sysflag.compression_of(flag)
        return stored if compression is None else inflate(stored, compression)
    except RecordError as error:
        errors[row] = error.reason
        return b""


# --- from buffers to arrays -----------------------------------------------------------------------


def _array(kind: pa.DataType, count: int, validity: bytes | None, *parts: Any) -> Column:
    buffers = [None if part is None else pa.py_buffer(part) for part in (validity, *parts)]
    return pa.Array.from_buffers(kind, count, buffers)


def _texts(kind: pa.DataType, texts: Texts) -> Column:
    return _array(kind, len(texts.offsets) - 1, *texts)


_strings = partial(_texts, pa.string())


def _numbers(kind: pa.DataType, values: Sequence[int]) -> Column:
    return _array(kind, len(values), None, values)


_ints, _longs = partial(_numbers, pa.int32()), partial(_numbers, pa.int64())


def _times(times: Times) -> Column:
    return _array(_TIMESTAMP, len(times.values), *times)


def _maps(table: RecordTable) -> Column:
    firsts, names, values = table.properties()
    fields = [pa.field("key", pa.string(), nullable=False), pa.field("value", pa.string())]
    entries = pa.StructArray.from_arrays([_strings(names), _strings(values)], fields=fields)
    kind = pa.map_(pa.string(), pa.string())
    buffers = [None, pa.py_buffer(firsts)]
    return pa.Array.from_buffers(kind, len(table), buffers, children=[entries])


def _bodies(piece: _Piece) -> Column:
    others = {**piece.inflated, **dict.fromkeys(piece.errors)}
    try:
        return _texts(pa.binary(), piece.table.bodies(others))
    except InvalidArgument as error:
        raise InvalidArgument(
            f"the bodies of {len(piece.table)} messages inflate to more than 2 GiB: read fewer per "
            "batch"
        ) from error


def _errors(piece: _Piece) -> Column:
    rows = range(len(piece.table))
    return pa.array(map(piece.errors.get, rows), pa.string(), size=len(rows))


def _topics(table: RecordTable) -> Column:
    names, indices = topic_names(table)
    return pa.array(names, pa.string()).take(indices)


def _hosts(hosts: tuple[list[bytes], Sequence[int]]) -> Column:
    # Messages come from few clients: each address is formatted once.
    distinct, indices = hosts
    return pa.array(map(_host_name, distinct), pa.string()).take(_ints(indices))


@lru_cache(maxsize=4096)
def _host_name(raw: bytes) -> str:
    return str(Host(raw[:-4], int.from_bytes(raw[-4:], "big", signed=True)))


_OF_TABLE: dict[str, Callable[[RecordTable], Column]] = {
    "topic": _topics,
    "queueId": lambda table: _ints(table.queue_ids()),
    "queueOffset": lambda table: _longs(table.queue_offsets()),
    "msgId": lambda table: _strings(table.message_ids()),
    "offsetMsgId": lambda table: _strings(table.offset_ids()),
    "tags": lambda table: _strings(table.property_values(properties.TAGS)),
    "keys": lambda table: _strings(table.property_values(properties.KEYS)),
    "properties": _maps,
    "bornTimestamp": lambda table: _times(table.born_times()),
    "storeTimestamp": lambda table: _times(table.store_times()),
    "bornHost": lambda table: _hosts(table.born_hosts()),
    "storeHost": lambda table: _hosts(table.store_hosts()),
    "reconsumeTimes": lambda table: _ints(table.reconsume_times()),
    "sysFlag": lambda table: _ints(table.sys_flags()),
    "size": lambda table: _ints(table.sizes()),
}


def _column(name: str) -> Callable[[_Piece, str], Column]:
    of_table = _OF_TABLE[name]
    return lambda piece, _: of_table(piece.table)


_COLUMNS: dict[str, Callable[[_Piece, str], Column]] = {
    **{name: _column(name) for name in _OF_TABLE},
    "broker": lambda piece, broker: pa.repeat(pa.scalar(broker, pa.string()), len(piece.table)),
    "body": lambda piece, _: _bodies(piece),
    DECODE_ERROR: lambda piece, _: _errors(piece),
}
