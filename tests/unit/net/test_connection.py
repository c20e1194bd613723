from __future__ import annotations

import asyncio
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netkit import ECHO, FAIL, NEVER, SLOW, body_bytes, in_flight, slow, slow_echo, world
from turbopump.errors import ConnectionLost, InvalidArgument, Overloaded, RequestTimeout
from turbopump.net.connection import Connection
from turbopump.net.limits import ConnectionLimits
from turbopump.net.router import Router
from turbopump.testing import LinkQuality, run_virtual, virtual_loop, virtual_time, wait_until
from turbopump.wire.command import FLAG_ONEWAY, Buffer, Command
from turbopump.wire.framing import encode


@virtual_time()
async def test_a_request_gets_its_response() -> None:
    async with world() as here:
        connection = await here.connect()
        answer = await connection.request(Command(ECHO, body=b"hello"), 1000)
        assert (answer.code, answer.body) == (0, b"hello")
        assert len(in_flight(connection)) == 0
        assert connection.peer_address == here.server.address
        assert here.accepted.peer_address == connection.local_address


@settings(max_examples=20)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=30), st.integers(0, 1000))
def test_responses_are_matched_to_requests_in_any_order(delays: list[int], seed: int) -> None:
    async def main() -> None:
        async with world(quality=LinkQuality(jitter=0.02, cut_chance=0.8)) as here:
            connection = await here.connect()
            calls = [slow(ms, str(i).encode()) for i, ms in enumerate(delays)]
            answers = await asyncio.gather(*(connection.request(call, 5000) for call in calls))
            assert [answer.body for answer in answers] == [call.body for call in calls]

    run_virtual(main(), seed)


@virtual_time()
async def test_both_sides_send_requests_with_the_same_numbers() -> None:
    """The broker's pushes and the client's requests both count from 0 and must not be mixed up."""
    pushed: list[bytes] = []

    async def ask_back(request: Command, peer: Connection) -> Command:
        answer = await peer.request(Command(SLOW, ext_fields={"ms": "30"}, body=request.body), 1000)
        pushed.append(body_bytes(answer))
        return request.answer(0, body=b"outer " + body_bytes(answer))

    async def prefixed(request: Command, peer: Connection) -> Command:
        answer = await slow_echo(request, peer)
        return request.answer(0, body=b"inner " + body_bytes(answer))

    async with world(Router({1: ask_back})) as here:
        connection = await here.connect(Router({SLOW: prefixed}))
        calls = (connection.request(Command(1, body=bytes([i])), 1000) for i in range(20))
        answers = await asyncio.gather(*calls)
        assert [answer.body for answer in answers] == [
            b"outer inner " + bytes([i]) for i in range(20)
        ]
        assert sorted(pushed) == [b"inner " + bytes([i]) for i in range(20)]


@pytest.mark.parametrize("opaque", [0, 1, -1, 2**31 - 1, -(2**31)])
@virtual_time()
async def test_any_number_of_a_peer_is_echoed(opaque: int) -> None:
    async with world() as here:
        raw = await here.connect_raw()
        raw.transport.write(encode(Command(ECHO, opaque=opaque)))
        await wait_until(lambda: raw.received)
        assert f'"opaque":{opaque},'.encode() in raw.received


@virtual_time()
async def test_numbers_wrap_around_and_skip_those_in_use() -> None:
    async with world() as here:
        connection = await here.connect()
        connection._protocol._next_opaque = 2**31 - 2
        calls = [asyncio.create_task(connection.request(slow(500), 1000)) for _ in range(4)]
        await asyncio.sleep(0.01)
        assert sorted(in_flight(connection)) == [0, 1, 2**31 - 2, 2**31 - 1]
        connection._protocol._next_opaque = 0
        await connection.request(Command(ECHO), 1000)
        assert connection._protocol._next_opaque == 3
        await asyncio.gather(*calls)


@virtual_time()
async def test_an_unexpected_response_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "turbopump.net")
    async with world() as here:
        connection = await here.connect()
        here.accepted._send(Command(0, flag=1, opaque=77))
        await asyncio.sleep(0.1)
        assert connection.is_open
        assert "answer to unknown request 77 dropped" in caplog.text


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_ms", [1, 20, 49, 50, 51, 3000, 3_600_000])
@virtual_time()
async def test_a_request_without_answer_times_out_never_early(timeout_ms: int) -> None:
    async with world(limits=ConnectionLimits(idle_ms=10_000_000)) as here:
        connection = await here.connect(limits=ConnectionLimits(idle_ms=10_000_000))
        start_ms = here.clock.monotonic_ms()
        with pytest.raises(RequestTimeout, match=f"request 12 of server:.* within {timeout_ms} ms"):
            await connection.request(Command(NEVER), timeout_ms)
        assert timeout_ms < here.clock.monotonic_ms() - start_ms <= timeout_ms + 51
        assert len(in_flight(connection)) == 0
        assert connection.is_open


@virtual_time()
async def test_the_late_response_of_a_timed_out_request_is_ignored() -> None:
    async with world() as here:
        connection = await here.connect()
        with pytest.raises(RequestTimeout):
            await connection.request(slow(500, b"late"), 100)
        answer = await connection.request(slow(1000, b"own"), 2000)
        assert answer.body == b"own"


@virtual_time()
async def test_a_cancelled_request_frees_its_slot_immediately() -> None:
    limits = ConnectionLimits(requests_in_flight_max=1)
    async with world() as here:
        connection = await here.connect(limits=limits)
        call = asyncio.create_task(connection.request(Command(NEVER), 60_000))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert len(in_flight(connection)) == 0
        assert len(here.deadlines) == 1, "only the idle check is left"
        assert (await connection.request(Command(ECHO), 100)).code == 0


@virtual_time()
async def test_cancelling_in_the_same_iteration_as_the_failure_leaves_no_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with world() as here:
        connection = await here.connect()
        call = asyncio.create_task(connection.request(Command(NEVER), 60_000))
        await asyncio.sleep(0.1)
        connection.abort("test")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        del call
    assert "never retrieved" not in caplog.text


@virtual_time()
async def test_an_idle_connection_is_closed_after_its_time_and_not_before() -> None:
    limits = ConnectionLimits(idle_ms=120_000)
    async with world(limits=limits) as here:
        connection = await here.connect(limits=limits)
        for _ in range(5):
            await asyncio.sleep(119)
            await connection.request(Command(ECHO), 1000)
        start = virtual_loop().time()
        await connection.wait_closed()
        assert 119.9 <= virtual_loop().time() - start <= 120.2
        with pytest.raises(ConnectionLost, match=r"idle|reset"):
            await connection.request(Command(ECHO), 1000)
        await wait_until(lambda: not here.server.connections)


# --- bounds ---------------------------------------------------------------------------------------


@virtual_time()
async def test_requests_in_flight_are_bounded_and_served_in_order() -> None:
    async with world() as here:
        connection = await here.connect(limits=ConnectionLimits(requests_in_flight_max=3))
        seen: list[int] = []
        done: list[int] = []

        async def call(number: int) -> None:
            await connection.request(slow(100, bytes([number])), 5000)
            seen.append(len(in_flight(connection)))
            done.append(number)

        await asyncio.gather(*(call(number) for number in range(12)))
        rounds = [sorted(done[at : at + 3]) for at in range(0, 12, 3)]
        assert rounds == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
        assert max(seen) <= 3
        assert 0.4 <= virtual_loop().time() <= 0.5


@virtual_time()
async def test_no_slot_in_time_is_an_overload_and_nothing_is_sent() -> None:
    served: list[Command] = []

    def note(request: Command, peer: Connection) -> None:
        served.append(request)

    async with world(Router({1: note})) as here:
        connection = await here.connect(limits=ConnectionLimits(requests_in_flight_max=1))
        first = asyncio.create_task(connection.request(Command(1), 5000))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="no request in flight finished for 300 ms"):
            await connection.request(Command(1), 300)
        with pytest.raises(RequestTimeout):
            await first
        assert len(served) == 1


@virtual_time()
async def test_a_slot_that_is_free_too_late_is_not_used() -> None:
    """The deadline is coarse: a slot may become free after it and before the timeout is noticed."""
    async with world() as here:
        connection = await here.connect(limits=ConnectionLimits(requests_in_flight_max=1))
        await asyncio.sleep(0.05 - virtual_loop().time() % 0.05)
        first = asyncio.create_task(connection.request(slow(30), 5000))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="no request in flight finished for 10 ms"):
            await connection.request(Command(ECHO), 10)
        await first
        assert connection._admission.is_idle


@virtual_time()
async def test_a_cancelled_waiter_passes_its_slot_to_the_next() -> None:
    async with world() as here:
        connection = await here.connect(limits=ConnectionLimits(requests_in_flight_max=1))
        first = asyncio.create_task(connection.request(slow(100), 5000))
        await asyncio.sleep(0)
        second = asyncio.create_task(connection.request(slow(100), 5000))
        third = asyncio.create_task(connection.request(slow(100), 5000))
        await asyncio.sleep(0)
        first.add_done_callback(lambda _: second.cancel())
        assert (await third).code == 0
        assert second.cancelled()
        assert (await connection.request(Command(ECHO), 100)).code == 0


@virtual_time()
async def test_thousands_of_waiters_cancelled_together_do_not_disturb_the_queue() -> None:
    async with world() as here:
        connection = await here.connect(limits=ConnectionLimits(requests_in_flight_max=1))
        first = asyncio.create_task(connection.request(slow(100), 5000))
        await asyncio.sleep(0)
        crowd = [asyncio.create_task(connection.request(slow(100), 5000)) for _ in range(3000)]
        last = asyncio.create_task(connection.request(Command(ECHO), 5000))
        await asyncio.sleep(0)
        first.add_done_callback(lambda _: [call.cancel() for call in crowd])
        assert (await last).code == 0
        assert connection._admission.is_idle
        await asyncio.wait(crowd)


# --- one-way --------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [ECHO, SLOW, FAIL, 999])
@virtual_time()
async def test_one_way_requests_are_never_answered(code: int) -> None:
    async with world() as here:
        raw = await here.connect_raw()
        raw.transport.write(encode(Command(code, flag=2, opaque=5)))
        await asyncio.sleep(1)
        assert raw.received == b""
        raw.transport.close()


@virtual_time()
async def test_one_way_requests_arrive() -> None:
    arrived: list[Command] = []

    def note(request: Command, peer: Connection) -> None:
        arrived.append(request)

    async with world(Router({1: note})) as here:
        connection = await here.connect()
        connection.oneway(Command(1, body=b"a"))
        await connection.oneway_in_time(Command(1, body=b"b"), 1000)
        await wait_until(lambda: len(arrived) == 2)
        assert [request.body for request in arrived] == [b"a", b"b"]
        assert all(request.flag & FLAG_ONEWAY for request in arrived)


@virtual_time()
async def test_a_request_too_large_for_a_frame_is_the_callers_error() -> None:
    async with world() as here:
        connection = await here.connect()
        with pytest.raises(InvalidArgument, match="at most"):
            await connection.request(Command(ECHO, body=bytes(17 * 1024 * 1024)), 1000)
        assert len(in_flight(connection)) == 0
        assert (await connection.request(Command(ECHO), 1000)).code == 0


@virtual_time()
async def test_a_body_in_pieces_arrives_in_one() -> None:
    async with world() as here:
        connection = await here.connect()
        data = bytes(range(256)) * 1000
        view = memoryview(data)
        pieces: list[Buffer] = [view[:10], view[10:20], view[20:200_000], b"", view[200_000:]]
        answer = await connection.request(Command(ECHO, body=pieces), 5000)
        assert answer.body == data
