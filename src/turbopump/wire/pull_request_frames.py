"""Requests for the messages of one queue, of which many are sent one after the other."""

from __future__ import annotations

import struct

from msgspec.structs import replace

from turbopump.wire.codes import RequestCode
from turbopump.wire.command import Serialize, request
from turbopump.wire.framing import encode
from turbopump.wire.headers import PullMessage

_PREFIX = struct.Struct(">ii")


class PullRequestFrames:
    """Makes whole frames that say all the same but from where on and how many.

    The text around what differs is taken once from a frame that was encoded the usual way, so the
    bytes are the same.
    """

    def __init__(self, header: PullMessage) -> None:
        same = replace(header, queue_offset=0, max_msg_nums=0)
        sample = request(RequestCode.PULL_MESSAGE, same)
        assert sample.serialize is Serialize.JSON
        text = encode(sample)[_PREFIX.size :].replace(b"%", b"%%")
        # Quotes within values are escaped, so each of these is there once.
        for place in (b'"queueOffset":"0"', b'"maxMsgNums":"0"', b'"opaque":0'):
            text = text.replace(place, place.replace(b"0", b"%d"))
        self._text = text

    def frame(self, opaque: int, queue_offset: int, count_max: int) -> bytes:
        """Return the request with a number for so many messages from an offset on."""
        header = self._text % (queue_offset, count_max, opaque)
        # The header's own length stands behind that of the frame, and 0 above it says JSON.
        return _PREFIX.pack(len(header) + 4, len(header)) + header
