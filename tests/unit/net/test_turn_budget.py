"""A peer that reads responses as fast as they are produced must not monopolise the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from turbopump.net.connection import Connection
from turbopump.net.deadlines import Deadlines
from turbopump.net.router import Handler, Router
from turbopump.net.turn_budget import WRITTEN_BYTES_MAX
from turbopump.testing import virtual_loop, virtual_time
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command
from turbopump.wire.framing import FrameDecoder, encode

BODY_BYTES = 256 * 1024
PER_TURN = WRITTEN_BYTES_MAX // BODY_BYTES
REQUESTS = 5 * PER_TURN


class Taking(asyncio.Transport):
    """Accepts everything that is written immediately."""

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


def answer(request: Command, peer: Connection) -> Command:
    return request.answer(0, body=bytes(BODY_BYTES))


def chunk(first: int, count: int = REQUESTS) -> bytes:
    return b"".join(
        encode(Command(1, opaque=100 + first + number, ext_fields={"a": "5"}))
        for number in range(count)
    )


def expected(count: int) -> list[int]:
    return list(range(100, 100 + count))


def connected(handler: Handler = answer) -> tuple[Connection, Taking]:
    connection = Connection(Router({1: handler}), Deadlines(virtual_loop().clock), accepted=True)
    transport = Taking()
    connection.connection_made(transport)
    return connection, transport


async def turns() -> None:
    """Run the loop until nothing is left to do."""
    await asyncio.sleep(0.001)


@virtual_time()
async def test_many_large_answers_take_several_turns() -> None:
    connection, transport = connected()
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


@virtual_time()
async def test_requests_that_arrive_in_between_are_answered_afterwards() -> None:
    connection, transport = connected()
    # The last request of the first chunk arrives in two parts.
    data = chunk(0) + chunk(REQUESTS, 3)
    for part in (data[: len(chunk(0)) - 7], data[len(chunk(0)) - 7 :]):
        connection.data_received(part)
    await turns()
    assert transport.opaques == expected(REQUESTS + 3)


@virtual_time()
async def test_a_turn_does_not_begin_while_the_peer_does_not_read() -> None:
    connection, transport = connected()
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
async def test_nothing_is_answered_after_the_connection_was_closed() -> None:
    connection, transport = connected()
    connection.data_received(chunk(0))
    connection.close()
    await turns()
    assert transport.opaques == expected(len(transport.answers))
    assert len(transport.answers) <= PER_TURN
    connection.connection_lost(None)


@virtual_time()
async def test_requests_that_wait_for_their_turn_are_rejected_when_draining() -> None:
    connection, transport = connected()
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
async def test_a_connection_lost_while_others_have_their_turn_is_drained_immediately() -> None:
    connection, _ = connected()
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
