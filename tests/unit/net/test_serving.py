from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from netkit import ECHO, SLOW, echo, slow, slow_echo, world
from turbopump.errors import RemoteError, WriteFailed
from turbopump.net.connection import Connection
from turbopump.net.limits import ConnectionLimits
from turbopump.net.router import Handler, Router
from turbopump.testing import virtual_loop, virtual_time, wait_until
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command, Serialize, whole_body
from turbopump.wire.framing import encode, encode_parts

LIMIT = 4000


@virtual_time()
async def test_a_response_may_be_sent_long_after_the_handler_returned() -> None:
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
                most = max(most, here.handlers_running)
                await asyncio.sleep(0.001)

        watcher = asyncio.create_task(watch())
        calls = (connection.request(slow(20, bytes([i])), 5000) for i in range(50))
        answers = await asyncio.gather(*calls)
        watcher.cancel()
        assert [answer.body for answer in answers] == [bytes([i]) for i in range(50)]
        assert most == 5


@virtual_time()
async def test_a_handler_cancelled_before_its_first_step_causes_no_warning() -> None:
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
async def test_a_handler_cancelled_from_outside_answers_with_an_error() -> None:
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
    """Signs requests, and records what it sees."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []

    def before_request(self, address: str, command: Command) -> Command:
        fields = {**(command.ext_fields or {}), "Signature": "secret"}
        return Command(command.code, flag=command.flag, opaque=command.opaque, ext_fields=fields)

    def after_response(self, address: str, request: Command, response: Command) -> None:
        self.seen.append((address, request.code, response.code))


class Checker(Signer):
    """Rejects unsigned requests."""

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


@virtual_time()
async def test_an_answer_may_be_encoded_already() -> None:
    def encoded(request: Command, peer: Connection) -> None:
        assert not peer.is_observed
        peer.answer_encoded(request, encode(request.answer(7, body=b"made before")))

    async with world(Router({1: encoded, ECHO: echo})) as here:
        connection = await here.connect()
        connection.oneway(Command(1))
        answer = await connection.request(Command(1), 1000)
        assert (answer.code, answer.body) == (7, b"made before")
        assert (await connection.request(Command(ECHO, body=b"next"), 1000)).body == b"next"
    async with world(Router({ECHO: echo}, hooks=[Signer()])) as here:
        await (await here.connect()).request(Command(ECHO), 1000)
        assert here.accepted.is_observed


@virtual_time()
async def test_an_encoded_answer_may_be_as_long_as_any_other() -> None:
    def encoded(request: Command, peer: Connection) -> None:
        body = bytes(int(request.remark or 0))
        parts = encode_parts(request.answer(7, body=body), 2 * LIMIT)
        peer.answer_encoded(request, *parts)

    def plain(request: Command, _: Connection) -> Command:
        return request.answer(7, body=bytes(int(request.remark or 0)))

    router = Router({1: encoded, 2: plain})
    async with world(router, limits=ConnectionLimits(frame_bytes_max=LIMIT)) as here:
        seen: dict[int, list[tuple[int, str | None]]] = {1: [], 2: []}
        for code, answers in seen.items():
            # Each on its own: numbers of requests have as many digits then.
            connection = await here.connect()
            for body_bytes in range(LIMIT - 130, LIMIT - 80):
                answer = await connection.request(Command(code, remark=f"{body_bytes}"), 1000)
                assert (answer.code == 7) == (len(whole_body(answer)) == body_bytes)
                answers.append((answer.code, answer.remark))
        assert seen[1] == seen[2]
        assert {7, ResponseCode.SYSTEM_ERROR} == {code for code, _ in seen[1]}


class Faulty(Signer):
    """Fails on every response."""

    def after_response(self, address: str, request: Command, response: Command) -> None:
        raise OSError("the audit log is full")


@pytest.mark.parametrize("code", [ECHO, SLOW])
@virtual_time()
async def test_a_hook_that_fails_causes_an_error_response_only(code: int) -> None:
    async with world(Router({ECHO: echo, SLOW: slow_echo}, hooks=[Faulty()])) as here:
        connection = await here.connect()
        for _ in range(2):
            answer = await connection.request(Command(code), 1000)
            assert answer.remark == "OSError: the audit log is full"


@virtual_time()
async def test_a_hook_that_fails_on_a_late_answer_becomes_the_answer() -> None:
    kept: list[tuple[Command, Connection]] = []

    def keep(request: Command, peer: Connection) -> None:
        kept.append((request, peer))

    async with world(Router({1: keep}, hooks=[Faulty()])) as here:
        call = asyncio.create_task((await here.connect()).request(Command(1), 1000))
        await wait_until(lambda: kept)
        request, peer = kept[0]
        peer.answer(request, request.answer(0))
        assert (await call).remark == "OSError: the audit log is full"


# --- answers that cannot be sent ------------------------------------------------------------------


class Unprintable(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


LARGE = "x" * (17 * 1024 * 1024)
RAISED = [
    (RemoteError(7, LARGE), 7, "xxx"),
    (RemoteError(7, "file \udc80 is odd"), 7, "file ? is odd"),
    (RuntimeError("file \udc80 is odd"), 1, "RuntimeError: file ? is odd"),
    (WriteFailed("\udc80" + LARGE), 14, "?xxx"),
    (RemoteError(2**40, "no such code"), 1, "the answer cannot be sent"),
    (Unprintable(), 1, "the answer cannot be sent"),
]


@pytest.mark.parametrize(("error", "code", "remark"), RAISED, ids=range(len(RAISED)))
@pytest.mark.parametrize("later", [False, True])
@virtual_time()
async def test_whatever_is_raised_is_answered(
    error: Exception, code: int, remark: str, later: bool
) -> None:
    def immediately(request: Command, peer: Connection) -> Command:
        raise error

    async def soon(request: Command, peer: Connection) -> Command:
        raise error

    async with world(Router({1: soon if later else immediately, ECHO: echo})) as here:
        connection = await here.connect()
        failed, served = await asyncio.gather(
            connection.request(Command(1, serialize=Serialize.ROCKETMQ), 1000),
            connection.request(Command(ECHO, body=b"other"), 1000),
        )
        assert failed.code == code
        assert (failed.remark or "").startswith(remark)
        assert len(failed.remark or "") <= 2000
        assert served.body == b"other"


def too_large(request: Command) -> Command:
    return request.answer(0, body=bytes(17 * 1024 * 1024))


def odd_remark(request: Command) -> Command:
    return request.answer(0, remark="\udc80")


def odd_field(request: Command) -> Command:
    return request.answer(0, {"name": "\udc80"})


def no_answer(request: Command) -> Command:
    return request


@pytest.mark.parametrize("made", [too_large, odd_remark, odd_field, no_answer])
@pytest.mark.parametrize("how", ["plain", "coroutine", "late"])
@pytest.mark.parametrize("serialize", list(Serialize))
@virtual_time()
async def test_an_answer_that_cannot_be_sent_becomes_an_error_answer(
    made: Callable[[Command], Command], how: str, serialize: Serialize
) -> None:
    def plain(request: Command, peer: Connection) -> Command:
        return made(request)

    async def coroutine(request: Command, peer: Connection) -> Command:
        return made(request)

    def late(request: Command, peer: Connection) -> None:
        virtual_loop().call_later(0.1, lambda: peer.answer(request, made(request)))

    handlers: dict[str, Handler] = {"plain": plain, "coroutine": coroutine, "late": late}
    async with world(Router({1: handlers[how], ECHO: echo})) as here:
        connection = await here.connect()
        failed, served = await asyncio.gather(
            connection.request(Command(1, serialize=serialize), 1000),
            connection.request(Command(ECHO, body=b"other"), 1000),
        )
        assert failed.code == ResponseCode.SYSTEM_ERROR
        assert failed.remark
        assert served.body == b"other"


# --- futures that several requests share ----------------------------------------------------------


@pytest.mark.parametrize("is_done", [False, True])
@virtual_time()
async def test_requests_may_share_a_future(is_done: bool) -> None:
    shared: asyncio.Future[Command] = virtual_loop().create_future()

    def wait_for_all(request: Command, peer: Connection) -> asyncio.Future[Command]:
        if not shared.done() and (is_done or peer._serving.running):
            shared.set_result(request.answer(0, body=b"all flushed"))
        return shared

    async with world(Router({1: wait_for_all})) as here:
        connection = await here.connect()
        answers = await asyncio.gather(*(connection.request(Command(1), 1000) for _ in range(3)))
        assert [answer.body for answer in answers] == [b"all flushed"] * 3
        assert here.handlers_running == 0


@virtual_time()
async def test_a_disconnecting_peer_does_not_cancel_a_shared_future() -> None:
    shared: asyncio.Future[Command] = virtual_loop().create_future()

    def wait_for_all(request: Command, peer: Connection) -> asyncio.Future[Command]:
        return shared

    async with world(Router({1: wait_for_all})) as here:
        leaving = await here.connect()
        leaving.oneway(Command(1))
        await wait_until(lambda: here.handlers_running)
        gone = here.accepted
        leaving.abort("test")
        await gone.wait_closed()
        assert gone._serving.running == 0
        staying = asyncio.create_task((await here.connect()).request(Command(1), 1000))
        await wait_until(lambda: here.server.connections and here.handlers_running)
        shared.set_result(Command(1).answer(0, body=b"flushed"))
        assert (await staying).body == b"flushed"
