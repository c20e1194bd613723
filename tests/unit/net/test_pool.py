from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netkit import ECHO, NEVER, SLOW, World, echo, slow, slow_echo, world
from turbopump.errors import ConnectFailed, ConnectionLost, InvalidArgument, RequestTimeout
from turbopump.net.connection import Connection
from turbopump.net.limits import ConnectionLimits
from turbopump.net.pool import ConnectionPool, Greeting
from turbopump.net.pool_config import PoolConfig
from turbopump.net.router import Router
from turbopump.testing import virtual_loop, virtual_time, wait_until
from turbopump.wire.command import Command, whole_body

GREETING = 9999


@asynccontextmanager
async def pooled(
    config: PoolConfig | None = None,
    router: Router | None = None,
    greeting: Greeting | None = None,
    server: Router | None = None,
) -> AsyncIterator[tuple[World, ConnectionPool]]:
    async with world(server) as here:
        loop = virtual_loop()
        async with ConnectionPool(
            here.network.host("client"),
            config,
            router=router,
            greeting=greeting,
            clock=loop.clock,
            random=loop.random,
        ) as pool:
            yield here, pool


@virtual_time()
async def test_all_share_one_connection_and_one_dial() -> None:
    async with pooled() as (here, pool):
        address = here.server.address
        found = await asyncio.gather(*(pool.connection(address) for _ in range(20)))
        assert len(set(found)) == 1
        assert len(here.connected) == 1
        calls = (pool.request(address, Command(ECHO), 1000) for _ in range(20))
        assert all(answer.code == 0 for answer in await asyncio.gather(*calls))
        assert len(here.connected) == 1


@virtual_time()
async def test_no_request_overtakes_those_that_waited_for_the_connection() -> None:
    seen: list[bytes] = []
    calls: list[asyncio.Task[Command]] = []

    def note(request: Command, _: Connection) -> Command:
        seen.append(bytes(whole_body(request)))
        return request.answer(0)

    async def begin(count: int) -> None:
        for _ in range(count):
            command = Command(ECHO, body=b"%d" % len(calls))
            calls.append(asyncio.create_task(pool.request(here.server.address, command, 1000)))
            # One in each loop iteration.
            await asyncio.sleep(0)

    def greet(_: str) -> None:
        # The connection is open, and its waiters do not know that yet.
        later.append(asyncio.create_task(begin(20)))

    later: list[asyncio.Task[None]] = []
    async with pooled(server=Router({ECHO: note}), greeting=greet) as (here, pool):
        await begin(20)
        await wait_until(lambda: bool(later))
        await asyncio.gather(*later)
        await asyncio.gather(*calls)
    assert [int(body) for body in seen] == list(range(40))


@virtual_time()
async def test_a_lost_connection_is_reestablished() -> None:
    async with pooled() as (here, pool):
        address = here.server.address
        for _ in range(5):
            assert (await pool.request(address, Command(ECHO), 1000)).code == 0
            assert here.network.cut("client", "server") == 1
            await asyncio.sleep(0.01)
        assert len(here.connected) == 5


@virtual_time()
async def test_a_cancelled_caller_does_not_end_the_dial_of_others() -> None:
    async with pooled() as (here, pool):
        address = here.server.address
        impatient = asyncio.create_task(pool.connection(address))
        patient = asyncio.create_task(pool.connection(address))
        await asyncio.sleep(0)
        impatient.cancel()
        assert (await patient).is_open
        assert impatient.cancelled()


@virtual_time()
async def test_failures_back_off_and_report_how_long() -> None:
    async with pooled() as (here, pool):
        here.network.refuse("server")
        loop, address = virtual_loop(), here.server.address
        tries: list[float] = []
        while loop.time() < 60:
            try:
                await pool.request(address, Command(ECHO), 1000)
            except ConnectFailed as error:
                assert str(error) == f"{address}: connection refused"
                left_ms = round(error.retry_after * 1000)
                assert left_ms <= 10_000
                tries.append(left_ms)
                before = loop.time()
                await asyncio.sleep(0.04)
                # No promise of another attempt: whether one follows is the caller's decision.
                with pytest.raises(ConnectFailed, match=r"refused \(40 ms ago\)$"):
                    await pool.connection(address)
                assert loop.time() == pytest.approx(before + 0.04), (
                    "fails immediately during the pause"
                )
                await asyncio.sleep(left_ms / 1000 - 0.04)
        assert 50 <= tries[0] <= 100
        assert tries[-1] >= 5000
        assert 8 <= len(tries) <= 25
        here.network.accept("server")
        await asyncio.sleep(10)
        assert (await pool.request(address, Command(ECHO), 1000)).code == 0


@virtual_time()
async def test_success_ends_the_pauses() -> None:
    async with pooled() as (here, pool):
        address = here.server.address
        here.network.refuse("server")
        for _ in range(8):
            with pytest.raises(ConnectFailed):
                await pool.connection(address)
            await asyncio.sleep(10)
        here.network.accept("server")
        await pool.request(address, Command(ECHO), 1000)
        here.network.refuse("server")
        here.network.cut("server")
        await asyncio.sleep(0.01)
        with pytest.raises(ConnectFailed) as failed:
            await pool.connection(address)
        assert 0 < failed.value.retry_after <= 0.1


@virtual_time()
async def test_a_peer_that_drops_connections_silently_is_avoided_too() -> None:
    async with pooled() as (here, pool):
        address = here.server.address
        await pool.connection(address)
        here.network.cut("server")
        await asyncio.sleep(0.01)
        with pytest.raises(ConnectFailed, match=r"closed without sending anything \(10 ms ago\)"):
            await pool.connection(address)


@virtual_time()
async def test_a_silent_network_fails_at_the_connect_timeout_or_the_callers() -> None:
    async with pooled() as (here, pool):
        address = here.server.address
        here.network.partition("client", "server")
        with pytest.raises(ConnectFailed, match="not connected within 500 ms"):
            await pool.request(address, Command(ECHO), 500)
        with pytest.raises(ConnectFailed, match="no answer within 3000 ms"):
            await pool.connection(address)
        assert virtual_loop().time() == pytest.approx(3, abs=0.01)
        here.network.heal()
        await asyncio.sleep(1)
        assert (await pool.request(address, Command(ECHO), 500)).code == 0


@virtual_time()
async def test_closing_waits_for_answers() -> None:
    async with pooled() as (here, pool):
        call = asyncio.create_task(pool.request(here.server.address, slow(500, b"x"), 5000))
        await wait_until(lambda: here.connected and here.handlers_running)
        await pool.close()
        assert (await call).body == b"x"
        assert 0.5 <= virtual_loop().time() < 0.7
        with pytest.raises(ConnectFailed, match="the pool is closed"):
            await pool.connection(here.server.address)


@virtual_time()
async def test_closing_ends_dials() -> None:
    async with pooled() as (here, pool):
        here.network.partition("client", "server")
        call = asyncio.create_task(pool.connection(here.server.address))
        await asyncio.sleep(0.1)
        await pool.close()
        with pytest.raises(ConnectFailed, match="closed while connecting"):
            await call


@virtual_time()
async def test_peers_may_send_requests_over_the_pools_connections() -> None:
    async with pooled(router=Router({7: echo})) as (here, pool):
        await pool.request(here.server.address, Command(ECHO), 1000)
        answer = await here.accepted.request(Command(7, body=b"push"), 1000)
        assert answer.body == b"push"


@virtual_time()
async def test_a_timeout_does_not_close_a_connection_that_still_receives() -> None:
    async with pooled() as (here, pool):
        address = here.server.address
        call = asyncio.create_task(pool.request(address, Command(NEVER), 100))
        await wait_until(lambda: here.connected)
        assert (await pool.request(address, Command(ECHO), 100)).code == 0
        with pytest.raises(RequestTimeout):
            await call
        assert (await pool.request(address, Command(ECHO), 100)).code == 0
        assert len(here.connected) == 1


@virtual_time()
async def test_a_connection_that_went_silent_is_abandoned(caplog: pytest.LogCaptureFixture) -> None:
    async with pooled() as (here, pool):
        address = here.server.address
        silent = await pool.connection(address)
        assert (await silent.request(Command(ECHO), 100)).code == 0
        here.network.lose("client", "server")
        long_poll = asyncio.create_task(silent.request(Command(NEVER), 30_000))
        with pytest.raises(RequestTimeout, match="within 3000 ms"):
            await silent.request(Command(ECHO), 3000)
        with pytest.raises(ConnectionLost, match="nothing received for 3000 ms"):
            await long_poll
        here.network.stop_losing()
        assert (await pool.request(address, Command(ECHO), 100)).code == 0
        assert await pool.connection(address) is not silent
    assert "aborted, nothing received for 3000 ms" in caplog.text


@virtual_time()
async def test_a_connection_that_this_side_does_not_read_does_not_count_as_silent() -> None:
    config = PoolConfig(limits=ConnectionLimits(handlers_running_max=1))
    async with pooled(config, Router({SLOW: slow_echo})) as (here, pool):
        connection = await pool.connection(here.server.address)
        await connection.request(Command(ECHO), 100)
        here.accepted.oneway(slow(1000))
        await wait_until(lambda: connection._serving.running)
        with pytest.raises(RequestTimeout):
            await connection.request(Command(ECHO), 500)
        await wait_until(lambda: not connection._serving.running)
        assert (await connection.request(Command(ECHO), 100)).code == 0


@virtual_time()
async def test_addresses_are_checked_and_old_ones_forgotten() -> None:
    async with pooled() as (_, pool):
        with pytest.raises(InvalidArgument, match="expected host:port"):
            await pool.connection("nowhere")
        for number in range(50):
            with pytest.raises(ConnectFailed):
                await pool.connection(f"gone-{number}:1")
            await asyncio.sleep(1)
        assert len(pool._peers) <= 15


@given(st.integers(1, 10_000), st.integers(1, 1000), st.integers(0, 100_000), st.integers())
def test_pauses_stay_within_their_bounds(failures: int, first: int, more: int, seed: int) -> None:
    config = PoolConfig(backoff_first_ms=first, backoff_max_ms=first + more)
    pause = config.pause_ms(failures, Random(seed))
    full = min(first * 2 ** (failures - 1), first + more)
    assert full - full // 2 <= pause <= full


@virtual_time()
async def test_oneway_requests_connect_too_within_their_time() -> None:
    async with pooled() as (here, pool):
        for _ in range(3):
            await pool.oneway(here.server.address, Command(NEVER), 1000)
        assert (await pool.request(here.server.address, Command(ECHO), 1000)).code == 0
        assert len(here.connected) == 1
        here.network.partition("client", "server")
        here.network.cut("client", "server")
        await asyncio.sleep(1)
        with pytest.raises(ConnectFailed, match="not connected within 200 ms"):
            await pool.oneway(here.server.address, Command(NEVER), 200)


@virtual_time()
async def test_a_greeting_is_sent_first_on_every_connection() -> None:
    served: list[int] = []

    def note(request: Command, _: Connection) -> Command:
        served.append(request.code)
        return request.answer(0)

    server = Router({GREETING: note, ECHO: note})
    async with pooled(greeting=lambda _: Command(GREETING), server=server) as (here, pool):
        address = here.server.address
        for _ in range(3):
            served.clear()
            calls = (pool.request(address, Command(ECHO), 1000) for _ in range(3))
            await asyncio.gather(*calls)
            assert served == [GREETING, ECHO, ECHO, ECHO]
            here.network.cut("client", "server")
            await asyncio.sleep(0.01)


@virtual_time()
async def test_a_greeting_that_cannot_be_sent_leaves_the_connection_usable(
    caplog: pytest.LogCaptureFixture,
) -> None:
    too_large = Command(GREETING, body=bytes(20 * 1024 * 1024))
    async with pooled(greeting=lambda _: too_large) as (here, pool):
        assert (await pool.request(here.server.address, Command(ECHO), 1000)).code == 0
    assert "connected, but not greeted" in caplog.text


@virtual_time()
async def test_only_selected_peers_are_greeted() -> None:
    asked: list[str] = []

    def greeting(address: str) -> None:
        asked.append(address)

    async with pooled(greeting=greeting) as (here, pool):
        assert (await pool.request(here.server.address, Command(ECHO), 1000)).code == 0
        assert asked == [here.server.address]
