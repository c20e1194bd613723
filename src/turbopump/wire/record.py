"""The stored message: the same bytes in the commit log and in the answer to a pull.

`Record` is the input (the store fills in position and time), `MessageView` is the output.
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Iterator
from datetime import datetime
from typing import Any, TypeVar, overload

from isal.isal_zlib import crc32
from msgspec import MsgspecError, Struct

from turbopump import core
from turbopump.clock import utc_time
from turbopump.errors import InvalidArgument, InvalidBody
from turbopump.json_bodies import json_decoder, shortened
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.wire import properties, sysflag
from turbopump.wire.compression import inflate
from turbopump.wire.hashing import INT_MAX
from turbopump.wire.hosts import V6_BYTES, Host
from turbopump.wire.ids import offset_id

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

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
_PROPERTIES_LENGTH = struct.Struct(">h")
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


class MessageView(core.StoredRecord):
    """A stored message; nothing of it is parsed or decompressed before it is asked for.

    ::

        for message in consumer.poll():
            print(message.topic, message.tags, message.keys, message.body, message.message_id)
            order = message.json(Order)
    """

    __slots__ = ()

    def replaced(
        self,
        *,
        topic: str | None = None,
        reconsume_times: int | None = None,
        properties: dict[str, str] | None = None,
    ) -> MessageView:
        """Return a copy with other values for those given."""
        values = dict(zip(_VIEW_FIELDS, self.__reduce__()[1], strict=True))
        changes = {
            "topic": topic,
            "reconsume_times": reconsume_times,
            "_properties": properties,
        }
        values.update({name: value for name, value in changes.items() if value is not None})
        return MessageView(**values)  # type: ignore[arg-type]

    @property
    def properties(self) -> dict[str, str]:
        """All properties, system ones included; parsed on first use."""
        found = self._properties
        if found is None:
            found = self._properties = core.parse_properties(self.stored_properties)
        return found

    @property
    def body(self) -> bytes:
        """The body as sent; decompressed on first use."""
        body = self._body
        if body is None:
            compression = sysflag.compression_of(self.sys_flag)
            stored = self.stored_body
            body = self._body = stored if compression is None else inflate(stored, compression)
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
        return self._property(properties.TAGS)

    @property
    def keys(self) -> list[str]:
        return (self._property(properties.KEYS) or "").split()

    @property
    def unique_key(self) -> str | None:
        return self._property(properties.UNIQUE_KEY)

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

    def _property(self, name: str) -> str | None:
        """Return one property, without parsing the others."""
        if self._properties is not None:
            return self._properties.get(name)
        value = core.property_value(self.stored_properties, name.encode())
        return None if value is None else value.decode("utf-8", "replace")

    def __repr__(self) -> str:
        """Show what people look for; neither body nor properties."""
        shown = ("topic", "message_id", "tags", "keys", "queue_id", "queue_offset", "size")
        fields = ", ".join(f"{name}={shortened(getattr(self, name))}" for name in shown)
        return f"MessageView({fields})"


MessageView.__signature__ = inspect.signature(core.reference.StoredRecord)  # type: ignore[attr-defined] # the compiled constructor has none
_VIEW_FIELDS = tuple(inspect.signature(MessageView).parameters)


def encode_blank(size: int) -> bytes:
    """Return the start of the filler for the last ``size`` bytes of a log file."""
    return _PREFIX.pack(size, BLANK_MAGIC)


def decode_record(data: Buffer, at: int = 0, *, check_crc: bool = False) -> MessageView:
    """Read the record at a position; ``check_crc`` also verifies the body's checksum."""
    return core.read_record(data, at, check_crc=check_crc, kind=MessageView)


def decode_records(data: Buffer) -> Iterator[MessageView]:
    """Read a run of records as in the answer to a pull; those before a damaged one come first."""
    found, error = core.read_records(data, kind=MessageView)
    yield from found
    if error is not None:
        raise error


def store_timestamp_in(head: bytes, position: int) -> int:
    """Return the store timestamp of the record at a position of the log; 0 if there is none.

    ``head`` has `HEAD_BYTES_MAX` bytes from there on, unless the file ends before.
    """
    if len(head) < HEAD_BYTES_MAX:
        return 0
    fields = _FIXED[head[_SYS_FLAG_LOW_BYTE_AT] >> 4 & 0b11].unpack_from(head)
    store_timestamp_ms: int = fields[11]
    return store_timestamp_ms if (fields[1], fields[6]) == (MAGIC, position) else 0
