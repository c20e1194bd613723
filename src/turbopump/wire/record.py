"""The stored message: the same bytes in the commit log and in the answer to a pull.

`Record` is the input (the store fills in position and time), `MessageView` is the output. A view
costs one unpacking of the fixed part; properties are parsed and the body is decompressed only on
demand.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeVar, overload

from isal.isal_zlib import crc32
from msgspec import MsgspecError, Struct
from msgspec.structs import force_setattr

from turbopump.clock import utc_time
from turbopump.errors import InvalidArgument, InvalidBody, RecordError
from turbopump.json_bodies import json_decoder, shortened
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.wire import properties, sysflag
from turbopump.wire.compression import inflate
from turbopump.wire.hashing import INT_MAX, body_crc
from turbopump.wire.hosts import V6_BYTES, Host
from turbopump.wire.ids import offset_id

T = TypeVar("T")

MAGIC = 0xDAA320A7
MAGIC_V2 = 0xDAA320AB
"""Release 5 only: a topic length of two bytes. Read, never written."""
BLANK_MAGIC = 0xCBD43194
"""Fills the end of a log file: total size and this, the rest undefined."""

BLANK_BYTES = 8
TOPIC_BYTES_MAX = 127
PROPERTIES_BYTES_MAX = properties.BYTES_MAX
FIXED_BYTES = 91
"""Size of a record without body, topic and properties, both hosts IPv4."""

_LENGTHS_BYTES = 3
"""Of topic and properties; the body's length belongs to the fixed part."""
_HOST_BITS = sysflag.BORN_HOST_V6 | sysflag.STORE_HOST_V6
_OTHER_BITS = ~_HOST_BITS
_HOST_BITS_SHIFT = 4
_SYS_FLAG_LOW_BYTE_AT = 39
_HOST_WIDTHS = ((4, 4), (16, 4), (4, 16), (16, 16))
# Indexed by the two bits of the system flag for the widths of the born and the store host.
_FIXED = tuple(struct.Struct(f">iIiiiqqiq{born}siq{store}siiqi") for born, store in _HOST_WIDTHS)
HEAD_BYTES_MAX = _FIXED[-1].size
"""Size of what comes before the body, both hosts IPv6."""
_PREFIX = struct.Struct(">iI")
_MAGICS = frozenset({MAGIC, MAGIC_V2})
_PROPERTIES_LENGTH = struct.Struct(">h")
_V2_TOPIC_LENGTH = struct.Struct(">h")
_BYTES = tuple(bytes((number,)) for number in range(TOPIC_BYTES_MAX + 1))
_SHORTS = tuple(_PROPERTIES_LENGTH.pack(number) for number in range(1024))
"""Lengths of most properties: a lookup takes a third of the time of packing."""


class Record(Struct, frozen=True, kw_only=True, gc=False):
    """A message about to be stored: everything but its position and store timestamp.

    ``body`` is as stored in the log, compressed if ``sys_flag`` says so; ``properties`` is their
    text form. ``size`` is known before the position is, so a log can make room first.
    """

    topic: bytes
    queue_id: int
    body: bytes
    properties: bytes = b""
    flag: int = 0
    sys_flag: int = 0
    born_timestamp_ms: int
    born_host: Host
    store_host: Host
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0

    def __post_init__(self) -> None:
        if not 0 < len(self.topic) <= TOPIC_BYTES_MAX:
            raise InvalidArgument(
                f"topic must be 1 to {TOPIC_BYTES_MAX} bytes, got {len(self.topic)}"
            )
        if len(self.properties) > PROPERTIES_BYTES_MAX:
            raise InvalidArgument(
                f"properties must be at most {PROPERTIES_BYTES_MAX} bytes, "
                f"got {len(self.properties)}"
            )

    @property
    def size(self) -> int:
        variable = len(self.body) + len(self.topic) + len(self.properties)
        return _FIXED[self._widths()].size + _LENGTHS_BYTES + variable

    def _widths(self) -> int:
        # As Host.is_v6, which costs two calls for each message.
        born_v6, store_v6 = len(self.born_host.ip) == V6_BYTES, len(self.store_host.ip) == V6_BYTES
        return born_v6 | store_v6 << 1

    def encode(
        self, queue_offset: QueueOffset, physical_offset: PhysicalOffset, store_timestamp_ms: int
    ) -> bytes:
        """Return the record's bytes; the bits for IPv6 hosts follow the hosts."""
        body, topic, text = self.body, self.topic, self.properties
        body_bytes, text_bytes = len(body), len(text)
        born, store = self.born_host, self.store_host
        born_ip, store_ip = born.ip, store.ip
        # As in _widths and body_crc, which cost calls for each message.
        widths = (len(born_ip) == V6_BYTES) | (len(store_ip) == V6_BYTES) << 1
        layout = _FIXED[widths]
        try:
            fixed = layout.pack(
                layout.size + _LENGTHS_BYTES + body_bytes + len(topic) + text_bytes,
                MAGIC,
                crc32(body) & INT_MAX,
                self.queue_id,
                self.flag,
                queue_offset,
                physical_offset,
                self.sys_flag & _OTHER_BITS | widths << _HOST_BITS_SHIFT,
                self.born_timestamp_ms,
                born_ip,
                born.port,
                store_timestamp_ms,
                store_ip,
                store.port,
                self.reconsume_times,
                self.prepared_transaction_offset,
                body_bytes,
            )
        except struct.error as error:
            raise InvalidArgument(f"a number does not fit into its record: {error}") from error
        text_length = (
            _SHORTS[text_bytes]
            if text_bytes < len(_SHORTS)
            else _PROPERTIES_LENGTH.pack(text_bytes)
        )
        return b"".join((fixed, body, _BYTES[len(topic)], topic, text_length, text))


class MessageView(Struct, frozen=True, eq=False, gc=False):
    """A stored message; the fields up to ``body_length`` are in the record's own order.

    ::

        for message in consumer.poll():
            print(message.topic, message.tags, message.keys, message.body, message.message_id)
            order = message.json(Order)
    """

    size: int
    magic: int
    body_crc: int
    queue_id: int
    flag: int
    queue_offset: QueueOffset
    physical_offset: PhysicalOffset
    sys_flag: int
    born_timestamp_ms: int
    born_ip: bytes
    born_port: int
    store_timestamp_ms: int
    store_ip: bytes
    store_port: int
    reconsume_times: int
    prepared_transaction_offset: int
    body_length: int
    stored_body: bytes
    """The body as stored in the log, perhaps compressed."""
    topic: str
    stored_properties: bytes
    _properties: dict[str, str] | None = None
    _body: bytes | None = None

    @property
    def properties(self) -> dict[str, str]:
        """All properties, system ones included; parsed on first use."""
        found = self._properties
        if found is None:
            found = properties.decode(self.stored_properties.decode("utf-8", "replace"))
            force_setattr(self, "_properties", found)
        return found

    @property
    def body(self) -> bytes:
        """The body as sent; decompressed on first use."""
        body = self._body
        if body is None:
            compression = sysflag.compression_of(self.sys_flag)
            body = (
                self.stored_body if compression is None else inflate(self.stored_body, compression)
            )
            force_setattr(self, "_body", body)
        return body

    @property
    def text(self) -> str:
        """The body as UTF-8 text; raises InvalidBody."""
        try:
            return self.body.decode()
        except UnicodeDecodeError as error:
            raise InvalidBody(f"body of {self!r} is not UTF-8 text: {error}") from error

    @overload
    def json(self, kind: type[T]) -> T: ...
    @overload
    def json(self, kind: Any = Any) -> Any: ...
    def json(self, kind: Any = Any) -> Any:
        """Read the body as JSON, as a value of a type if one is given; raises InvalidBody.

        ::

            order = message.json(Order)
            numbers = message.json(dict[str, int])
        """
        decoder = json_decoder(kind)
        try:
            return decoder.decode(self.body)
        except (MsgspecError, ValueError) as error:
            name = kind.__qualname__ if isinstance(kind, type) else repr(kind)
            name = "JSON" if kind is Any else name
            raise InvalidBody(f"body of {self!r} is not {name}: {error}") from error

    @property
    def born_at(self) -> datetime:
        """When it was sent, by the sender's clock; in UTC."""
        return utc_time(self.born_timestamp_ms)

    @property
    def stored_at(self) -> datetime:
        """When it was stored, by the broker's clock; in UTC."""
        return utc_time(self.store_timestamp_ms)

    @property
    def tags(self) -> str | None:
        return self.properties.get(properties.TAGS)

    @property
    def keys(self) -> list[str]:
        return self.properties.get(properties.KEYS, "").split()

    @property
    def unique_key(self) -> str | None:
        return self.properties.get(properties.UNIQUE_KEY)

    @property
    def born_host(self) -> Host:
        return Host(self.born_ip, self.born_port)

    @property
    def store_host(self) -> Host:
        return Host(self.store_ip, self.store_port)

    @property
    def offset_id(self) -> str:
        """The id that contains the message's broker and position."""
        return offset_id(self.store_host, self.physical_offset)

    @property
    def message_id(self) -> str:
        """The id that users see: the sender's unique one, else the offset id."""
        return self.unique_key or self.offset_id

    @property
    def transaction(self) -> sysflag.Transaction:
        return sysflag.transaction_of(self.sys_flag)

    def __repr__(self) -> str:
        """Show what people look for; neither body nor properties."""
        shown = ("topic", "message_id", "tags", "keys", "queue_id", "queue_offset", "size")
        fields = ", ".join(f"{name}={shortened(getattr(self, name))}" for name in shown)
        return f"MessageView({fields})"


class RecordEntry(Struct, frozen=True, gc=False):
    """What queues and indexes need of a stored message; its body is not copied."""

    size: int
    queue_id: int
    queue_offset: QueueOffset
    physical_offset: PhysicalOffset
    sys_flag: int
    store_timestamp_ms: int
    topic: bytes
    properties: bytes


def encode_blank(size: int) -> bytes:
    """Return the start of the filler for the last ``size`` bytes of a log file."""
    return _PREFIX.pack(size, BLANK_MAGIC)


def decode_record(data: bytes | memoryview, at: int = 0, *, check_crc: bool = False) -> MessageView:
    """Read the record at a position; ``check_crc`` also verifies the body's checksum."""
    # Without further calls while nothing is wrong: consumers do this for each message.
    left = len(data) - at
    fixed = _FIXED[data[at + _SYS_FLAG_LOW_BYTE_AT] >> 4 & 0b11] if left >= FIXED_BYTES else None
    if fixed is None or left < fixed.size:
        raise RecordError(f"{max(0, left)} bytes are too few for a record", at)
    fields = fixed.unpack_from(data, at)
    size, magic, body_length = fields[0], fields[1], fields[-1]
    body_at, end = at + fixed.size, at + size
    topic_length_at = body_at + body_length
    if magic not in _MAGICS or size > left or body_length < 0 or topic_length_at >= end:
        raise _wrong_lengths(size, magic, body_length, at, left, body_at)
    if magic == MAGIC:
        topic_at = topic_length_at + 1
        text_at = topic_at + data[topic_length_at] + _PROPERTIES_LENGTH.size
    else:
        topic_at, text_at = _v2_topic(data, topic_length_at, end)
    topic_end = text_at - _PROPERTIES_LENGTH.size
    if text_at > end:
        length = topic_end - topic_at
        raise RecordError(f"topic of {length} bytes does not fit into its record", topic_length_at)
    try:
        topic = str(data[topic_at:topic_end], "utf-8")
    except UnicodeDecodeError as error:
        raise RecordError("topic is not UTF-8", topic_at) from error
    body, text = bytes(data[body_at:topic_length_at]), bytes(data[text_at:end])
    if check_crc and body_crc(body) != fields[2]:
        raise RecordError(f"body does not match its checksum {fields[2]}", body_at)
    (text_length,) = _PROPERTIES_LENGTH.unpack_from(data, topic_end)
    if text_length != len(text):
        raise RecordError(
            f"properties of {text_length} bytes do not end with their record", topic_end
        )
    values = (*fields, body, topic, text)
    return MessageView(*values)


def decode_entry(
    data: bytes | memoryview, at: int = 0, *, check_crc: bool = False
) -> RecordEntry | None:
    """Read what a log's reader needs of the record at a position; None if it is not one.

    For scans over millions of records: copies no body, and damage is a result, not an exception.
    Records of release 5 do not count here, as no log of this format holds them.
    """
    if len(data) - at < FIXED_BYTES:
        return None
    fixed = _FIXED[data[at + _SYS_FLAG_LOW_BYTE_AT] >> 4 & 0b11]
    if len(data) - at < fixed.size:
        return None
    fields = fixed.unpack_from(data, at)
    size, body_at, end = fields[0], at + fixed.size, at + fields[0]
    topic_at = body_at + fields[-1] + 1
    if fields[1] != MAGIC or fields[-1] < 0 or end > len(data) or topic_at >= end:
        return None
    properties_at = topic_at + data[topic_at - 1] + _PROPERTIES_LENGTH.size
    if properties_at > end:
        return None
    (length,) = _PROPERTIES_LENGTH.unpack_from(data, properties_at - _PROPERTIES_LENGTH.size)
    if length < 0 or properties_at + length != end:
        return None
    if check_crc and body_crc(memoryview(data)[body_at : topic_at - 1]) != fields[2]:
        return None
    topic = bytes(data[topic_at : properties_at - _PROPERTIES_LENGTH.size])
    properties_text = bytes(data[properties_at:end])
    return RecordEntry(
        size, fields[3], fields[5], fields[6], fields[7], fields[11], topic, properties_text
    )


def store_timestamp_in(head: bytes, position: int) -> int:
    """Return the store timestamp of the record at a position of the log; 0 if there is none.

    ``head`` has `HEAD_BYTES_MAX` bytes from there on, unless the file ends before.
    """
    if len(head) < HEAD_BYTES_MAX:
        return 0
    fields = _FIXED[head[_SYS_FLAG_LOW_BYTE_AT] >> 4 & 0b11].unpack_from(head)
    store_timestamp_ms: int = fields[11]
    return store_timestamp_ms if (fields[1], fields[6]) == (MAGIC, position) else 0


def decode_records(data: bytes | memoryview) -> Iterator[MessageView]:
    """Read a run of records as in the answer to a pull."""
    at, lengths = 0, (0, 0, 0)
    while at < len(data):
        view = decode_record(data, at)
        yield view
        at += view.size
        before, lengths = lengths, (view.size, view.body_length, len(view.stored_properties))
        if lengths == before:
            for same in _records_like(view, data, at):
                yield same
                at += view.size


def _records_like(first: MessageView, data: bytes | memoryview, at: int) -> Iterator[MessageView]:
    """Read the records from a position on as long as they have the layout of another one.

    Mostly all of an answer have it. Unpacking each as a whole takes a third of the time.
    """
    if first.magic != MAGIC:
        return
    name, topic, text_length = first.topic, first.topic.encode(), len(first.stored_properties)
    between = bytes((len(topic),)) + topic + _PROPERTIES_LENGTH.pack(text_length)
    lengths, host_bits = (first.size, MAGIC, first.body_length), first.sys_flag & _HOST_BITS
    layout = _whole_layout(
        host_bits >> _HOST_BITS_SHIFT, first.body_length, len(between), text_length
    )
    whole = (len(data) - at) // layout.size * layout.size
    # Each by its name: a list of them takes half as long again.
    for (
        size, magic, crc, queue_id, flag, offset, position, sys_flag, born_ms, born_ip, born_port,
        store_ms, store_ip, store_port, times, prepared, body_length, body, found, text,
    ) in layout.iter_unpack(memoryview(data)[at : at + whole]):  # fmt: skip
        is_same = found == between and (size, magic, body_length) == lengths
        if not is_same or sys_flag & _HOST_BITS != host_bits:
            return
        yield MessageView(
            size, magic, crc, queue_id, flag, offset, position, sys_flag, born_ms, born_ip,
            born_port, store_ms, store_ip, store_port, times, prepared, body_length, body, name,
            text,
        )  # fmt: skip


@lru_cache(maxsize=256)
def _whole_layout(widths: int, *lengths: int) -> struct.Struct:
    """Return the layout of a record with its body, what is between the two, and its properties."""
    return struct.Struct(_FIXED[widths].format + "".join(f"{length}s" for length in lengths))


def _wrong_lengths(
    size: int, magic: int, body_length: int, at: int, left: int, body_at: int
) -> RecordError:
    if magic not in _MAGICS:
        return RecordError(f"magic number 0x{magic:08X} is not a message's", at + 4)
    if size > left:
        return RecordError(f"record of {size} bytes, but {left} are left", at)
    return RecordError(f"body of {body_length} bytes in a record of {size}", body_at - 4)


def _v2_topic(data: bytes | memoryview, at: int, end: int) -> tuple[int, int]:
    """Return where topic and properties of a record of release 5 begin."""
    if end - at < _V2_TOPIC_LENGTH.size:
        raise RecordError("record ends before its topic", at)
    (length,) = _V2_TOPIC_LENGTH.unpack_from(data, at)
    if length < 0:
        raise RecordError(f"topic of {length} bytes does not fit into its record", at)
    start = at + _V2_TOPIC_LENGTH.size
    return start, start + length + _PROPERTIES_LENGTH.size
