"""Cutting a byte stream into frames, and reading the headers of the most frequent ones.

A frame is a length, the header's length and encoding, the header, the body.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from turbopump.core.reference.headers import Fields, Header, read_header
from turbopump.errors import FrameError, WireError

Buffer = bytes | bytearray | memoryview

FRAME_BYTES_MAX = 16 * 1024 * 1024

HEADER_BYTES_MAX = 1024 * 1024
"""Far more than the 32 kB of properties that a message may have, however they are escaped."""

FLAG_RESPONSE = 0b01

_LENGTH_BYTES = 4
_PREFIX_BYTES = 8
_HEADER_LENGTH_BITS = 0xFF_FFFF
_LARGE_BYTES = 65536
"""Bodies of this size or more are not copied; callers that keep one for long should copy it."""

_SEND_CODES = {310, 320}
_PULL_CODE = 11


class Frame(Struct, frozen=True, kw_only=True):
    """A frame whose header is not interpreted.

    ``position`` is where its header begins in the stream; errors in the header count from there.
    """

    serialize: int
    position: int
    header: bytes
    body: bytes | memoryview

    @property
    def body_length(self) -> int:
        """The size of the body, without creating it."""
        return len(self.body)


class TypedFrame(Frame, frozen=True, kw_only=True):
    """A frame whose header has the ordinary form; ``language`` is None if it is not known."""

    code: int
    flag: int
    opaque: int
    language: int | None
    version: int
    remark: str | None


class SendFrame(TypedFrame, frozen=True, kw_only=True):
    """A request with a message or a batch (codes 310 and 320).

    Missing fields are empty, 0 or False, as brokers read them, except those that may be None.
    """

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: int
    queue_id: int
    sys_flag: int
    born_timestamp: int
    message_flag: int
    properties: bytes
    reconsume_times: int
    unit_mode: bool
    max_reconsume_times: int | None
    batch: bool
    broker_name: str | None


class PullFrame(TypedFrame, frozen=True, kw_only=True):
    """A request for messages (code 11)."""

    consumer_group: str
    topic: str
    queue_id: int
    queue_offset: int
    max_msg_nums: int
    sys_flag: int
    commit_offset: int
    suspend_timeout_millis: int
    subscription: str | None
    sub_version: int
    expression_type: str | None
    bulk_pull: bool | None
    broker_name: str | None


class SendResponseFrame(TypedFrame, frozen=True, kw_only=True):
    """The answer to a send whose message is stored."""

    msg_id: str
    queue_id: int
    queue_offset: int
    transaction_id: str | None
    region: str | None
    trace_on: bool | None


class PullResponseFrame(TypedFrame, frozen=True, kw_only=True):
    """The answer to a pull: the next offset, and the queue's minimum and maximum offset."""

    suggest_which_broker_id: int
    next_begin_offset: int
    min_offset: int
    max_offset: int


class FrameDecoder:
    """Splits a byte stream into frames, however it is chunked.

    ``typed_requests`` and ``typed_responses`` say whose headers are read; all other frames, and
    those with a header of an unusual form, are plain ones. Holds at most one frame and the last
    chunk. After an error the stream cannot be followed further, and every later call raises the
    same error.
    """

    def __init__(
        self,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        *,
        typed_requests: bool = False,
        typed_responses: bool = False,
    ) -> None:
        self.frame_bytes_max = frame_bytes_max
        self.typed_requests = typed_requests
        self.typed_responses = typed_responses
        self._pending = bytearray()
        self._missing = 0
        self._consumed = 0
        self._error: WireError | None = None
        # The chunk being read, and where its next frame begins.
        self._chunk = b""
        self._next_at = 0

    @property
    def pending_bytes(self) -> int:
        """Bytes received of an incomplete frame."""
        return len(self._pending)

    @property
    def held_bytes(self) -> int:
        """Bytes received of frames that are incomplete or not taken yet."""
        return len(self._pending) + len(self._chunk) - self._next_at

    def clear(self) -> None:
        """Free all buffers; the decoder cannot be used afterwards."""
        self._pending = bytearray()
        self._chunk, self._next_at = b"", 0

    def feed(self, chunk: bytes) -> Iterator[Frame]:
        """Yield the frames that the chunk completes; exhaust it before the next chunk.

        Errors count their position from the start of the stream.
        """
        if self._error is not None:
            raise self._error
        at = 0
        if self._pending and not self._missing:
            chunk = bytes(self._pending + chunk)
            self._pending.clear()
        try:
            if self._pending:
                at = self._missing - len(self._pending)
                if at > len(chunk):
                    self._pending += chunk
                    return
                frame = self._begun(chunk, at)
                self._chunk, self._next_at = chunk, at
                yield frame
            end = len(chunk)
            while end - at >= _LENGTH_BYTES:
                length = int.from_bytes(chunk[at : at + _LENGTH_BYTES], "big", signed=True)
                if not _LENGTH_BYTES <= length <= self.frame_bytes_max:
                    wrong = f"a frame must be 4 to {self.frame_bytes_max} bytes, got {length}"
                    raise FrameError(wrong, self._consumed + at)
                frame_end = at + _LENGTH_BYTES + length
                if frame_end > end:
                    break
                frame = self._frame(chunk, at, frame_end)
                self._chunk, self._next_at = chunk, frame_end
                yield frame
                at = frame_end
        except WireError as error:
            self._error = error
            self._chunk, self._next_at = b"", 0
            raise
        self._chunk, self._next_at = b"", 0
        self._keep(chunk, at)

    def _begun(self, chunk: bytes, end: int) -> Frame:
        """Finish the frame that earlier chunks began; the rest of this one is not copied."""
        data = self._pending
        data += memoryview(chunk)[:end]
        self._pending = bytearray()
        whole = bytes(data) if len(data) < _LARGE_BYTES else memoryview(data)
        frame = self._frame(whole, 0, len(data))
        # What follows counts from the start of its chunk.
        self._consumed += len(data) - end
        return frame

    def _frame(self, data: bytes | memoryview, at: int, end: int) -> Frame:
        """Read the frame between two positions of a chunk."""
        mark_at, header_at = at + _LENGTH_BYTES, at + _PREFIX_BYTES
        mark = int.from_bytes(data[mark_at:header_at], "big")
        header_end = header_at + (mark & _HEADER_LENGTH_BITS)
        if header_end > end or header_end - header_at > HEADER_BYTES_MAX:
            raise wrong_header(at, header_end, end).shifted(self._consumed)
        is_large = end - header_end >= _LARGE_BYTES
        frame = Frame(
            serialize=mark >> 24,
            position=self._consumed + header_at,
            header=bytes(data[header_at:header_end]),
            body=memoryview(data)[header_end:end] if is_large else bytes(data[header_end:end]),
        )
        return self._typed(frame)

    def _typed(self, frame: Frame) -> Frame:
        if not (self.typed_requests or self.typed_responses):
            return frame
        header = read_header(frame.header, frame.serialize)
        if header is None:
            return frame
        if header.flag & FLAG_RESPONSE:
            return (typed_response(frame, header) if self.typed_responses else None) or frame
        return (typed_request(frame, header) if self.typed_requests else None) or frame

    def _keep(self, data: bytes, at: int) -> None:
        """Keep the rest of the chunk until the rest of its frame arrives."""
        rest = memoryview(data)[at:]
        self._consumed += at
        self._pending += rest
        known = len(rest) >= _LENGTH_BYTES
        # Known once the length word is complete; until then any byte may complete it.
        self._missing = _LENGTH_BYTES + int.from_bytes(rest[:_LENGTH_BYTES], "big") if known else 0


def read_response(data: Buffer, at: int, end: int) -> tuple[Frame, int, int] | int:
    """Read the frame at a position of a buffer, and return it with the positions of its body.

    The frame itself has no body. While it is incomplete, returns where it will end, as far as
    known. Raises FrameError, with the position in the buffer.
    """
    if not 0 <= at <= end <= len(data):
        raise ValueError(f"no frame between {at} and {end} of {len(data)} bytes")
    if end - at < _PREFIX_BYTES:
        return at + _PREFIX_BYTES
    length = int.from_bytes(data[at : at + _LENGTH_BYTES], "big", signed=True)
    if not _LENGTH_BYTES <= length <= FRAME_BYTES_MAX:
        raise FrameError(f"a frame must be 4 to {FRAME_BYTES_MAX} bytes, got {length}", at)
    frame_end, header_at = at + _LENGTH_BYTES + length, at + _PREFIX_BYTES
    mark = int.from_bytes(data[at + _LENGTH_BYTES : header_at], "big")
    header_end = header_at + (mark & _HEADER_LENGTH_BITS)
    if header_end > frame_end or header_end - header_at > HEADER_BYTES_MAX:
        raise wrong_header(at, header_end, frame_end)
    if frame_end > end:
        return frame_end
    frame = Frame(
        serialize=mark >> 24,
        position=header_at,
        header=bytes(data[header_at:header_end]),
        body=b"",
    )
    header = read_header(frame.header, frame.serialize)
    if header is not None and header.flag & FLAG_RESPONSE:
        frame = typed_response(frame, header) or frame
    return frame, header_end, frame_end


def wrong_header(at: int, header_end: int, frame_end: int) -> FrameError:
    """Return the error of a frame whose header is too long, by positions in its chunk."""
    length, place = header_end - at - _PREFIX_BYTES, at + _LENGTH_BYTES
    if header_end > frame_end:
        return FrameError(f"header of {length} bytes in a frame of {frame_end - at - 4}", place)
    return FrameError(f"header must be at most {HEADER_BYTES_MAX} bytes, got {length}", place)


# --- headers of sends and pulls -------------------------------------------------------------------


def typed_request(frame: Frame, header: Header) -> TypedFrame | None:
    """Return a send or a pull; None if it is another request, or its fields are unusual."""
    fields = header.fields
    if header.code in _SEND_CODES:
        return _send(frame, header, fields) if fields.are_within(_SEND_FIELDS) else None
    if header.code == _PULL_CODE:
        return _pull(frame, header, fields) if fields.are_within(_PULL_FIELDS) else None
    return None


def typed_response(frame: Frame, header: Header) -> TypedFrame | None:
    """Return the answer to a send or a pull; None if it is another one, or unusual."""
    fields = header.fields
    if "msgId" in fields:
        return _send_response(frame, header, fields) if fields.are_within(_SENT_FIELDS) else None
    return _pull_response(frame, header, fields) if fields.are_within(_PULLED_FIELDS) else None


_IGNORED_FIELD = "ReqT"
"""Says how a Java consumer receives messages; nothing depends on it."""
_SEND_FIELDS = {*"abcdefghijklmn", _IGNORED_FIELD}
_PULL_FIELDS = {
    _IGNORED_FIELD,
    *("consumerGroup", "topic", "queueId", "queueOffset", "maxMsgNums", "sysFlag", "commitOffset"),
    *("suspendTimeoutMillis", "subscription", "subVersion", "expressionType", "bulkPull", "bname"),
}
_SENT_FIELDS = {"msgId", "queueId", "queueOffset", "transactionId", "MSG_REGION", "TRACE_ON"}
_PULLED_FIELDS = {"suggestWhichBrokerId", "nextBeginOffset", "minOffset", "maxOffset"}


def _send(frame: Frame, header: Header, fields: Fields) -> SendFrame | None:
    try:
        return SendFrame(
            **_common(frame, header),
            producer_group=fields.text("a"),
            topic=fields.text("b"),
            default_topic=fields.text("c"),
            default_topic_queue_nums=fields.i32("d"),
            queue_id=fields.i32("e"),
            sys_flag=fields.i32("f"),
            born_timestamp=fields.i64("g"),
            message_flag=fields.i32("h"),
            properties=(fields.optional_text("i") or "").encode(),
            reconsume_times=fields.optional_i32("j") or 0,
            unit_mode=fields.optional_boolean("k") or False,
            max_reconsume_times=fields.optional_i32("l"),
            batch=fields.optional_boolean("m") or False,
            broker_name=fields.optional_text("n"),
        )
    except ValueError:
        return None


def _pull(frame: Frame, header: Header, fields: Fields) -> PullFrame | None:
    try:
        return PullFrame(
            **_common(frame, header),
            consumer_group=fields.text("consumerGroup"),
            topic=fields.text("topic"),
            queue_id=fields.i32("queueId"),
            queue_offset=fields.i64("queueOffset"),
            max_msg_nums=fields.i32("maxMsgNums"),
            sys_flag=fields.i32("sysFlag"),
            commit_offset=fields.i64("commitOffset"),
            suspend_timeout_millis=fields.i64("suspendTimeoutMillis"),
            subscription=fields.optional_text("subscription"),
            sub_version=fields.i64("subVersion"),
            expression_type=fields.optional_text("expressionType"),
            bulk_pull=fields.optional_boolean("bulkPull"),
            broker_name=fields.optional_text("bname"),
        )
    except ValueError:
        return None


def _send_response(frame: Frame, header: Header, fields: Fields) -> SendResponseFrame | None:
    try:
        return SendResponseFrame(
            **_common(frame, header),
            msg_id=fields.text("msgId"),
            queue_id=fields.i32("queueId"),
            queue_offset=fields.i64("queueOffset"),
            transaction_id=fields.optional_text("transactionId"),
            region=fields.optional_text("MSG_REGION"),
            trace_on=fields.optional_boolean("TRACE_ON"),
        )
    except ValueError:
        return None


def _pull_response(frame: Frame, header: Header, fields: Fields) -> PullResponseFrame | None:
    try:
        return PullResponseFrame(
            **_common(frame, header),
            suggest_which_broker_id=fields.i64("suggestWhichBrokerId"),
            next_begin_offset=fields.i64("nextBeginOffset"),
            min_offset=fields.i64("minOffset"),
            max_offset=fields.i64("maxOffset"),
        )
    except ValueError:
        return None


def _common(frame: Frame, header: Header) -> dict[str, Any]:
    return {
        "serialize": frame.serialize,
        "position": frame.position,
        "header": frame.header,
        "body": frame.body,
        "code": header.code,
        "flag": header.flag,
        "opaque": header.opaque,
        "language": header.language,
        "version": header.version,
        "remark": header.remark,
    }
