"""Stored records to Arrow columns, many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from turbopump.errors import InvalidArgument, RecordError
from turbopump.spark.records.arrow_arrays import (
    Column,
    cells,
    in_order,
    mask_of,
    numbers,
    optional,
    repeated,
    same_width_texts,
)
from turbopump.spark.records.property_columns import PropertyColumns, property_columns
from turbopump.spark.records.record_finder import damage_at, find_in_spans
from turbopump.spark.records.record_run import Hosts, RecordRun, Span
from turbopump.spark.records.schema import arrow_schema
from turbopump.wire import properties, sysflag
from turbopump.wire.compression import inflate
from turbopump.wire.hashing import INT_MAX
from turbopump.wire.hosts import Host

_EARLIEST_MS = -62_135_596_800_000
_LATEST_MS = 253_402_300_799_999
"""The years 1 to 9999. A sender's clock may say anything; other times cannot be shown: null."""

BATCH_BYTES = 16 * 1024 * 1024
"""Bodies that inflate to more make several batches: 1 MiB of text that is stored may be 1 GiB."""

_TIMESTAMP = pa.timestamp("us", tz="UTC")
_HEX_PAIRS = np.frombuffer("".join(f"{byte:02X}" for byte in range(256)).encode(), np.uint16)


class RecordColumns:
    """Makes batches of some columns; a value that can be sent to where records are read."""

    def __init__(
        self,
        columns: Sequence[str],
        *,
        tags: frozenset[str] | None = None,
        check_bodies: bool = True,
    ) -> None:
        self.columns = tuple(columns)
        self.tags = tags
        self.check_bodies = check_bodies
        self.schema = arrow_schema(self.columns)

    def batch(
        self,
        records: bytes | memoryview,
        *,
        broker: str,
        start: int | None = None,
        end: int | None = None,
    ) -> pa.RecordBatch:
        """Decode whole records that lie back to back, as in the answer to a pull.

        Left out are messages outside the queue offsets from ``start`` to before ``end``, and those
        of other tags: a broker compares hashes only. Raises RecordError for damage.
        """
        return self.batch_of(self.found(records, start=start, end=end), broker=broker)

    def batches(
        self,
        records: bytes | memoryview,
        *,
        broker: str,
        start: int | None = None,
        end: int | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Decode the same into as many batches as it takes for none of them to be too large."""
        return self.batches_of(self.found(records, start=start, end=end), broker=broker)

    def batches_of(self, run: RecordRun, *, broker: str) -> Iterator[pa.RecordBatch]:
        """Decode records that have been found already into batches that are not too large."""
        made = self._wanted(run, broker)
        if "body" not in self.columns or not len(made.run.compressed_rows()):
            yield self._batch(made)
            return
        for piece, bodies in _inflated_pieces(made.run):
            yield self._batch(_Cells(piece, broker, bodies))

    def found(
        self,
        records: bytes | memoryview,
        spans: Sequence[Span] | None = None,
        *,
        start: int | None = None,
        end: int | None = None,
    ) -> RecordRun:
        """Find and check the records of a buffer, or of some stretches of it."""
        run, damaged_at = find_in_spans(records, spans or [(0, len(records))])
        if damaged_at is not None:
            raise damage_at(records, damaged_at)
        run = _between(run, start, end)
        if self.check_bodies:
            damaged = run.first_damaged_body()
            if damaged is not None:
                raise placed(damage_at(records, int(run.starts[damaged])), run, damaged)
        return run

    def batch_of(self, run: RecordRun, *, broker: str) -> pa.RecordBatch:
        """Decode records that have been found already; bodies are not checked, tags are."""
        return self._batch(self._wanted(run, broker))

    def _wanted(self, run: RecordRun, broker: str) -> _Cells:
        made = _Cells(run, broker)
        if self.tags is None:
            return made
        wanted = _is_one_of(made.property(properties.TAGS), self.tags)
        return made if wanted.all() else _Cells(run.where(wanted), broker)

    def _batch(self, made: _Cells) -> pa.RecordBatch:
        arrays = [_COLUMNS[name](made) for name in self.columns]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def placed(error: RecordError, run: RecordRun, row: int) -> RecordError:
    """Return the error with the words to find the message by."""
    at = slice(row, row + 1)
    one = run.where(at)
    topic = run.binary(run.topic.where(at))[0].as_py().decode("utf-8", "replace")
    where = f"topic {topic}, queue {one.queue_ids()[0]}, offset {one.queue_offsets()[0]}"
    return RecordError(f"{where}: {error.reason}", error.position)


def _between(run: RecordRun, start: int | None, end: int | None) -> RecordRun:
    if start is None and end is None:
        return run
    offsets = run.queue_offsets()
    wanted = np.ones(len(run), np.bool_)
    if start is not None:
        wanted &= offsets >= start
    if end is not None:
        wanted &= offsets < end
    return run if wanted.all() else run.where(wanted)


def _is_one_of(column: Column, values: frozenset[str]) -> npt.NDArray[np.bool_]:
    found = pc.is_in(column, value_set=pa.array(sorted(values), pa.string()))
    return mask_of(found)


class _Cells:
    """The columns of a run of records; what several of them need is worked out once."""

    def __init__(
        self, run: RecordRun, broker: str, inflated: Sequence[bytes] | None = None
    ) -> None:
        self.run = run
        self.broker = broker
        self._inflated = inflated
        self._properties: PropertyColumns | None = None
        self._offset_ids: Column | None = None

    @property
    def properties(self) -> PropertyColumns:
        if self._properties is None:
            self._properties = property_columns(self.run)
        return self._properties

    def property(self, name: str) -> Column:
        return self.properties.column(name)

    def offset_ids(self) -> Column:
        if self._offset_ids is None:
            self._offset_ids = _offset_ids(self.run)
        return self._offset_ids

    def bodies(self) -> Column:
        if self._inflated is None:
            self._inflated = [_inflated(self.run, *one) for one in _compressed(self.run)]
        return _bodies(self.run, self.run.compressed_rows(), self._inflated)

    def message_ids(self) -> Column:
        unique = self.property(properties.UNIQUE_KEY)
        return pc.coalesce(unique, self.offset_ids()) if unique.null_count else unique


def _topics(run: RecordRun) -> Column:
    only = run.only_topic()
    try:
        return (
            run.binary(run.topic).cast(pa.string())
            if only is None
            else repeated((only.decode(),), len(run))
        )
    except (pa.ArrowInvalid, UnicodeDecodeError):
        for row, topic in enumerate(cells(run.binary(run.topic))):
            try:
                topic.decode()
            except UnicodeDecodeError:
                error = RecordError("topic is not UTF-8", int(run.topic.start[row]))
                raise placed(error, run, row) from None
        raise


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
    return same_width_texts((2 * raw.shape[1],), _HEX_PAIRS.take(raw))


def _hosts(hosts: Hosts, rows: int) -> Column:
    # Messages come from few clients: each address is written out once.
    different, whose = hosts
    names = tuple(_host_name(raw) for raw in different)
    return repeated(names, rows) if whose is None else pa.array(names, pa.string()).take(whose)


@lru_cache(maxsize=4096)
def _host_name(raw: bytes) -> str:
    return str(Host(raw[:-4], int.from_bytes(raw[-4:], "big", signed=True)))


def _times(times_ms: npt.NDArray[np.int64]) -> Column:
    if not len(times_ms) or (times_ms.min() >= _EARLIEST_MS and times_ms.max() <= _LATEST_MS):
        return numbers(_TIMESTAMP, times_ms * 1000)
    shown = (times_ms >= _EARLIEST_MS) & (times_ms <= _LATEST_MS)
    times_us = np.where(shown, times_ms, 0) * 1000
    return optional(times_us, ~shown).cast(_TIMESTAMP)


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


def _inflated_pieces(run: RecordRun) -> Iterator[tuple[RecordRun, list[bytes]]]:
    """Cut a run behind the record with which its bodies become too large, while they are inflated.

    Plain ones do not count: a run of them is as large as what was pulled.
    """
    begin = size = 0
    bodies: list[bytes] = []
    for row, stored, flag in _compressed(run):
        bodies.append(_inflated(run, row, stored, flag))
        size += len(bodies[-1])
        if size >= BATCH_BYTES:
            yield run.where(slice(begin, row + 1)), bodies
            begin, size, bodies = row + 1, 0, []
    if begin < len(run):
        yield run.where(slice(begin, None)), bodies


def unreadable(run: RecordRun) -> dict[int, RecordError]:
    """Return which records have bodies that do not inflate, and why not."""
    found = {}
    for row, stored, flag in _compressed(run):
        try:
            _inflated(run, row, stored, flag)
        except RecordError as error:
            found[row] = error
    return found


def _compressed(run: RecordRun) -> Iterator[tuple[int, bytes, int]]:
    """Yield each compressed body: which record's it is, as it is stored, and the flags."""
    rows = run.compressed_rows()
    columns = rows, run.body.start[rows], run.body.end[rows], run.sys_flags()[rows]
    for row, start, end, flag in zip(*(each.tolist() for each in columns), strict=True):
        yield row, bytes(run.data[start:end]), flag


def _inflated(run: RecordRun, row: int, stored: bytes, flag: int) -> bytes:
    try:
        compression = sysflag.compression_of(flag)
        return stored if compression is None else inflate(stored, compression)
    except RecordError as error:
        raise placed(error, run, row) from error


def _brokers(made: _Cells) -> Column:
    return repeated((made.broker,), len(made.run))


_COLUMNS: dict[str, Callable[[_Cells], Column]] = {
    "topic": lambda made: _topics(made.run),
    "broker": _brokers,
    "queueId": lambda made: pa.array(made.run.queue_ids()),
    "queueOffset": lambda made: pa.array(made.run.queue_offsets()),
    "msgId": _Cells.message_ids,
    "offsetMsgId": _Cells.offset_ids,
    "tags": lambda made: made.property(properties.TAGS),
    "keys": lambda made: made.property(properties.KEYS),
    "properties": lambda made: made.properties.maps(),
    "body": _Cells.bodies,
    "bornTimestamp": lambda made: _times(made.run.born_times_ms()),
    "storeTimestamp": lambda made: _times(made.run.store_times_ms()),
    "bornHost": lambda made: _hosts(made.run.born_hosts(), len(made.run)),
    "storeHost": lambda made: _hosts(made.run.store_hosts(), len(made.run)),
    "reconsumeTimes": lambda made: pa.array(made.run.reconsume_times()),
    "sysFlag": lambda made: pa.array(made.run.sys_flags()),
    "size": lambda made: pa.array(made.run.sizes.astype(np.int32)),
}
