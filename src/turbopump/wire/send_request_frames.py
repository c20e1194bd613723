"""Prepared send requests: the most frequent requests of producers."""

from __future__ import annotations

import struct
from functools import lru_cache

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from turbopump.errors import InvalidArgument
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import Buffer, Command, Serialize, request
from turbopump.wire.framing import encode, too_long
from turbopump.wire.headers import SendMessage, SendMessageV2
from turbopump.wire.names import TEMPLATE_TOPIC

_PREFIX = struct.Struct(">ii")
_HEADER_LENGTH_BYTES = 4
_JOINED_BYTES_MAX = 4 * 1024
"""Longer bodies are not copied into their frame."""

_as_json = msgspec.json.Encoder().encode


class SendRequestFrames:
    """Creates whole frames for one producer group, topic and broker.

    Only a few values differ between requests. The text around them is taken once from a frame that
    was encoded normally, so the bytes are the same.
    """

    def __init__(self, header: SendMessage) -> None:
        self.code = RequestCode.SEND_BATCH_MESSAGE if header.batch else RequestCode.SEND_MESSAGE_V2
        self.header = replace(
            header, queue_id=0, sys_flag=0, born_timestamp=0, flag=0, properties=""
        )
        sample = request(self.code, self.header)
        assert sample.serialize is Serialize.JSON
        text = encode(sample)[_PREFIX.size :].replace(b"%", b"%%")
        # Quotes within values are escaped, so each of these occurs once.
        for letter in (b"e", b"f", b"g", b"h"):
            text = text.replace(b'"%b":"0"' % letter, b'"%b":"%%d"' % letter)
        text = text.replace(b'"i":""', b'"i":%b')
        for name in (b'"flag":', b'"opaque":'):
            text = text.replace(name + b"0", name + b"%d")
        self.text = text


@lru_cache(maxsize=16_384)
def send_request_frames(
    group: str, topic: str, broker: str, new_topic_queues: int, is_batch: bool
) -> SendRequestFrames:
    """Return the frame builder of messages or batches for a topic on a broker."""
    return SendRequestFrames(
        SendMessageV2(
            producer_group=group,
            topic=topic,
            default_topic=TEMPLATE_TOPIC,
            default_topic_queue_nums=new_topic_queues,
            queue_id=0,
            sys_flag=0,
            born_timestamp=0,
            flag=0,
            properties="",
            reconsume_times=0,
            unit_mode=False,
            batch=is_batch,
            broker_name=broker,
        )
    )


class SendRequest(Struct, frozen=True):
    """One message for a queue, complete except for the number of its request."""

    frames: SendRequestFrames
    queue_id: int
    sys_flag: int
    born_ms: int
    flag: int
    properties: str
    body: Buffer

    @property
    def code(self) -> int:
        return self.frames.code

    @property
    def header(self) -> SendMessage:
        return replace(
            self.frames.header,
            queue_id=self.queue_id,
            sys_flag=self.sys_flag,
            born_timestamp=self.born_ms,
            flag=self.flag,
            properties=self.properties,
        )

    def command(self) -> Command:
        """Return the same request for hooks that see or change it."""
        return request(self.code, self.header, self.body)

    def frame_parts(self, opaque: int, frame_flag: int, frame_bytes_max: int) -> list[Buffer]:
        """Return the frame, in one piece unless the body is long; see `encode_parts`."""
        try:
            properties = _as_json(self.properties)
        except UnicodeEncodeError as error:
            raise InvalidArgument(
                f"tags, keys and properties must be UTF-8 text: {error}"
            ) from error
        header = self.frames.text % (
            self.queue_id,
            self.sys_flag,
            self.born_ms,
            self.flag,
            properties,
            frame_flag,
            opaque,
        )
        body = self.body
        length = _HEADER_LENGTH_BYTES + len(header) + len(body)
        if length > frame_bytes_max:
            raise too_long(length, frame_bytes_max)
        # The header's length follows that of the frame; its high byte 0 means JSON.
        prefix = _PREFIX.pack(length, len(header))
        if len(body) <= _JOINED_BYTES_MAX:
            return [b"".join((prefix, header, body))]
        return [prefix + header, body]
