"""The answer to a message that was stored: of all answers the one that is made most often."""

from __future__ import annotations

import struct

from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command, Serialize
from turbopump.wire.framing import encode
from turbopump.wire.headers import SendMessageAnswer
from turbopump.wire.hosts import Host
from turbopump.wire.ids import offset_id
from turbopump.wire.schema import ExtFields

_PREFIX = struct.Struct(">ii")
_PREFIX_OF_OPAQUE = '"opaque":'
_POSITION_DIGITS = 16


class SendResponseFrames:
    """Makes whole frames, for requests whose header is JSON.

    Only four values differ from one answer to the next. The text around them is taken once from a
    frame that was encoded the usual way, so the bytes are the same.
    """

    def __init__(self, traits: ExtFields, store_host: Host) -> None:
        fields = SendMessageAnswer.fields_of(traits, "", 0, 0)
        sample = Command(ResponseCode.SUCCESS).answer(ResponseCode.SUCCESS, fields)
        assert sample.serialize is Serialize.JSON
        text = encode(sample)[_PREFIX.size :].decode()
        text, _, self._end = text.rpartition(f"{_PREFIX_OF_OPAQUE}0")
        text, _, before_opaque = text.rpartition('"queueOffset":"0"')
        text, _, before_offset = text.rpartition('"queueId":"0"')
        text, _, before_queue = text.rpartition('"msgId":""')
        # The position is the end of the id.
        host_id = offset_id(store_host, PhysicalOffset(0))[:-_POSITION_DIGITS]
        self._before_position = f'{text}"msgId":"{host_id}'
        self._before_queue = f'"{before_queue}"queueId":"'
        self._before_offset = f'"{before_offset}"queueOffset":"'
        self._before_opaque = f'"{before_opaque}{_PREFIX_OF_OPAQUE}'

    def frame(
        self, opaque: int, position: PhysicalOffset, queue_id: int, queue_offset: QueueOffset
    ) -> bytes:
        """Return the answer to a request with a number: where its message lies."""
        header = (
            f"{self._before_position}{position:016X}{self._before_queue}{queue_id}"
            f"{self._before_offset}{queue_offset}{self._before_opaque}{opaque}{self._end}"
        ).encode()
        # The header's own length stands behind that of the frame, and 0 above it says JSON.
        return _PREFIX.pack(len(header) + 4, len(header)) + header
