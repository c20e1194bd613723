"""Prepared responses to sends: the most frequent responses of brokers."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command, Serialize
from turbopump.wire.framing import encode
from turbopump.wire.headers import SendMessageAnswer
from turbopump.wire.hosts import Host
from turbopump.wire.ids import offset_id, offset_ids
from turbopump.wire.schema import ExtFields

_PREFIX = struct.Struct(">ii")
_PREFIX_OF_OPAQUE = '"opaque":'
_POSITION_DIGITS = 16


class SendResponseFrames:
    """Creates whole frames, for requests whose header is JSON.

    Only four values differ between answers. The text around them is taken once from a frame that
    was encoded normally, so the bytes are the same.
    """

    def __init__(self, traits: ExtFields, store_host: Host) -> None:
        fields = SendMessageAnswer.fields_of(traits, "", 0, 0)
        sample = Command(ResponseCode.SUCCESS).answer(ResponseCode.SUCCESS, fields)
        assert sample.serialize is Serialize.JSON
        text = encode(sample)[_PREFIX.size :].decode()
        text, _, end = text.rpartition(f"{_PREFIX_OF_OPAQUE}0")
        text, _, before_opaque = text.rpartition('"queueOffset":"0"')
        text, _, before_offset = text.rpartition('"queueId":"0"')
        text, _, before_queue = text.rpartition('"msgId":""')
        # The position is the end of the id.
        host_id = offset_id(store_host, PhysicalOffset(0))[:-_POSITION_DIGITS]
        parts = (
            f'{text}"msgId":"',
            f'"{before_queue}"queueId":"',
            f'"{before_offset}"queueOffset":"',
            f'"{before_opaque}{_PREFIX_OF_OPAQUE}',
            end,
        )
        # Formatting bytes takes half as long as formatting a string and encoding it.
        escaped = tuple(part.encode().replace(b"%", b"%%") for part in parts)
        self._batch_form = b"%b%%b%b%%d%b%%d%b%%d%b" % escaped
        self._form = (b"%b" + host_id.encode() + b"%%016X%b%%d%b%%d%b%%d%b") % escaped
        self._store_host = store_host

    def frame(
        self, opaque: int, position: PhysicalOffset, queue_id: int, queue_offset: QueueOffset
    ) -> bytes:
        """Return the answer to a request: where its message is stored."""
        header = self._form % (position, queue_id, queue_offset, opaque)
        # As _framed, without a call for each message.
        return _PREFIX.pack(len(header) + 4, len(header)) + header

    def batch_frame(
        self,
        opaque: int,
        positions: Sequence[PhysicalOffset],
        queue_id: int,
        queue_offset: QueueOffset,
    ) -> bytes:
        """Return the answer to a batch: where its messages are stored."""
        ids = offset_ids(self._store_host, positions).encode()
        return _framed(self._batch_form % (ids, queue_id, queue_offset, opaque))


def _framed(header: bytes) -> bytes:
    length = len(header)
    # The header's length follows that of the frame; its high byte 0 means JSON.
    return _PREFIX.pack(length + 4, length) + header
