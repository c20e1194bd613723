"""Decoding stored records to Arrow columns, many at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from turbopump.errors import InvalidArgument, RecordError
from turbopump.spark.records.arrow_arrays import (
    Column,
    cells,
    in_order,
    of_widths,
    repeated,
)
from turbopump.spark.records.bad_records import BadRecord, BadRecords, OnBadRecord
from turbopump.spark.records.property_columns import PropertyColumns, property_columns
from turbopump.spark.records.record_finder import damage_at
from turbopump.spark.records.record_run import DAMAGED_TOPIC, Hosts, Mask, RecordRun
from turbopump.spark.records.schema import DECODE_ERROR, arrow_schema
from turbopump.wire import properties, sysflag
from turbopump.wire.compression import inflate
from turbopump.wire.hashing import INT_MAX
from turbopump.wire.hosts import Host

_EARLIEST_MS = -62_135_596_800_000
_LATEST_MS = 253_402_300_799_999
"""The years 1 to 9999. A sender's clock may show anything; other times cannot be shown: null."""

BATCH_BYTES = 16 * 1024 * 1024
"""Bodies that inflate to more are split into batches: 1 MiB of stored text may be 1 GiB."""

_TIMESTAMP = pa.timestamp("us", tz="UTC")
_HEX_PAIRS = np.frombuffer("".join(f"{byte:02X}" for byte in range(256)).encode(), np.uint16)


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
        self, run: RecordRun, *, broker: str, reason: str | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Decode records into as many batches as needed for none to be too large.

        Messages of other tags are dropped: a broker only compares hashes. Records that cannot be
        decoded go to ``bad``, by default an error; ``reason`` is why all are known to be bad.
        """
        wanted = self._wanted(run, broker)
        rows = range(len(wanted.run))
        errors = self._errors(wanted.run) if reason is None else dict.fromkeys(rows, reason)
        for piece in self._pieces(wanted.run, errors):
            if piece.errors:
                self.bad.take(bad_rows(piece.run, piece.errors, broker))
            shown = piece if self.bad.keeps_rows else piece.good()
            # Reuse what was computed to find the matching records.
            cells = wanted if shown.run is wanted.run else _Cells(shown.run, broker)
            cells.piece = shown
            arrays = [_COLUMNS[name](cells) for name in self.columns]
            yield pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def row(self, **known: object) -> pa.RecordBatch:
        """Return a row with the known columns of a malformed record."""
        cells = {name: known.get(name) for name in self.columns}
        return pa.RecordBatch.from_pylist([cells], schema=self.schema)

    def _wanted(self, run: RecordRun, broker: str) -> _Cells:
        cells = _Cells(run, broker)
        if self.tags is None:
            return cells
        tags = pa.array(sorted(self.tags), pa.string())
        found = pc.is_in(cells.properties.column(properties.TAGS), value_set=tags)
        matches: Mask = found.to_numpy(zero_copy_only=False)
        return cells if matches.all() else _Cells(run.where(matches), broker)

    def _errors(self, run: RecordRun) -> dict[int, str]:
        """Return which records have an invalid body or topic, and why."""
        topics = run.damaged_topics() if "topic" in self.columns else []
        found = dict.fromkeys(topics, DAMAGED_TOPIC)
        if self.check_bodies:
            for row in run.damaged_bodies():
                found[row] = damage_at(run.data, int(run.starts[row])).reason
        return found

    def _pieces(self, run: RecordRun, errors: dict[int, str]) -> Iterator[_Piece]:
        """Split a run behind the record where its inflated bodies become too large.

        Plain bodies do not count: a run of them is as large as what was pulled.
        """
        begin = size = 0
        bodies: list[bytes] = []
        for row, stored, flag in _compressed(run) if "body" in self.columns else ():
            bodies.append(b"" if row in errors else _inflated(row, stored, flag, errors))
            size += len(bodies[-1])
            if size >= BATCH_BYTES:
                yield _Piece.of(run, slice(begin, row + 1), bodies, errors)
                begin, size, bodies = row + 1, 0, []
        if begin < len(run) or not begin:
            yield _Piece.of(run, slice(begin, len(run)), bodies, errors)


class _Piece(NamedTuple):
    """Records for one batch."""

    run: RecordRun
    inflated: Sequence[bytes]
    """The bodies of those that are compressed."""
    errors: Mapping[int, str]
    """Which records cannot be decoded, and why."""

    @classmethod
    def of(
        cls, run: RecordRun, rows: slice, inflated: Sequence[bytes], errors: Mapping[int, str]
    ) -> _Piece:
        """Return some rows of a run."""
        if not rows.start and rows.stop == len(run):
            return cls(run, inflated, errors)
        within = range(rows.start, rows.stop)
        own = {row - rows.start: why for row, why in errors.items() if row in within}
        return cls(run.where(rows), inflated, own)

    def good(self) -> _Piece:
        """Return a copy without records that cannot be decoded."""
        if not self.errors:
            return self
        rows = self.run.compressed_rows().tolist() if self.inflated else []
        bodies = [
            body for row, body in zip(rows, self.inflated, strict=True) if row not in self.errors
        ]
        return _Piece(self.run.where(~_mask(len(self.run), self.errors)), bodies, {})


def _mask(count: int, rows: Iterable[int]) -> Mask:
    found = np.zeros(count, np.bool_)
    found[list(rows)] = True
    return found


def bad_rows(run: RecordRun, errors: Mapping[int, str], broker: str) -> list[BadRecord]:
    """Describe records that cannot be decoded, in the order of the log."""
    ids, offsets = run.queue_ids(), run.queue_offsets()
    topics = run.binary(run.topic)
    return [
        BadRecord(
            topics[row].as_py().decode("utf-8", "replace"),
            broker,
            int(ids[row]),
            int(offsets[row]),
            reason,
            bytes(run.data[run.starts[row] : run.starts[row] + run.sizes[row]]),
        )
        for row, reason in sorted(errors.items())
    ]


class _Cells:
    """The columns of a run of records; shared intermediate results are computed once."""

    def __init__(self, run: RecordRun, broker: str) -> None:
        self.run = run
        self.broker = broker
        self.piece = _Piece(run, (), {})

    @cached_property
    def properties(self) -> PropertyColumns:
        return property_columns(self.run)

    @cached_property
    def offset_ids(self) -> Column:
        return _offset_ids(self.run)

    def bodies(self) -> Column:
        errors = self.piece.errors
        found = _bodies(self.run, self.run.compressed_rows(), self.piece.inflated)
        if errors:
            found = pc.if_else(_mask(len(found), errors), pa.scalar(None, found.type), found)
        return found

    def errors(self) -> Column:
        errors = self.piece.errors
        if not errors:
            return pa.nulls(len(self.run), pa.string())
        return pa.array([errors.get(row) for row in range(len(self.run))], pa.string())

    def message_ids(self) -> Column:
        unique = self.properties.column(properties.UNIQUE_KEY)
        return pc.coalesce(unique, self.offset_ids) if unique.null_count else unique


def _topics(run: RecordRun) -> Column:
    only = run.only_topic()
    try:
        return (
            run.binary(run.topic).cast(pa.string())
            if only is None
            else repeated((only.decode(),), len(run))
        )
    except (pa.ArrowInvalid, UnicodeDecodeError):
        names = [topic.decode("utf-8", "replace") for topic in cells(run.binary(run.topic))]
        return pa.array(names, pa.string())


def _offset_ids(run: RecordRun) -> Column:
    if not len(run):
        return pa.array([], pa.string())
    found, rows = [], []
    for whose, raw in run.offset_ids():
        if whose is None:
            return _hex(raw)
        found.append(_hex(raw))
        rows.append(whose)
    return found[0] if len(found) == 1 else in_order(found, rows)


def _hex(raw: npt.NDArray[np.uint8]) -> Column:
    return of_widths(pa.string(), _HEX_PAIRS.take(raw), 2 * raw.shape[1])


def _hosts(hosts: Hosts, rows: int) -> Column:
    # Messages come from few clients: each address is formatted once.
    different, whose = hosts
    names = tuple(_host_name(raw) for raw in different)
    return repeated(names, rows) if whose is None else pa.array(names, pa.string()).take(whose)


@lru_cache(maxsize=4096)
def _host_name(raw: bytes) -> str:
    return str(Host(raw[:-4], int.from_bytes(raw[-4:], "big", signed=True)))


def _times(times_ms: npt.NDArray[np.int64]) -> Column:
    if not len(times_ms) or (times_ms.min() >= _EARLIEST_MS and times_ms.max() <= _LATEST_MS):
        times_us = pa.py_buffer((times_ms * 1000).data)
        return pa.Array.from_buffers(_TIMESTAMP, len(times_ms), [None, times_us])
    shown = (times_ms >= _EARLIEST_MS) & (times_ms <= _LATEST_MS)
    times: Column = pa.array(np.where(shown, times_ms, 0) * 1000, mask=~shown)
    return times.cast(_TIMESTAMP)


def _bodies(run: RecordRun, rows: npt.NDArray[np.int64], inflated: Sequence[bytes]) -> Column:
    if not len(rows):
        return run.bodies()
    is_plain = np.ones(len(run), np.bool_)
    is_plain[rows] = False
    plain = run.binary(run.body.where(is_plain))
    if sum(map(len, inflated)) + plain.nbytes > INT_MAX:
        raise InvalidArgument(
            f"the bodies of {len(run)} messages inflate to more than 2 GiB: read fewer per batch"
        )
    return in_order([plain, pa.array(inflated, pa.binary())], [np.flatnonzero(is_plain), rows])


def _compressed(run: RecordRun) -> Iterator[tuple[int, bytes, int]]:
    """Yield each compressed body: its record, its stored bytes, and the flags."""
    rows = run.compressed_rows()
    if not len(rows):
        return
    columns = rows, run.body.start[rows], run.body.end[rows], run.sys_flags()[rows]
    for row, start, end, flag in zip(*(each.tolist() for each in columns), strict=True):
        yield row, bytes(run.data[start:end]), flag


def _inflated(row: int, stored: bytes, flag: int, errors: dict[int, str]) -> bytes:
    """Return a decompressed body, or an empty one and note an error."""
    try:
        compression = sysflag.compression_of(flag)
        return stored if compression is None else inflate(stored, compression)
    except RecordError as error:
        errors[row] = error.reason
        return b""


_COLUMNS: dict[str, Callable[[_Cells], Column]] = {
    "topic": lambda cells: _topics(cells.run),
    "broker": lambda cells: repeated((cells.broker,), len(cells.run)),
    "queueId": lambda cells: pa.array(cells.run.queue_ids()),
    "queueOffset": lambda cells: pa.array(cells.run.queue_offsets()),
    "msgId": _Cells.message_ids,
    "offsetMsgId": lambda cells: cells.offset_ids,
    "tags": lambda cells: cells.properties.column(properties.TAGS),
    "keys": lambda cells: cells.properties.column(properties.KEYS),
    "properties": lambda cells: cells.properties.maps(),
    "body": _Cells.bodies,
    "bornTimestamp": lambda cells: _times(cells.run.born_times_ms()),
    "storeTimestamp": lambda cells: _times(cells.run.store_times_ms()),
    "bornHost": lambda cells: _hosts(cells.run.born_hosts(), len(cells.run)),
    "storeHost": lambda cells: _hosts(cells.run.store_hosts(), len(cells.run)),
    "reconsumeTimes": lambda cells: pa.array(cells.run.reconsume_times()),
    "sysFlag": lambda cells: pa.array(cells.run.sys_flags()),
    "size": lambda cells: pa.array(cells.run.sizes.astype(np.int32)),
    DECODE_ERROR: _Cells.errors,
}
