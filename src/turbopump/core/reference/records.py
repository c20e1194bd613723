"""Stored records: found in a buffer and read, one by one or many together."""

from __future__ import annotations

import inspect
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Self, TypeVar, overload

from turbopump.core.reference.hashing import body_crc, index_hash, tags_code
from turbopump.core.reference.layout import (
    FIXED,
    FIXED_BYTES,
    HOST_BITS_SHIFT,
    INVISIBLE_BIT,
    KEYS,
    MAGIC,
    MAGIC_V2,
    ROLLBACK,
    SYS_FLAG_LOW_BYTE_AT,
    TAGS,
    TEXT_LENGTH,
    UNIQUE_KEY,
    UNIT,
    V2_TOPIC_LENGTH,
)
from turbopump.core.reference.properties import property_value
from turbopump.errors import RecordError
from turbopump.message import PhysicalOffset, QueueOffset

Buffer = bytes | bytearray | memoryview


class StoredRecord:
    """A stored record with all its fields, in the record's own order up to the body's length."""

    __slots__ = (
        "_body",
        "_properties",
        "body_crc",
        "body_length",
        "born_ip",
        "born_port",
        "born_timestamp_ms",
        "flag",
        "magic",
        "physical_offset",
        "prepared_transaction_offset",
        "queue_id",
        "queue_offset",
        "reconsume_times",
        "size",
        "store_ip",
        "store_port",
        "store_timestamp_ms",
        "stored_body",
        "stored_properties",
        "sys_flag",
        "topic",
    )

    def __init__(
        self,
        size: int,
        magic: int,
        body_crc: int,
        queue_id: int,
        flag: int,
        queue_offset: int,
        physical_offset: int,
        sys_flag: int,
        born_timestamp_ms: int,
        born_ip: bytes,
        born_port: int,
        store_timestamp_ms: int,
        store_ip: bytes,
        store_port: int,
        reconsume_times: int,
        prepared_transaction_offset: int,
        body_length: int,
        stored_body: bytes,
        topic: str,
        stored_properties: bytes,
        _properties: dict[str, str] | None = None,
        _body: bytes | None = None,
    ) -> None:
        self.size = size
        self.magic = magic
        self.body_crc = body_crc
        self.queue_id = queue_id
        self.flag = flag
        self.queue_offset = QueueOffset(queue_offset)
        self.physical_offset = PhysicalOffset(physical_offset)
        self.sys_flag = sys_flag
        self.born_timestamp_ms = born_timestamp_ms
        self.born_ip = born_ip
        self.born_port = born_port
        self.store_timestamp_ms = store_timestamp_ms
        self.store_ip = store_ip
        self.store_port = store_port
        self.reconsume_times = reconsume_times
        self.prepared_transaction_offset = prepared_transaction_offset
        self.body_length = body_length
        self.stored_body = stored_body
        """The body as stored in the log, perhaps compressed."""
        self.topic = topic
        self.stored_properties = stored_properties
        """In their text form."""
        # What a kind of record derives from these on demand.
        self._properties = _properties
        self._body = _body

    def __reduce__(self) -> tuple[type[Self], tuple[object, ...]]:
        names = tuple(inspect.signature(StoredRecord).parameters)
        return type(self), tuple(getattr(self, name) for name in names)


R = TypeVar("R", bound=StoredRecord)


@overload
def read_record(data: Buffer, at: int = 0, *, check_crc: bool = False) -> StoredRecord: ...
@overload
def read_record(data: Buffer, at: int = 0, *, check_crc: bool = False, kind: type[R]) -> R: ...
def read_record(
    data: Buffer, at: int = 0, *, check_crc: bool = False, kind: Callable[..., Any] = StoredRecord
) -> Any:
    """Read the record at a position; ``check_crc`` also verifies the body's checksum.

    Raises RecordError. Returns a ``kind``, which has the constructor of `StoredRecord`.
    """
    left = len(data) - at if at >= 0 else 0
    fixed = FIXED[data[at + SYS_FLAG_LOW_BYTE_AT] >> 4 & 0b11] if left >= FIXED_BYTES else None
    if fixed is None or left < fixed.size:
        raise RecordError(f"{max(0, left)} bytes are too few for a record", at)
    fields = fixed.unpack_from(data, at)
    size, magic, body_length = fields[0], fields[1], fields[-1]
    body_at, end = at + fixed.size, at + size
    body_end = body_at + body_length
    if magic not in {MAGIC, MAGIC_V2}:
        raise RecordError(f"magic number 0x{magic:08X} is not a message's", at + 4)
    if size > left:
        raise RecordError(f"record of {size} bytes, but {left} are left", at)
    if body_length < 0 or body_end >= end:
        raise RecordError(f"body of {body_length} bytes in a record of {size}", body_at - 4)
    topic_at, topic_end = _topic_place(data, magic, body_end, end)
    text_at = topic_end + TEXT_LENGTH.size
    if text_at > end:
        length = topic_end - topic_at
        raise RecordError(f"topic of {length} bytes does not fit into its record", body_end)
    try:
        topic = str(data[topic_at:topic_end], "utf-8")
    except UnicodeDecodeError as error:
        raise RecordError("topic is not UTF-8", topic_at) from error
    body, text = bytes(data[body_at:body_end]), bytes(data[text_at:end])
    if check_crc and body_crc(body) != fields[2]:
        raise RecordError(f"body does not match its checksum {fields[2]}", body_at)
    (text_length,) = TEXT_LENGTH.unpack_from(data, topic_end)
    if text_length != len(text):
        raise RecordError(
            f"properties of {text_length} bytes do not end with their record", topic_end
        )
    return kind(*fields, body, topic, text)


def _topic_place(data: Buffer, magic: int, at: int, end: int) -> tuple[int, int]:
    """Return where the topic begins and ends; its length is at a position."""
    if magic == MAGIC:
        return at + 1, at + 1 + data[at]
    # A record of release 5.
    if end - at < V2_TOPIC_LENGTH.size:
        raise RecordError("record ends before its topic", at)
    (length,) = V2_TOPIC_LENGTH.unpack_from(data, at)
    if length < 0:
        raise RecordError(f"topic of {length} bytes does not fit into its record", at)
    start = at + V2_TOPIC_LENGTH.size
    return start, start + length


@overload
def read_records(
    data: Buffer, *, check_crc: bool = False
) -> tuple[list[StoredRecord], RecordError | None]: ...
@overload
def read_records(
    data: Buffer, *, check_crc: bool = False, kind: type[R]
) -> tuple[list[R], RecordError | None]: ...
def read_records(
    data: Buffer, *, check_crc: bool = False, kind: type[Any] = StoredRecord
) -> tuple[list[Any], RecordError | None]:
    """Read records up to the end, as in the response to a pull, or up to the first damaged one.

    Returns them, and what is wrong with the one that follows.
    """
    at = 0
    found = []
    try:
        while at < len(data):
            record = read_record(data, at, check_crc=check_crc, kind=kind)
            found.append(record)
            at += record.size
    except RecordError as error:
        return found, error
    return found, None


class RecordEntry:
    """What queues and indexes need of a stored record; its body is not copied."""

    __slots__ = (
        "physical_offset",
        "properties",
        "queue_id",
        "queue_offset",
        "size",
        "store_timestamp_ms",
        "sys_flag",
        "topic",
    )

    def __init__(
        self,
        size: int,
        queue_id: int,
        queue_offset: int,
        physical_offset: int,
        sys_flag: int,
        store_timestamp_ms: int,
        topic: bytes,
        properties: bytes,
    ) -> None:
        self.size = size
        self.queue_id = queue_id
        self.queue_offset = QueueOffset(queue_offset)
        self.physical_offset = PhysicalOffset(physical_offset)
        self.sys_flag = sys_flag
        self.store_timestamp_ms = store_timestamp_ms
        self.topic = topic
        self.properties = properties


def read_entry(data: Buffer, at: int = 0, *, check_crc: bool = False) -> RecordEntry | None:
    """Read what a log's reader needs of the record at a position; None if there is none.

    Records of release 5 do not count, as no log of this format holds them.
    """
    row = _row_at(data, at, len(data), check_crc=check_crc)
    return None if row is None else row.entry(data)


class _Row(NamedTuple):
    """A record in a buffer: where it and its parts begin, and some of its fields."""

    at: int
    size: int
    topic_at: int
    text_at: int
    queue_id: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    store_timestamp_ms: int

    @property
    def end(self) -> int:
        return self.at + self.size

    def topic(self, data: Buffer) -> bytes:
        return bytes(data[self.topic_at : self.text_at - TEXT_LENGTH.size])

    def text(self, data: Buffer) -> bytes:
        return bytes(data[self.text_at : self.end])

    def entry(self, data: Buffer) -> RecordEntry:
        return RecordEntry(
            self.size,
            self.queue_id,
            self.queue_offset,
            self.physical_offset,
            self.sys_flag,
            self.store_timestamp_ms,
            self.topic(data),
            self.text(data),
        )


def _row_at(data: Buffer, at: int, end: int, *, check_crc: bool) -> _Row | None:
    """Return the record at a place if it is intact and ends by ``end``."""
    if at < 0 or end - at < FIXED_BYTES:
        return None
    fixed = FIXED[data[at + SYS_FLAG_LOW_BYTE_AT] >> HOST_BITS_SHIFT & 0b11]
    if end - at < fixed.size:
        return None
    fields = fixed.unpack_from(data, at)
    size, body_length, body_at = fields[0], fields[-1], at + fixed.size
    topic_at = body_at + body_length + 1
    if fields[1] != MAGIC or body_length < 0 or at + size > end or topic_at >= at + size:
        return None
    text_at = topic_at + data[topic_at - 1] + TEXT_LENGTH.size
    if text_at > at + size:
        return None
    (text_length,) = TEXT_LENGTH.unpack_from(data, text_at - TEXT_LENGTH.size)
    if text_at + text_length != at + size:
        return None
    if check_crc and body_crc(data[body_at : topic_at - 1]) != fields[2]:
        return None
    return _Row(at, size, topic_at, text_at, fields[3], fields[5], fields[6], fields[7], fields[11])


def find_records(
    data: Buffer,
    at: int,
    end: int,
    base: int | None,
    *,
    check_crc: bool = False,
    stop_at_zero: bool = False,
    count_max: int = 2**31 - 1,
) -> Records:
    """Find intact records that follow each other in a part of a buffer, up to ``count_max``.

    ``base`` is the position in the log of the buffer's first byte, and only records that name their
    own position count; with None, as in the response to a pull, they may come from anywhere. Only
    topics that can name a directory count, and queue ids that are not negative. With
    ``stop_at_zero``, records whose properties contain a zero byte do not count: pages of them may
    be missing.
    """
    end = min(end, len(data))
    rows: list[_Row] = []
    while at < end and len(rows) < count_max:
        row = _row_at(data, at, end, check_crc=check_crc)
        if row is None or row.queue_id < 0 or not is_topic_name(row.topic(data)):
            break
        if base is not None and row.physical_offset != base + at:
            break
        if stop_at_zero and b"\0" in row.text(data):
            break
        rows.append(row)
        at = row.end
    return Records(data, rows)


@lru_cache(maxsize=4096)
def is_topic_name(topic: bytes) -> bool:
    """Whether a topic can name a directory; a damaged or hostile one must not lead elsewhere."""
    if not topic or b"/" in topic or b"\0" in topic or topic in {b".", b".."}:
        return False
    try:
        topic.decode()
    except UnicodeDecodeError:
        return False
    return True


class Records(Sequence[RecordEntry]):
    """Records in a buffer, in ascending order: all of a part of a log, or those of one queue.

    Holds the buffer, not copies. All methods are linear in the number of records at most.
    """

    __slots__ = ("_data", "_rows")

    def __init__(self, data: Buffer, rows: list[_Row]) -> None:
        self._data = data
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, which: int) -> RecordEntry: ...
    @overload
    def __getitem__(self, which: slice) -> Records: ...
    def __getitem__(self, which: int | slice) -> RecordEntry | Records:
        if isinstance(which, slice):
            return Records(self._data, self._rows[which])
        return self._rows[which].entry(self._data)

    def __iter__(self) -> Iterator[RecordEntry]:
        return (row.entry(self._data) for row in self._rows)

    @property
    def physical_offset(self) -> PhysicalOffset:
        """Position of the first record."""
        return PhysicalOffset(self._rows[0].physical_offset)

    @property
    def end(self) -> PhysicalOffset:
        """Position after the last record."""
        return PhysicalOffset(self._rows[-1].physical_offset + self._rows[-1].size)

    @property
    def end_at(self) -> int:
        """Place in the buffer after the last record."""
        return self._rows[-1].end

    @property
    def store_timestamp_ms(self) -> int:
        """Store timestamp of the last record."""
        return self._rows[-1].store_timestamp_ms

    @property
    def newest_ms(self) -> int:
        """The latest store timestamp; the last record's, unless the clock was set back."""
        return max(row.store_timestamp_ms for row in self._rows)

    def positions(self) -> array[int]:
        return array("q", (row.physical_offset for row in self._rows))

    def sizes(self) -> array[int]:
        return array("q", (row.size for row in self._rows))

    def queue_offsets(self) -> array[int]:
        return array("q", (row.queue_offset for row in self._rows))

    def store_timestamps_ms(self) -> array[int]:
        return array("q", (row.store_timestamp_ms for row in self._rows))

    def tags_codes(self) -> array[int]:
        """Return the hash of each record's tag; 0 if it has none."""
        return array("q", map(self._tags_code, self._rows))

    def properties(self, number: int) -> bytes:
        """Return the properties of one record, in their text form."""
        return self._rows[number].text(self._data)

    def count_before(self, end: int) -> int:
        """Return how many records end at a position or before it."""
        return bisect_right(self._rows, end, key=lambda row: row.physical_offset + row.size)

    def by_queue(self) -> list[tuple[bytes, int, Records]]:
        """Return topic, queue id and records of each queue, in order of the first record.

        Prepared and rolled back messages are in no queue.
        """
        found: dict[tuple[bytes, int], list[_Row]] = {}
        for row in self._rows:
            if not row.sys_flag & INVISIBLE_BIT:
                found.setdefault((row.topic(self._data), row.queue_id), []).append(row)
        return [(*queue, Records(self._data, rows)) for queue, rows in found.items()]

    def follow(self, queue_offset: int) -> bool:
        """Whether these records of one queue have consecutive offsets, from one on."""
        return all(
            row.queue_offset == expected for expected, row in enumerate(self._rows, queue_offset)
        )

    def units(self, codes: Sequence[int] | None = None) -> bytes:
        """Return the units of a consume queue; ``codes`` stand there for the hashes of the tags."""
        codes = self.tags_codes() if codes is None else codes
        return b"".join(
            UNIT.pack(row.physical_offset, row.size, code)
            for row, code in zip(self._rows, codes, strict=True)
        )

    def keys(self) -> tuple[array[int], array[int], array[int]]:
        """Return hash, position and store timestamp for each key of each record, for the index.

        The unique key comes first, then the sender's. Rolled back messages have none.
        """
        hashes, positions, times_ms = array("i"), array("q"), array("q")
        for row in self._rows:
            for key in self._keys(row):
                hashes.append(index_hash(row.topic(self._data).decode(), key))
                positions.append(row.physical_offset)
                times_ms.append(row.store_timestamp_ms)
        return hashes, positions, times_ms

    def _tags_code(self, row: _Row) -> int:
        tags = property_value(row.text(self._data), TAGS)
        return tags_code(None if tags is None else tags.decode("utf-8", "replace"))

    def _keys(self, row: _Row) -> list[str]:
        if row.sys_flag & ROLLBACK == ROLLBACK:
            return []
        text = row.text(self._data)
        unique, given = property_value(text, UNIQUE_KEY), property_value(text, KEYS)
        keys = [] if unique is None else [unique]
        keys += [] if given is None else [key for key in given.split(b" ") if key]
        return [key.decode("utf-8", "replace") for key in keys]
