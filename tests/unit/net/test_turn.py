"""A peer that takes answers as fast as they are made must not keep the loop to itself."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from turbopump.net.connection import Connection
from turbopump.net.deadlines import Deadlines
from turbopump.net.router import Router
from turbopump.net.turn import WRITTEN_BYTES_MAX
from turbopump.testing import virtual_loop, virtual_time
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command
from turbopump.wire.frame_template import Numbers, VaryingFields
from turbopump.wire.framing import FrameDecoder, decode, encode

BODY_BYTES = 256 * 1024
PER_TURN = WRITTEN_BYTES_MAX // BODY_BYTES
REQUESTS = 5 * PER_TURN
VARYING = VaryingFields(
    (re.compile(rb'"opaque":([0-9]+)'), re.compile(rb'"a":"([0-9]+)')),
    lambda frame: (decode(frame).opaque, int((decode(frame).ext_fields or {})["a"])),
)


class Taking(asyncio.Transport):
    """Takes all that is written at once."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Command] = []
        self.is_read = True
        self.is_closed = False
        self._decoder = FrameDecoder()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.answers += self._decoder.feed(bytes(data))

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.is_closed = True

    @property
    def opaques(self) -> list[int]:
        return [answer.opaque for answer in self.answers]


def one_by_one(request: Command, peer: Connection) -> Command:
    return request.answer(0, body=bytes(BODY_BYTES))


def in_rows(request: Command, peer: Connection) -> None:
    """Answer a request, and those behind it that are like it."""
    peer.answer(request, request.answer(0, body=bytes(BODY_BYTES)))

    def serve(asked: Iterator[Numbers], _: int) -> int:
        opaque = next((number for number, _ in asked), None)
        if opaque is None:
            return 0
        answer = Command(1, opaque=opaque).answer(0, body=bytes(BODY_BYTES))
        peer.row.answer([encode(answer)], 1)
        return 1

    if peer.row.is_followed:
        peer.row.begin(VARYING, serve)


HANDLERS = pytest.mark.parametrize("handler", [one_by_one, in_rows])


def chunk(first: int, count: int = REQUESTS) -> bytes:
    return b"".join(
        encode(Command(1, opaque=100 + first + number, ext_fields={"a": "5"}))
        for number in range(count)
    )


def expected(count: int) -> list[int]:
    return list(range(100, 100 + count))


def connected(handler: Any) -> tuple[Connection, Taking]:
    connection = Connection(Router({1: handler}), Deadlines(virtual_loop().clock), accepted=True)
    transport = Taking()
    connection.connection_made(transport)
    return connection, transport


async def turns() -> None:
    """Let the loop go on until nothing is left to do."""
    await asyncio.sleep(0.001)


@HANDLERS
@virtual_time()
async def test_many_large_answers_take_several_turns(handler: Any) -> None:
    connection, transport = connected(handler)
    counts: list[int] = []

    def look() -> None:
        counts.append(len(transport.answers))
        if counts[-1] < REQUESTS:
            virtual_loop().call_soon(look)

    connection.data_received(chunk(0))
    assert not transport.is_read
    look()
    await turns()
    assert all(after - before <= PER_TURN for before, after in pairwise(counts))
    assert counts[0] <= PER_TURN
    assert transport.opaques == expected(REQUESTS)
    assert transport.is_read


@HANDLERS
@virtual_time()
async def test_what_comes_meanwhile_is_answered_behind_it(handler: Any) -> None:
    connection, transport = connected(handler)
    # The last request of the first chunk comes in two.
    data = chunk(0) + chunk(REQUESTS, 3)
    for part in (data[: len(chunk(0)) - 7], data[len(chunk(0)) - 7 :]):
        connection.data_received(part)
    await turns()
    assert transport.opaques == expected(REQUESTS + 3)


@HANDLERS
@virtual_time()
async def test_a_turn_does_not_begin_while_the_peer_does_not_read(handler: Any) -> None:
    connection, transport = connected(handler)
    connection.data_received(chunk(0))
    connection.pause_writing()
    await turns()
    assert len(transport.answers) <= PER_TURN
    assert not transport.is_read
    connection.resume_writing()
    await turns()
    assert transport.opaques == expected(REQUESTS)
    assert transport.is_read


@virtual_time()
async def test_a_row_does_not_outlive_its_turn() -> None:
    is_refused = False

    def changing(request: Command, peer: Connection) -> Command | None:
        if is_refused:
            return request.answer(5)
        in_rows(request, peer)
        return None

    connection, transport = connected(changing)
    connection.data_received(chunk(0))
    served = len(transport.answers)
    is_refused = True
    await turns()
    assert transport.opaques == expected(REQUESTS)
    assert [each.code for each in transport.answers] == [0] * served + [5] * (REQUESTS - served)


@HANDLERS
@virtual_time()
async def test_nothing_is_answered_after_the_connection_was_closed(handler: Any) -> None:
    connection, transport = connected(handler)
    connection.data_received(chunk(0))
    connection.close()
    await turns()
    assert transport.opaques == expected(len(transport.answers))
    assert len(transport.answers) <= PER_TURN
    connection.connection_lost(None)


@HANDLERS
@virtual_time()
async def test_requests_that_wait_for_their_turn_are_refused_when_it_is_drained(
    handler: Any,
) -> None:
    connection, transport = connected(handler)
    connection.data_received(chunk(0))
    served = len(transport.answers)
    drained = asyncio.create_task(connection.drain(1000))
    await turns()
    assert transport.is_closed
    connection.connection_lost(None)
    await drained
    assert transport.opaques == expected(REQUESTS)
    refused = [each.code for each in transport.answers[served:]]
    assert refused == [ResponseCode.SERVICE_NOT_AVAILABLE] * (REQUESTS - served)


@virtual_time()
async def test_who_is_lost_while_others_have_their_turn_is_drained_at_once() -> None:
    connection, _ = connected(one_by_one)
    connection.data_received(chunk(0))
    drained = asyncio.create_task(connection.drain(1000))
    await asyncio.sleep(0)
    connection.connection_lost(None)
    await drained
    assert virtual_loop().time() < 0.5


@virtual_time()
async def test_small_answers_stay_in_one_turn() -> None:
    connection, transport = connected(lambda request, _: request.answer(0))
    connection.data_received(chunk(0))
    assert transport.opaques == expected(REQUESTS)
    assert transport.is_read
