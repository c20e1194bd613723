"""Stored records to Arrow columns, many at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from turbopump.errors import InvalidArgument, RecordError
from turbopump.spark.records.arrays import Column, cells, in_order, mask_of, optional, texts
from turbopump.spark.records.property_columns import PropertyColumns
from turbopump.spark.records.record_run import Parts, RecordRun, damage_at, find_records
from turbopump.spark.records.schema import arrow_schema
from turbopump.wire import properties, sysflag
from turbopump.wire.compression import inflate
from turbopump.wire.hashing import INT_MAX
from turbopump.wire.hosts import Host

_EARLIEST_MS = -62_135_596_800_000
_LATEST_MS = 253_402_300_799_999
"""The years 1 to 9999. A sender's clock may say anything; other times cannot be shown: null."""

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
        run, good_end = find_records(records)
        if good_end < len(records):
            raise damage_at(records, good_end)
        run = _between(run, start, end)
        if self.check_bodies:
            damaged = run.first_damaged_body()
            if damaged is not None:
                raise placed(damage_at(records, int(run.starts[damaged])), run, damaged)
        return self.batch_of(run, broker=broker)

    def batch_of(self, run: RecordRun, *, broker: str) -> pa.RecordBatch:
        """Decode records that have been found already; bodies are not checked, tags are."""
        made = _Cells(run, broker)
        if self.tags is not None:
            wanted = _is_one_of(made.property(properties.TAGS), self.tags)
            if not wanted.all():
                made = _Cells(run.where(wanted), broker)
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

    def __init__(self, run: RecordRun, broker: str) -> None:
        self.run = run
        self.broker = broker
        self._properties: PropertyColumns | None = None
        self._offset_ids: Column | None = None

    @property
    def properties(self) -> PropertyColumns:
        if self._properties is None:
            self._properties = PropertyColumns(self.run)
        return self._properties

    def property(self, name: str) -> Column:
        return self.properties.column(name)

    def offset_ids(self) -> Column:
        if self._offset_ids is None:
            self._offset_ids = _offset_ids(self.run)
        return self._offset_ids

    def message_ids(self) -> Column:
        unique = self.property(properties.UNIQUE_KEY)
        return pc.coalesce(unique, self.offset_ids()) if unique.null_count else unique


def _topics(run: RecordRun) -> Column:
    found = run.binary(run.topic)
    try:
        return found.cast(pa.string())
    except pa.ArrowInvalid:
        for row, topic in enumerate(cells(found)):
            try:
                topic.decode()
            except UnicodeDecodeError:
                error = RecordError("topic is not UTF-8", int(run.topic.start[row]))
                raise placed(error, run, row) from None
        raise


def _offset_ids(run: RecordRun) -> Column:
    hosts = run.store_hosts()
    widths = hosts.end - hosts.start
    kinds = np.unique(widths)
    found, rows = [], []
    for width in kinds:
        at = np.flatnonzero(widths == width)
        few = run if len(kinds) == 1 else run.where(widths == width)
        raw = np.concatenate((run.matrix(hosts.start[at], int(width)), few.offset_bytes()), axis=1)
        found.append(_hex(raw))
        rows.append(at)
    if len(found) == 1:
        return found[0]
    return in_order(found, rows) if found else pa.array([], pa.string())


def _hex(raw: npt.NDArray[np.uint8]) -> Column:
    count, width = raw.shape
    digits = _HEX_PAIRS[raw]
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(2 * width)
    return texts(offsets, digits)


def _hosts(run: RecordRun, parts: Parts) -> Column:
    # Messages come from few clients: each address is written out once.
    found = run.binary(parts).dictionary_encode()
    names = [_host_name(raw) for raw in found.dictionary.to_pylist()]
    return pa.array(names, pa.string()).take(found.indices)


@lru_cache(maxsize=4096)
def _host_name(raw: bytes) -> str:
    return str(Host(raw[:-4], int.from_bytes(raw[-4:], "big", signed=True)))


def _times(times_ms: npt.NDArray[np.int64]) -> Column:
    shown = (times_ms >= _EARLIEST_MS) & (times_ms <= _LATEST_MS)
    times_us = np.where(shown, times_ms, 0) * 1000
    return optional(times_us, ~shown).cast(pa.timestamp("us", tz="UTC"))


def _bodies(run: RecordRun) -> Column:
    compressed = (run.sys_flags() & sysflag.COMPRESSED) != 0
    if not compressed.any():
        return run.binary(run.body)
    rows = np.flatnonzero(compressed)
    plain = run.binary(run.body.where(~compressed))
    bodies = [_inflated(run, row) for row in rows.tolist()]
    if sum(map(len, bodies)) + plain.nbytes > INT_MAX:
        raise InvalidArgument(
            f"the bodies of {len(run)} messages inflate to more than 2 GiB: read fewer at once"
        )
    return in_order([plain, pa.array(bodies, pa.binary())], [np.flatnonzero(~compressed), rows])


def readable(run: RecordRun) -> npt.NDArray[np.bool_]:
    """Tell which records have bodies that can be made whole: plain ones, and those that inflate."""
    good: npt.NDArray[np.bool_] = (run.sys_flags() & sysflag.COMPRESSED) == 0
    for row in np.flatnonzero(~good).tolist():
        try:
            _inflated(run, row)
        except RecordError:
            continue
        good[row] = True
    return good


def _inflated(run: RecordRun, row: int) -> bytes:
    stored = bytes(run.data[int(run.body.start[row]) : int(run.body.end[row])])
    flag = int(run.where(slice(row, row + 1)).sys_flags()[0])
    try:
        compression = sysflag.compression_of(flag)
        return stored if compression is None else inflate(stored, compression)
    except RecordError as error:
        raise placed(error, run, row) from error


def _brokers(made: _Cells) -> Column:
    return pa.repeat(pa.scalar(made.broker, pa.string()), len(made.run))


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
    "body": lambda made: _bodies(made.run),
    "bornTimestamp": lambda made: _times(made.run.born_times_ms()),
    "storeTimestamp": lambda made: _times(made.run.store_times_ms()),
    "bornHost": lambda made: _hosts(made.run, made.run.born_hosts()),
    "storeHost": lambda made: _hosts(made.run, made.run.store_hosts()),
    "reconsumeTimes": lambda made: pa.array(made.run.reconsume_times()),
    "sysFlag": lambda made: pa.array(made.run.sys_flags()),
    "size": lambda made: pa.array(made.run.sizes.astype(np.int32)),
}
