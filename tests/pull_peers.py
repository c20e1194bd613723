"""A peer with scripted answers to pulls, and what a task reads from it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from random import Random
from typing import Any

from turbopump.clock import SYSTEM_CLOCK
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.net.blocking_connection import BlockingConnection
from turbopump.net.blocking_pool import BlockingPool
from turbopump.net.limits import DEFAULT_LIMITS
from turbopump.net.request_protocol import Request, RequestHook, RequestProtocol
from turbopump.net.sockets import SocketNetwork
from turbopump.spark.reading.blocking_pull import BlockingPull
from turbopump.spark.reading.options import Pulling
from turbopump.spark.reading.partition_planner import QueueRange
from turbopump.spark.reading.partition_reader import whole_table
from turbopump.spark.records.arrow_arrays import cells
from turbopump.spark.records.record_columns import RecordColumns
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command
from turbopump.wire.framing import FrameDecoder, encode
from turbopump.wire.headers import PullMessage, PullMessageAnswer
from turbopump.wire.hosts import host
from turbopump.wire.record import Record

COUNT = 500
JOIN_S = 10.0


def stored(offset: int) -> bytes:
    record = Record(
        topic=b"T",
        queue_id=0,
        body=b"%d" % offset * (1 + offset % 40),
        properties=b"KEYS\x01k%d" % offset,
        born_timestamp_ms=1,
        born_host=host("127.0.0.1", 1),
        store_host=host("127.0.0.1", 2),
    )
    return record.encode(QueueOffset(offset), PhysicalOffset(1000 * offset), 2)


RECORDS = [stored(offset) for offset in range(COUNT)]

Replies = Callable[[list[Command]], list[bytes] | None]
"""Returns the frames that answer a request; None closes the connection."""


def offset_of(asked: Command) -> int:
    """Return the offset that a pull starts at."""
    return int(PullMessage.from_ext_fields(asked.ext_fields).queue_offset)


def found(
    asked: Command, count_max: int = 32, bytes_max: int = 1 << 20, *, is_generous: bool = False
) -> Command:
    """Answer as a broker does, within its own limits; a generous one ignores the client's."""
    header = PullMessage.from_ext_fields(asked.ext_fields)
    offset = int(header.queue_offset)
    records: list[bytes] = []
    count = count_max if is_generous else min(count_max, header.max_msg_nums)
    for record in RECORDS[offset : offset + count]:
        if records and sum(map(len, records)) + len(record) > bytes_max:
            break
        records.append(record)
    place = PullMessageAnswer(
        suggest_which_broker_id=0,
        next_begin_offset=offset + len(records),
        min_offset=0,
        max_offset=COUNT,
    )
    return asked.answer(ResponseCode.SUCCESS, place, body=b"".join(records))


def matching(
    asked: Command,
    every: int,
    scanned_max: int = 60,
    min_offset: int = 0,
    remark: str = "NO_MATCHED_MESSAGE",
) -> Command:
    """Answer like a filtering broker: offsets divisible by ``every`` match."""
    header = PullMessage.from_ext_fields(asked.ext_fields)
    at = int(header.queue_offset)
    records: list[bytes] = []
    for offset in range(at, min(at + scanned_max, COUNT)):
        if len(records) == header.max_msg_nums:
            break
        at = offset + 1
        if not offset % every:
            records.append(RECORDS[offset])
    place = PullMessageAnswer(
        suggest_which_broker_id=0, next_begin_offset=at, min_offset=min_offset, max_offset=COUNT
    )
    if not records:
        code = ResponseCode.PULL_RETRY_IMMEDIATELY
        return asked.answer(code, place, remark=remark)
    return asked.answer(ResponseCode.SUCCESS, place, body=b"".join(records))


def in_order(asked: list[Command]) -> list[bytes]:
    return [encode(found(each)) for each in asked]


@contextmanager
def peer(
    replies: Replies, piece_bytes: int = 1 << 20, hooks: Sequence[RequestHook] = ()
) -> Iterator[BlockingConnection]:
    """Run a peer in a thread at the other end of the connection."""
    near, far = socket.socketpair()

    def serve() -> None:
        decoder = FrameDecoder()
        # The reader closes the connection when it has enough, with answers still in flight.
        with far, suppress(ConnectionError):
            while data := far.recv(1 << 20):
                answer = replies(list(decoder.feed(data)))
                if answer is None:
                    return
                whole = b"".join(answer)
                for at in range(0, len(whole), piece_bytes):
                    far.sendall(whole[at : at + piece_bytes])

    thread = threading.Thread(target=serve)
    thread.start()
    protocol = RequestProtocol[Request](SYSTEM_CLOCK, DEFAULT_LIMITS, hooks)
    connection = BlockingConnection("peer", near, protocol)
    try:
        yield connection
    finally:
        connection.close()
        thread.join(JOIN_S)
        assert not thread.is_alive()


def pull_of(
    connection: BlockingConnection,
    start: int = 0,
    end: int = COUNT,
    *,
    follows_suggestions: bool = True,
    **options: Any,
) -> BlockingPull:
    of = QueueRange("T", "a", 0, start, end)
    return pull_of_ranges(connection, [of], follows_suggestions=follows_suggestions, **options)


def pull_of_ranges(
    connection: BlockingConnection,
    ranges: list[QueueRange],
    *,
    follows_suggestions: bool = True,
    **options: Any,
) -> BlockingPull:
    header = PullMessage(
        consumer_group="g",
        topic="T",
        queue_id=0,
        queue_offset=0,
        max_msg_nums=0,
        sys_flag=0,
        commit_offset=0,
        suspend_timeout_millis=0,
        subscription="*",
        sub_version=0,
        expression_type="TAG",
    )
    return BlockingPull(
        connection,
        ranges,
        {"T": header},
        Pulling(**options),
        BlockingPool(SocketNetwork()),
        follows_suggestions=follows_suggestions,
    )


def rows_of(pull: BlockingPull) -> list[tuple[int, bytes]]:
    """Return the rows read, from the columns of each chunk."""
    columns = RecordColumns(["queueOffset", "body"])
    rows: list[tuple[int, bytes]] = []
    while (chunk := pull.next_chunk()) is not None:
        run = whole_table(chunk)
        assert run is not None
        for batch in columns.batches_of(run, broker="a"):
            offsets, bodies = map(cells, batch.columns)
            rows += zip(offsets, bodies, strict=True)
    pull.close()
    return rows


def expected(start: int, end: int) -> list[tuple[int, bytes]]:
    return [(offset, b"%d" % offset * (1 + offset % 40)) for offset in range(start, end)]


def several(count: int = 60) -> list[QueueRange]:
    """Return ranges, most of them small."""
    sizes = Random(7).choices([1, 2, 3, 45], [9, 9, 9, 1], k=count)
    starts = Random(8).sample(range(COUNT - 45), count)
    return [QueueRange("T", "a", 0, at, at + n) for at, n in zip(starts, sizes, strict=True)]


def rows_in(ranges: list[QueueRange]) -> list[tuple[int, bytes]]:
    return [row for each in ranges for row in expected(each.start, each.end)]
