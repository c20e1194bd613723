"""Messages about to be stored together: encoded when added, placed when their position is known."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple, cast

from turbopump.core.reference.frames import SendFrame
from turbopump.core.reference.hashing import body_crc
from turbopump.core.reference.layout import (
    DELAY,
    ENTRY_END,
    FIXED,
    HOST_BITS,
    HOST_BITS_SHIFT,
    INVISIBLE_BIT,
    LENGTHS_BYTES,
    MAGIC,
    POSITION_AT,
    PROPERTIES_BYTES_MAX,
    QUEUE_OFFSET_AT,
    STORE_TIME_AT,
    TEXT_LENGTH,
    TOPIC_BYTES_MAX,
    TRANSACTION_PREPARED,
    WAIT,
)
from turbopump.core.reference.properties import pop_property
from turbopump.core.reference.records import is_topic_name
from turbopump.errors import BodyError, InvalidArgument
from turbopump.message import PhysicalOffset, QueueOffset

Buffer = bytes | bytearray | memoryview

_PORT_BYTES = 4
_V4_HOST_BYTES = 4 + _PORT_BYTES
_V6_HOST_BYTES = 16 + _PORT_BYTES
_NUMBER = struct.Struct(">q")
_BATCH_HEAD = struct.Struct(">i8xii")
"""Of a message in the body of a batch: size, flag, and the length of its body."""
_BATCH_BYTES_MIN = _BATCH_HEAD.size + TEXT_LENGTH.size


class _Group(NamedTuple):
    """A message, or a batch: its records stay together."""

    queue: int
    """Index of its queue in the block; -1 for messages that are in no queue."""
    starts: list[int]
    """Where its records begin in the block."""
    end: int


class Block:
    """Messages and batches to be stored, in order; each of them is one group.

    ``record_bytes_max`` limits a record, ``group_bytes_max`` all records of a batch. Whatever is
    refused leaves the block unchanged.
    """

    def __init__(self, record_bytes_max: int, group_bytes_max: int) -> None:
        self._record_bytes_max = record_bytes_max
        self._group_bytes_max = group_bytes_max
        self._data = bytearray()
        self._groups: list[_Group] = []
        self._queues: dict[tuple[bytes, int], int] = {}
        self._placed: list[tuple[array[int], int]] = []

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self._groups)

    @property
    def size(self) -> int:
        """Bytes of all records."""
        return len(self._data)

    @property
    def queues(self) -> list[tuple[bytes, int]]:
        """Topic and id of each queue with messages in the block."""
        return list(self._queues)

    # --- adding -----------------------------------------------------------------------------------

    def add(
        self,
        topic: bytes,
        queue_id: int,
        body: Buffer,
        properties: bytes,
        flag: int,
        sys_flag: int,
        born_timestamp_ms: int,
        born_host: bytes,
        store_host: bytes,
        reconsume_times: int = 0,
        prepared_transaction_offset: int = 0,
    ) -> None:
        """Add a message; hosts are the bytes of IP address and port. Raises InvalidArgument."""
        _check_common(
            queue_id, sys_flag, born_timestamp_ms, born_host, store_host, reconsume_times,
            prepared_transaction_offset,
        )  # fmt: skip
        _check_number("flag", flag, 32)
        record = _encoded(
            topic, queue_id, body, properties, flag, sys_flag, born_timestamp_ms, born_host,
            store_host, reconsume_times, prepared_transaction_offset,
        )  # fmt: skip
        self._check_record(len(record), properties)
        number = -1 if sys_flag & INVISIBLE_BIT else self._queue(topic, queue_id)
        start = len(self._data)
        self._data += record
        self._groups.append(_Group(number, [start], len(self._data)))

    def add_send(
        self,
        send: SendFrame,
        topic: bytes,
        queue_id: int,
        more_flags: int,
        cluster: bytes,
        born_host: bytes,
        store_host: bytes,
    ) -> bool | None:
        """Add a message as a producer sent it; return whether its sender waits for the disk.

        Topic and queue may be others than the producer's; ``more_flags`` are added to those of the
        system. ``cluster`` is the property that each stored message gets in place of ``WAIT``.
        Returns None for messages that may be delayed or transactional, which are not added.
        """
        if DELAY in send.properties or TRANSACTION_PREPARED in send.properties:
            return None
        kept, wait = pop_property(send.properties, WAIT)
        self.add(
            topic,
            queue_id,
            send.body,
            kept + ENTRY_END + cluster if kept else cluster,
            send.message_flag,
            send.sys_flag | more_flags,
            send.born_timestamp,
            born_host,
            store_host,
            send.reconsume_times,
        )
        return wait is None or wait.lower() == b"true"

    def add_batch(
        self,
        topic: bytes,
        queue_id: int,
        data: Buffer,
        shared: bytes,
        sys_flag: int,
        born_timestamp_ms: int,
        born_host: bytes,
        store_host: bytes,
        reconsume_times: int = 0,
        messages_max: int = 2**31 - 1,
    ) -> int:
        """Add the messages in the body of a batch; return how many there are.

        Each gets the ``shared`` properties after its own. Raises BodyError if the body is
        malformed, InvalidArgument if a message cannot be stored.
        """
        _check_common(
            queue_id, sys_flag, born_timestamp_ms, born_host, store_host, reconsume_times, 0
        )
        if sys_flag & INVISIBLE_BIT:
            raise InvalidArgument("a batch cannot be transactional")
        messages = _batch_messages(data)
        if not messages:
            raise InvalidArgument("a batch must have at least one message")
        if len(messages) > messages_max:
            raise InvalidArgument(
                f"a batch must have at most {messages_max} messages, whose ids fit into a response,"
                f" got {len(messages)}"
            )
        starts, records, at = [], [], len(self._data)
        for flag, body, own in messages:
            text = own + (ENTRY_END if own and not own.endswith(ENTRY_END) else b"") + shared
            record = _encoded(
                topic, queue_id, body, text, flag, sys_flag, born_timestamp_ms, born_host,
                store_host, reconsume_times, 0,
            )  # fmt: skip
            self._check_record(len(record), text)
            starts.append(at)
            records.append(record)
            at += len(record)
        total = at - len(self._data)
        if total > self._group_bytes_max:
            raise InvalidArgument(
                f"a batch must be at most {self._group_bytes_max} bytes, got {total}"
            )
        number = self._queue(topic, queue_id)
        self._data += b"".join(records)
        self._groups.append(_Group(number, starts, at))
        return len(messages)

    def _check_record(self, size: int, properties: bytes) -> None:
        if size > self._record_bytes_max:
            raise InvalidArgument(
                f"a message must be at most {self._record_bytes_max} bytes, got {size}"
            )
        if b"\0" in properties:
            raise InvalidArgument(f"properties must not contain a zero byte, got {properties!r}")

    def _queue(self, topic: bytes, queue_id: int) -> int:
        return self._queues.setdefault((topic, queue_id), len(self._queues))

    # --- placing ----------------------------------------------------------------------------------

    def fitting(self, first: int, room: int) -> int:
        """Return how many groups fit into ``room`` bytes, from one on."""
        begin = self._begin(first)
        return sum(group.end - begin <= room for group in self._groups[first:])

    def place(
        self, first: int, count: int, position: int, offsets: list[int], store_timestamp_ms: int
    ) -> memoryview:
        """Assign up to ``count`` groups a position, queue offsets and a time; return their bytes.

        ``offsets`` has the next offset of each of `queues`, and is advanced. Groups are placed in
        order, each once.
        """
        if first != len(self._placed):
            raise AssertionError("groups are placed in order")
        begin = self._begin(first)
        end = min(first + count, len(self._groups))
        for queue, starts, _ in self._groups[first:end]:
            offset = offsets[queue] if queue >= 0 else 0
            positions = array("q", (position + start - begin for start in starts))
            for number, start in enumerate(starts):
                self._patch(start, offset + number, positions[number], store_timestamp_ms)
            if queue >= 0:
                offsets[queue] += len(starts)
            self._placed.append((positions, offset))
        return memoryview(self._data)[begin : self._begin(end)]

    def positions(self, number: int) -> Sequence[PhysicalOffset]:
        """Return the positions of the messages of a placed group."""
        return cast(Sequence[PhysicalOffset], self._placed[number][0])

    def queue_offset(self, number: int) -> QueueOffset:
        """Return the queue offset of the first message of a placed group."""
        return QueueOffset(self._placed[number][1])

    def group_size(self, number: int) -> int:
        """Return the bytes of a group."""
        return self._groups[number].end - self._begin(number)

    def _begin(self, number: int) -> int:
        return self._groups[number - 1].end if number else 0

    def _patch(self, start: int, offset: int, position: int, store_timestamp_ms: int) -> None:
        sys_flag = int.from_bytes(self._data[start + 36 : start + 40], "big")
        time_at = STORE_TIME_AT[sys_flag >> HOST_BITS_SHIFT & 0b11]
        _NUMBER.pack_into(self._data, start + QUEUE_OFFSET_AT, offset)
        _NUMBER.pack_into(self._data, start + POSITION_AT, position)
        _NUMBER.pack_into(self._data, start + time_at, store_timestamp_ms)


def _check_common(
    queue_id: int,
    sys_flag: int,
    born_timestamp_ms: int,
    born_host: bytes,
    store_host: bytes,
    reconsume_times: int,
    prepared_transaction_offset: int,
) -> None:
    """Check what all messages of a group have in common."""
    for host in (born_host, store_host):
        if len(host) not in {_V4_HOST_BYTES, _V6_HOST_BYTES}:
            raise InvalidArgument(
                f"a host must have 4 or 16 bytes of IP address and 4 of port, got {len(host)}"
            )
    _check_number("queue_id", queue_id, 32)
    _check_number("sys_flag", sys_flag, 32)
    _check_number("born_timestamp_ms", born_timestamp_ms, 64)
    _check_number("reconsume_times", reconsume_times, 32)
    _check_number("prepared_transaction_offset", prepared_transaction_offset, 64)


def _check_number(name: str, value: int, bits: int) -> None:
    if not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
        raise InvalidArgument(f"{name} must fit into {bits} bits, got {value}")


def _encoded(
    topic: bytes,
    queue_id: int,
    body: Buffer,
    properties: bytes,
    flag: int,
    sys_flag: int,
    born_timestamp_ms: int,
    born_host: bytes,
    store_host: bytes,
    reconsume_times: int,
    prepared_transaction_offset: int,
) -> bytes:
    """Return a record without queue offset, position and store timestamp.

    The bits for IPv6 hosts in the system flag follow the hosts.
    """
    if not 0 < len(topic) <= TOPIC_BYTES_MAX:
        raise InvalidArgument(f"topic must be 1 to {TOPIC_BYTES_MAX} bytes, got {len(topic)}")
    if queue_id < 0 or not is_topic_name(topic):
        raise InvalidArgument(
            f"queue {topic!r}, {queue_id}: the topic must be able to name a directory"
            " and the number must not be negative"
        )
    if len(properties) > PROPERTIES_BYTES_MAX:
        raise InvalidArgument(
            f"properties must be at most {PROPERTIES_BYTES_MAX} bytes, got {len(properties)}"
        )
    born_v6, store_v6 = len(born_host) == _V6_HOST_BYTES, len(store_host) == _V6_HOST_BYTES
    widths = born_v6 | store_v6 << 1
    layout = FIXED[widths]
    fixed = layout.pack(
        layout.size + LENGTHS_BYTES + len(body) + len(topic) + len(properties),
        MAGIC,
        body_crc(body),
        queue_id,
        flag,
        0,
        0,
        sys_flag & ~HOST_BITS | widths << HOST_BITS_SHIFT,
        born_timestamp_ms,
        born_host[:-_PORT_BYTES],
        int.from_bytes(born_host[-_PORT_BYTES:], "big", signed=True),
        0,
        store_host[:-_PORT_BYTES],
        int.from_bytes(store_host[-_PORT_BYTES:], "big", signed=True),
        reconsume_times,
        prepared_transaction_offset,
        len(body),
    )
    lengths = bytes((len(topic),)), TEXT_LENGTH.pack(len(properties))
    return b"".join((fixed, body, lengths[0], topic, lengths[1], properties))


def _batch_messages(data: Buffer) -> Sequence[tuple[int, Buffer, bytes]]:
    """Return flag, body and properties of each message in the body of a batch."""
    found = []
    at, end = 0, len(data)
    while at < end:
        if end - at < _BATCH_BYTES_MIN:
            raise BodyError("batch ends inside a message", at)
        size, flag, length = _BATCH_HEAD.unpack_from(data, at)
        following, body_end = at + size, at + _BATCH_HEAD.size + length
        text_length = size - _BATCH_BYTES_MIN - length
        if length < 0 or text_length < 0 or following > end:
            raise BodyError(f"batch message of {size} bytes with a body of {length}", at)
        if int.from_bytes(data[body_end : body_end + TEXT_LENGTH.size], "big") != text_length:
            raise BodyError(f"batch message of {size} bytes with other lengths in it", at)
        body = data[at + _BATCH_HEAD.size : body_end]
        found.append((flag, body, bytes(data[body_end + TEXT_LENGTH.size : following])))
        at = following
    return found
