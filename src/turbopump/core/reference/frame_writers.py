"""The bytes of the most frequent requests and responses: sends and pulls.

Numbers must fit into their fields: request ids, queue ids and flags into 32 bits, offsets and
timestamps into 64.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import msgspec

from turbopump.core.reference.frames import FLAG_RESPONSE, SendFrame
from turbopump.core.reference.headers import BINARY, JSON, LANGUAGES
from turbopump.core.reference.ids import offset_ids
from turbopump.errors import InvalidArgument

VERSION = 409
"""The version we announce: that of 4.9.8."""

FLAG_ONEWAY = 0b10

TEMPLATE_TOPIC = "TBW102"

Buffer = bytes | bytearray | memoryview

_LANGUAGE = LANGUAGES.index("PYTHON")
_JOINED_BYTES_MAX = 4 * 1024
"""Longer bodies are not copied into their frame."""
_FIXED = struct.Struct(">hbhiii")
_PREFIX = struct.Struct(">iI")


class SendTemplate:
    """The requests of one producer group, topic and broker with messages, or with batches."""

    def __init__(
        self,
        group: str,
        topic: str,
        broker: str | None,
        *,
        default_topic_queue_nums: int,
        is_batch: bool = False,
        unit_mode: bool = False,
        default_topic: str = TEMPLATE_TOPIC,
    ) -> None:
        self.code = 320 if is_batch else 310
        self._before = {"a": group, "b": topic, "c": default_topic}
        self._before |= {"d": str(default_topic_queue_nums)}
        self._after = {"j": "0", "k": _boolean(unit_mode), "m": _boolean(is_batch)}
        if broker is not None:
            self._after["n"] = broker
        # Names that are not UTF-8 fail here.
        _json_header(self.code, 0, 0, None, self._before | self._after)

    def frame(
        self,
        opaque: int,
        queue_id: int,
        sys_flag: int,
        born_ms: int,
        flag: int,
        properties: str | bytes,
        frame_flag: int,
        body: Buffer,
        frame_bytes_max: int,
    ) -> list[Buffer]:
        """Return a request in one piece, or in two if its body is long.

        ``properties`` as bytes must be UTF-8.
        """
        numbers = {"e": queue_id, "f": sys_flag, "g": born_ms, "h": flag}
        fields = self._before | {name: str(number) for name, number in numbers.items()}
        fields["i"] = _text(properties)
        header = _json_header(self.code, frame_flag, opaque, None, fields | self._after)
        length = 4 + len(header) + len(body)
        if length > frame_bytes_max:
            raise InvalidArgument(f"a frame must be at most {frame_bytes_max} bytes, got {length}")
        start = _PREFIX.pack(length, len(header)) + header
        return [start + bytes(body)] if len(body) <= _JOINED_BYTES_MAX else [start, body]


class SendResponses:
    """The responses of one broker to sends that are stored.

    ``traits`` are the fields that all its responses have; ``ip`` and ``port`` are those that
    messages name as their store.
    """

    def __init__(self, traits: Mapping[str, str], ip: bytes, port: int) -> None:
        self._traits = dict(traits)
        self._ip = ip
        self._port = port

    def frame(
        self, opaque: int, position: int, queue_id: int, queue_offset: int, serialize: int = JSON
    ) -> bytes:
        """Return the response to a request: where its message is stored."""
        return self.batch_frame(opaque, [position], queue_id, queue_offset, serialize)

    def batch_frame(
        self,
        opaque: int,
        positions: Sequence[int],
        queue_id: int,
        queue_offset: int,
        serialize: int = JSON,
    ) -> bytes:
        """Return the response to a batch: where its messages are stored."""
        fields = self._traits | {
            "msgId": offset_ids(self._ip, self._port, positions),
            "queueId": str(queue_id),
            "queueOffset": str(queue_offset),
        }
        return _response(serialize, 0, opaque, None, fields, 0)

    def frames(
        self,
        requests: Sequence[SendFrame],
        positions: Sequence[int | Sequence[int]],
        queue_ids: Sequence[int],
        queue_offsets: Sequence[int],
    ) -> bytes:
        """Return the responses to many requests, one after the other; one-way ones get none.

        A request's position is a number, or a sequence for the messages of a batch.
        """
        found = []
        places = zip(requests, positions, queue_ids, queue_offsets, strict=True)
        for request, at, queue_id, offset in places:
            if not request.flag & FLAG_ONEWAY:
                each = [at] if isinstance(at, int) else at
                opaque, serialize = request.opaque, request.serialize
                found.append(self.batch_frame(opaque, each, queue_id, offset, serialize))
        return b"".join(found)


class PullRequests:
    """Requests for messages that are the same except for queue, offset and count."""

    def __init__(
        self,
        group: str,
        topic: str,
        *,
        sys_flag: int,
        commit_offset: int,
        suspend_timeout_ms: int,
        subscription: str | None,
        sub_version: int,
        expression_type: str | None,
        bulk_pull: bool | None = None,
        broker: str | None = None,
    ) -> None:
        self._before = _present({"bname": broker, "consumerGroup": group, "topic": topic})
        self._after = _present(
            {
                "sysFlag": str(sys_flag),
                "commitOffset": str(commit_offset),
                "suspendTimeoutMillis": str(suspend_timeout_ms),
                "subscription": subscription,
                "subVersion": str(sub_version),
                "expressionType": expression_type,
                "bulkPull": None if bulk_pull is None else _boolean(bulk_pull),
            }
        )
        # Names that are not UTF-8 fail here.
        _json_header(11, 0, 0, None, self._before | self._after)

    def frame(self, opaque: int, queue_id: int, queue_offset: int, count_max: int) -> bytes:
        """Return a request for up to ``count_max`` messages from an offset."""
        fields = self._before | {
            "queueId": str(queue_id),
            "queueOffset": str(queue_offset),
            "maxMsgNums": str(count_max),
        }
        header = _json_header(11, 0, opaque, None, fields | self._after)
        return _PREFIX.pack(4 + len(header), len(header)) + header


class PullResponses:
    """Responses to pulls, up to their bodies."""

    def __init__(self, code: int, broker_id: int, remark: str | None) -> None:
        self._code = code
        self._broker_id = broker_id
        self._remark = remark
        # A remark that is not UTF-8 fails here.
        _json_header(code, 0, 0, remark, {})

    def frame(
        self,
        opaque: int,
        next_offset: int,
        min_offset: int,
        max_offset: int,
        body_bytes: int = 0,
        serialize: int = JSON,
    ) -> bytes:
        """Return a response: the next offset, and the queue's minimum and maximum.

        ``body_bytes`` bytes of messages have to follow.
        """
        fields = {
            "suggestWhichBrokerId": str(self._broker_id),
            "nextBeginOffset": str(next_offset),
            "minOffset": str(min_offset),
            "maxOffset": str(max_offset),
        }
        return _response(serialize, self._code, opaque, self._remark, fields, body_bytes)


def _boolean(value: bool) -> str:
    return "true" if value else "false"


def _present(fields: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in fields.items() if value is not None}


def _text(properties: str | bytes) -> str:
    try:
        if isinstance(properties, bytes):
            return properties.decode()
        properties.encode()
    except UnicodeError as error:
        raise InvalidArgument(f"tags, keys and properties must be UTF-8 text: {error}") from error
    return properties


def _response(
    serialize: int,
    code: int,
    opaque: int,
    remark: str | None,
    fields: Mapping[str, str],
    body_bytes: int,
) -> bytes:
    encode = _binary_header if serialize == BINARY else _json_header
    header = encode(code, FLAG_RESPONSE, opaque, remark, fields)
    mark = serialize << 24 | len(header)
    return _PREFIX.pack(4 + len(header) + body_bytes, mark) + header


def _json_header(
    code: int, flag: int, opaque: int, remark: str | None, fields: Mapping[str, str]
) -> bytes:
    """Return a header, its members in the order that Java writes them."""
    members: dict[str, object] = {
        "code": code,
        "extFields": fields,
        "flag": flag,
        "language": LANGUAGES[_LANGUAGE],
        "opaque": opaque,
        "remark": remark,
        "serializeTypeCurrentRPC": "JSON",
        "version": VERSION,
    }
    if remark is None:
        del members["remark"]
    return msgspec.json.encode(members)


def _binary_header(
    code: int, flag: int, opaque: int, remark: str | None, fields: Mapping[str, str]
) -> bytes:
    text = (remark or "").encode()
    entries = b"".join(_sized(name, 2) + _sized(value, 4) for name, value in fields.items())
    fixed = _FIXED.pack(code, _LANGUAGE, VERSION, opaque, flag, len(text))
    return fixed + text + len(entries).to_bytes(4, "big") + entries


def _sized(text: str, length_bytes: int) -> bytes:
    data = text.encode()
    return len(data).to_bytes(length_bytes, "big") + data
