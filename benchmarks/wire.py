"""Encoding and decoding of frames and records, compared with the simplest equivalent Python.

Run: ``python benchmarks/wire.py``. Only the ratio to the plain version within one run counts:
absolute figures depend on the machine and its load.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

from measure import per_second, print_table
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.wire import framing
from turbopump.wire.command import Command, request
from turbopump.wire.framing import FrameDecoder
from turbopump.wire.headers import SendMessageV2
from turbopump.wire.hosts import host
from turbopump.wire.record import Record, decode_records

COUNT = 200
BODY = b"x" * 128
HEADER = SendMessageV2(
    producer_group="orders-producer",
    topic="orders",
    default_topic="TBW102",
    default_topic_queue_nums=4,
    queue_id=2,
    sys_flag=0,
    born_timestamp=1_794_728_296_982,
    flag=0,
    properties="KEYS\x01order-42\x02TAGS\x01created\x02UNIQ_KEY\x017F00000147CE4E0E2F2A499A2CF90000",
    reconsume_times=0,
    unit_mode=False,
    batch=False,
)
SEND = request(310, HEADER, BODY)
FRAME = framing.encode(SEND)
STREAM = FRAME * COUNT
RECORD = Record(
    topic=b"orders",
    queue_id=2,
    body=BODY,
    properties=(HEADER.properties or "").encode(),
    born_timestamp_ms=1_794_728_296_982,
    born_host=host("10.20.30.40", 45818),
    store_host=host("10.20.30.41", 10911),
)
STORED = RECORD.encode(QueueOffset(5), PhysicalOffset(1000), 1_794_728_296_983)
RUN = STORED * 32


def frames_out() -> int:
    for _ in range(COUNT):
        framing.encode(SEND)
    return COUNT


def plain_frames_out() -> int:
    for _ in range(COUNT):
        header = json.dumps(
            {
                "code": SEND.code,
                "extFields": SEND.ext_fields,
                "flag": 0,
                "language": "PYTHON",
                "opaque": 0,
                "serializeTypeCurrentRPC": "JSON",
                "version": 409,
            },
            separators=(",", ":"),
        ).encode()
        struct.pack(">ii", 4 + len(header) + len(BODY), len(header)) + header + BODY
    return COUNT


def frames_in() -> int:
    return sum(1 for _ in FrameDecoder().feed(STREAM))


def plain_frames_in() -> int:
    at = count = 0
    while at < len(STREAM):
        length, header_length = struct.unpack_from(">ii", STREAM, at)
        json.loads(STREAM[at + 8 : at + 8 + header_length])
        bytes(STREAM[at + 8 + header_length : at + 4 + length])
        at += 4 + length
        count += 1
    return count


def headers_typed() -> int:
    fields = SEND.ext_fields
    for _ in range(COUNT):
        SendMessageV2.from_ext_fields(fields)
    return COUNT


def plain_headers_typed() -> int:
    fields = SEND.ext_fields or {}
    whole = set("defghj")
    for _ in range(COUNT):
        found: dict[str, Any] = {
            name: int(text) if name in whole else text for name, text in fields.items()
        }
        found["m"] = found["m"] == "true"
    return COUNT


def records_out() -> int:
    for _ in range(COUNT):
        RECORD.encode(QueueOffset(5), PhysicalOffset(1000), 1_794_728_296_983)
    return COUNT


def plain_records_out() -> int:
    topic, text = RECORD.topic, RECORD.properties
    for _ in range(COUNT):
        out = bytearray()
        out += struct.pack(">iIi", len(STORED), 0xDAA320A7, zlib.crc32(BODY) & 0x7FFFFFFF)
        out += struct.pack(">iiqqi", 2, 0, 5, 1000, 0)
        out += struct.pack(">q4si", 1_794_728_296_982, b"\x0a\x14\x1e\x28", 45818)
        out += struct.pack(">q4si", 1_794_728_296_983, b"\x0a\x14\x1e\x29", 10911)
        out += struct.pack(">iqi", 0, 0, len(BODY)) + BODY
        out += struct.pack(">b", len(topic)) + topic + struct.pack(">h", len(text)) + text
        bytes(out)
    return COUNT


def records_in() -> int:
    return sum(1 for _ in decode_records(RUN))


def plain_records_in() -> int:
    at = count = 0
    while at < len(RUN):
        (size,) = struct.unpack_from(">i", RUN, at)
        struct.unpack_from(">iIiiiqqiq4siq4siiq", RUN, at)
        body_at = at + 88
        (length,) = struct.unpack_from(">i", RUN, body_at - 4)
        bytes(RUN[body_at : body_at + length])
        topic_at = body_at + length + 1
        topic_end = topic_at + RUN[topic_at - 1]
        RUN[topic_at:topic_end].decode()
        text = RUN[topic_end + 2 : at + size].decode()
        dict(entry.split("\x01", 1) for entry in text.split("\x02"))
        at += size
        count += 1
    return count


def round_trip() -> int:
    answer = Command(code=0, flag=1, ext_fields={"msgId": "m", "queueId": "0", "queueOffset": "5"})
    for command in FrameDecoder().feed(STREAM):
        SendMessageV2.from_ext_fields(command.ext_fields)
        framing.encode(answer)
    return COUNT


CASES: list[tuple[str, Callable[[], int], Callable[[], int] | None]] = [
    ("frames written", frames_out, plain_frames_out),
    ("frames read", frames_in, plain_frames_in),
    ("headers given their types", headers_typed, plain_headers_typed),
    ("records written", records_out, plain_records_out),
    ("records read", records_in, plain_records_in),
    ("request read, typed, answered", round_trip, None),
]


def main() -> None:
    rows = []
    for name, action, plain in CASES:
        rate = per_second(action)
        ratio = f"{rate / per_second(plain):.1f}" if plain else ""
        rows.append([name, f"{rate:,.0f}", f"{1e6 / rate:.2f}", ratio])
    print_table(["send of 128 bytes", "per second", "µs each", "times the plain version"], rows)


if __name__ == "__main__":
    main()
