"""Prepared frames: the most frequent requests and responses, sends and pulls.

Only a few values differ between frames of one kind. The text around them is taken once from a frame
that was encoded normally, so the bytes are the same.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from turbopump.errors import InvalidArgument
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Buffer, Command, Serialize, request
from turbopump.wire.framing import encode, too_long
from turbopump.wire.headers import (
    PullMessage,
    PullMessageAnswer,
    SendMessage,
    SendMessageAnswer,
    SendMessageV2,
)
from turbopump.wire.hosts import Host
from turbopump.wire.ids import offset_id, offset_ids
from turbopump.wire.names import TEMPLATE_TOPIC
from turbopump.wire.schema import ExtFields

_PREFIX = struct.Struct(">ii")
"""The lengths of frame and header; the high byte of the second is 0, which means JSON."""
_HEADER_LENGTH_BYTES = 4
_JOINED_BYTES_MAX = 4 * 1024
"""Longer bodies are not copied into their frame."""
_POSITION_DIGITS = 16

_as_json = msgspec.json.Encoder().encode


def _template(sample: Command, *numbers: bytes) -> bytes:
    """Return a command's header with ``%d`` instead of the 0 after each of the names."""
    assert sample.serialize is Serialize.JSON
    text = encode(sample)[_PREFIX.size :].replace(b"%", b"%%")
    # Quotes within values are escaped, so each name occurs once.
    for name in numbers:
        text = text.replace(name + b"0", name + b"%d")
    return text


# --- sends ----------------------------------------------------------------------------------------


class SendRequestFrames:
    """The frames of one producer group, topic and broker."""

    def __init__(self, header: SendMessage) -> None:
        self.code = RequestCode.SEND_BATCH_MESSAGE if header.batch else RequestCode.SEND_MESSAGE_V2
        self.header = replace(
            header, queue_id=0, sys_flag=0, born_timestamp=0, flag=0, properties=""
        )
        numbers = (b'"e":"', b'"f":"', b'"g":"', b'"h":"', b'"flag":', b'"opaque":')
        text = _template(request(self.code, self.header), *numbers)
        self.text = text.replace(b'"i":""', b'"i":%b')


@lru_cache(maxsize=16_384)
def send_request_frames(
    group: str,
    topic: str,
    broker: str,
    new_topic_queues: int,
    is_batch: bool,
    unit_mode: bool = False,
) -> SendRequestFrames:
    """Return the frames of messages or batches for a topic on a broker."""
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
            unit_mode=unit_mode,
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
        prefix = _PREFIX.pack(length, len(header))
        if len(body) <= _JOINED_BYTES_MAX:
            return [b"".join((prefix, header, body))]
        return [prefix + header, body]


class SendResponseFrames:
    """The responses of one broker to sends, for requests whose header is JSON."""

    def __init__(self, traits: ExtFields, store_host: Host) -> None:
        fields = SendMessageAnswer.fields_of(traits, "", 0, 0)
        sample = Command(ResponseCode.SUCCESS).answer(ResponseCode.SUCCESS, fields)
        text = _template(sample, b'"queueId":"', b'"queueOffset":"', b'"opaque":')
        # The position is the end of the id.
        host_id = offset_id(store_host, PhysicalOffset(0))[:-_POSITION_DIGITS].encode()
        self._text = text.replace(b'"msgId":""', b'"msgId":"%b%%016X"' % host_id)
        self._batch_text = text.replace(b'"msgId":""', b'"msgId":"%b"')
        self._store_host = store_host

    def frame(
        self, opaque: int, position: PhysicalOffset, queue_id: int, queue_offset: QueueOffset
    ) -> bytes:
        """Return the answer to a request: where its message is stored."""
        header = self._text % (position, queue_id, queue_offset, opaque)
        return _PREFIX.pack(len(header) + _HEADER_LENGTH_BYTES, len(header)) + header

    def batch_frame(
        self,
        opaque: int,
        positions: Sequence[PhysicalOffset],
        queue_id: int,
        queue_offset: QueueOffset,
    ) -> bytes:
        """Return the answer to a batch: where its messages are stored."""
        ids = offset_ids(self._store_host, positions).encode()
        header = self._batch_text % (ids, queue_id, queue_offset, opaque)
        return _PREFIX.pack(len(header) + _HEADER_LENGTH_BYTES, len(header)) + header


# --- pulls ----------------------------------------------------------------------------------------


class PullRequestFrames:
    """Pulls that are the same except for queue, offset and count."""

    def __init__(self, header: PullMessage) -> None:
        self._header = replace(header, queue_id=0, queue_offset=0, max_msg_nums=0)
        numbers = (b'"queueId":"', b'"queueOffset":"', b'"maxMsgNums":"', b'"opaque":')
        self._text = _template(self.command(0, 0, 0), *numbers)

    def command(self, queue_id: int, queue_offset: int, count_max: int) -> Command:
        """Return a request before encoding, for hooks that change it."""
        header = replace(
            self._header, queue_id=queue_id, queue_offset=queue_offset, max_msg_nums=count_max
        )
        return request(RequestCode.PULL_MESSAGE, header)

    def frame(self, opaque: int, queue_id: int, queue_offset: int, count_max: int) -> bytes:
        """Return a request, with its id, for up to ``count_max`` messages from an offset."""
        header = self._text % (queue_id, queue_offset, count_max, opaque)
        return _PREFIX.pack(len(header) + _HEADER_LENGTH_BYTES, len(header)) + header


class PullResponseFrames:
    """Responses to pulls up to their bodies, for requests whose header is JSON."""

    def __init__(self, code: ResponseCode, broker_id: int, remark: str) -> None:
        fields = PullMessageAnswer(
            suggest_which_broker_id=broker_id, next_begin_offset=0, min_offset=0, max_offset=0
        )
        sample = Command(code).answer(code, fields, remark=remark)
        offsets = (b'"nextBeginOffset":"', b'"minOffset":"', b'"maxOffset":"')
        self._text = _template(sample, *offsets, b'"opaque":')

    def frame(
        self, opaque: int, next_offset: int, min_offset: int, max_offset: int, body_bytes: int = 0
    ) -> bytes:
        """Return the answer to a request: the next offset, and the queue's minimum and maximum.

        ``body_bytes`` bytes of messages have to follow.
        """
        header = self._text % (next_offset, min_offset, max_offset, opaque)
        length = len(header) + _HEADER_LENGTH_BYTES + body_bytes
        return _PREFIX.pack(length, len(header)) + header
