"""Prepared pull requests, of which many are sent in succession."""

from __future__ import annotations

import struct

from msgspec.structs import replace

from turbopump.wire.codes import RequestCode
from turbopump.wire.command import Command, Serialize, request
from turbopump.wire.framing import encode
from turbopump.wire.headers import PullMessage

_PREFIX = struct.Struct(">ii")


class PullRequestFrames:
    """Creates whole frames that are the same except for queue, offset and count.

    The text around these is taken once from a frame that was encoded normally, so the bytes are the
    same.
    """

    def __init__(self, header: PullMessage) -> None:
        self._header = header
        same = replace(header, queue_id=0, queue_offset=0, max_msg_nums=0)
        sample = request(RequestCode.PULL_MESSAGE, same)
        assert sample.serialize is Serialize.JSON
        text = encode(sample)[_PREFIX.size :].replace(b"%", b"%%")
        # Quotes within values are escaped, so each of these occurs once.
        for name in (b'"queueId":"', b'"queueOffset":"', b'"maxMsgNums":"', b'"opaque":'):
            text = text.replace(name + b"0", name + b"%d")
        self._text = text

    def command(self, queue_id: int, queue_offset: int, count_max: int) -> Command:
        """Return a request before encoding, for hooks that change it."""
        header = replace(
            self._header, queue_id=queue_id, queue_offset=queue_offset, max_msg_nums=count_max
        )
        return request(RequestCode.PULL_MESSAGE, header)

    def frame(self, opaque: int, queue_id: int, queue_offset: int, count_max: int) -> bytes:
        """Return a request, with its id, for up to ``count_max`` messages from an offset."""
        header = self._text % (queue_id, queue_offset, count_max, opaque)
        # The header's length follows that of the frame; its high byte 0 means JSON.
        return _PREFIX.pack(len(header) + 4, len(header)) + header
