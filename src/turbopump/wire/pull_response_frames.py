"""Responses to pulls: with messages, or empty after a long poll, as idle consumers get them."""

from __future__ import annotations

import struct

from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command, Serialize
from turbopump.wire.framing import encode
from turbopump.wire.headers import PullMessageAnswer

_PREFIX = struct.Struct(">ii")
_OFFSETS = (b"nextBeginOffset", b"minOffset", b"maxOffset")


class PullResponseFrames:
    """Creates frames up to their bodies, for requests whose header is JSON.

    Only four values differ between answers. The text around them is taken once from a frame that
    was encoded normally, so the bytes are the same.
    """

    def __init__(self, code: ResponseCode, broker_id: int, remark: str) -> None:
        fields = PullMessageAnswer(
            suggest_which_broker_id=broker_id, next_begin_offset=0, min_offset=0, max_offset=0
        )
        sample = Command(code).answer(code, fields, remark=remark)
        assert sample.serialize is Serialize.JSON
        text = encode(sample)[_PREFIX.size :].replace(b"%", b"%%")
        for name in _OFFSETS:
            text = text.replace(b'"%b":"0"' % name, b'"%b":"%%d"' % name)
        self._text = text.replace(b'"opaque":0', b'"opaque":%d')

    def frame(
        self, opaque: int, next_offset: int, min_offset: int, max_offset: int, body_bytes: int = 0
    ) -> bytes:
        """Return the answer to a request: the next offset, and the queue's minimum and maximum.

        ``body_bytes`` bytes of messages have to follow.
        """
        header = self._text % (next_offset, min_offset, max_offset, opaque)
        # The header's length follows that of the frame; its high byte 0 means JSON.
        return _PREFIX.pack(len(header) + 4 + body_bytes, len(header)) + header
