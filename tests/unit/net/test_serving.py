from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any

import pytest

from netkit import ECHO, SLOW, echo, slow, slow_echo, world
from turbopump.net.connection import Connection
from turbopump.net.limits import ConnectionLimits
from turbopump.net.router import Router
from turbopump.testing import virtual_loop, virtual_time, wait_until
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command


@virtual_time()
async def test_an_answer_may_come_long_after_the_handler_returned() -> None:
    kept: list[tuple[Command, Connection]] = []

    def keep(request: Command, peer: Connection) -> None:
        kept.append((request, peer))

    async with world(Router({1: keep, ECHO: echo})) as here:
        connection = await here.connect()
        call = asyncio.create_task(connection.request(Command(1), 30_000))
        await wait_until(lambda: kept)
        await connection.request(Command(ECHO), 1000)
        await asyncio.sleep(20)
        request, peer = kept[0]
        peer.answer(request, request.answer(0, body=b"at last"))
        assert (await call).body == b"at last"
        connection.close()
        await connection.wait_closed()
        await wait_until(lambda: not peer.is_open)
        peer.answer(request, request.answer(0))


@virtual_time()
async def test_handlers_are_bounded_by_not_reading_further() -> None:
    limits = ConnectionLimits(handlers_running_max=5)
    async with world(limits=limits) as here:
        connection = await here.connect()
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, here.accepted.handlers_running)
                await asyncio.sleep(0.001)

        watcher = asyncio.create_task(watch())
        calls = (connection.request(slow(20, bytes([i])), 5000) for i in range(50))
        answers = await asyncio.gather(*calls)
        watcher.cancel()
        assert [answer.body for answer in answers] == [bytes([i]) for i in range(50)]
        assert most == 5


@virtual_time()
async def test_a_handler_cancelled_before_its_first_step_is_no_warning() -> None:
    started: list[str] = []

    async def handler(request: Command, peer: Connection) -> None:
        started.append("ran")

    def serve_and_leave(request: Command, peer: Connection) -> Coroutine[Any, Any, None]:
        peer.abort("test")
        return handler(request, peer)

    async with world(Router({1: serve_and_leave})) as here:
        connection = await here.connect()
        connection.oneway(Command(1))
        await connection.wait_closed()
        await wait_until(lambda: here.disconnected)
    gc.collect()


@virtual_time()
async def test_a_handler_that_is_cancelled_by_others_answers_with_an_error() -> None:
    async def give_up(request: Command, peer: Connection) -> None:
        raise asyncio.CancelledError

    async with world(Router({1: give_up, ECHO: echo})) as here:
        connection = await here.connect()
        answer = await connection.request(Command(1), 1000)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert answer.remark == "RuntimeError: the handler was cancelled"
        assert (await connection.request(Command(ECHO), 1000)).code == 0


@virtual_time()
async def test_a_handler_may_return_any_awaitable() -> None:
    def promise(request: Command, peer: Connection) -> asyncio.Future[Command]:
        future: asyncio.Future[Command] = asyncio.get_running_loop().create_future()
        virtual_loop().call_later(1, future.set_result, request.answer(0, body=b"kept"))
        return future

    async with world(Router({1: promise})) as here:
        assert (await (await here.connect()).request(Command(1), 2000)).body == b"kept"


# --- hooks ----------------------------------------------------------------------------------------


class Signer:
    """Signs requests, and writes down what it sees."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []

    def before_request(self, address: str, command: Command) -> Command:
        fields = {**(command.ext_fields or {}), "Signature": "secret"}
        return Command(command.code, flag=command.flag, opaque=command.opaque, ext_fields=fields)

    def after_response(self, address: str, request: Command, response: Command) -> None:
        self.seen.append((address, request.code, response.code))


class Checker(Signer):
    """Refuses what is not signed."""

    def before_request(self, address: str, command: Command) -> Command:
        if (command.ext_fields or {}).get("Signature") != "secret":
            raise PermissionError(f"{address} did not sign")
        return command


@virtual_time()
async def test_hooks_change_and_see_requests_on_both_sides() -> None:
    signer, checker = Signer(), Checker()
    async with world(Router({ECHO: echo}, hooks=[checker])) as here:
        signed = await here.connect(hooks=[signer])
        assert (await signed.request(Command(ECHO), 1000)).code == 0
        assert signer.seen == [(here.server.address, ECHO, 0)]
        assert checker.seen == [(signed.local_address, ECHO, 0)]
        refused = await (await here.connect()).request(Command(ECHO), 1000)
        assert refused.code == ResponseCode.SYSTEM_ERROR
        assert "did not sign" in (refused.remark or "")


class Faulty(Signer):
    """Fails on every answer."""

    def after_response(self, address: str, request: Command, response: Command) -> None:
        raise OSError("the audit log is full")


@pytest.mark.parametrize("code", [ECHO, SLOW])
@virtual_time()
async def test_a_hook_that_fails_makes_an_error_answer_and_no_more(code: int) -> None:
    async with world(Router({ECHO: echo, SLOW: slow_echo}, hooks=[Faulty()])) as here:
        connection = await here.connect()
        for _ in range(2):
            answer = await connection.request(Command(code), 1000)
            assert answer.remark == "OSError: the audit log is full"
