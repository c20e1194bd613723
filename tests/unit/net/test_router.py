from __future__ import annotations

import logging

import pytest

from netkit import ECHO, FAIL, echo, handlers, never, world
from turbopump.errors import HeaderError, InvalidArgument, RemoteError, RequestTimeout
from turbopump.net.connection import Connection
from turbopump.net.router import Router
from turbopump.testing import virtual_time
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command, Serialize


def raising(error: Exception) -> Router:
    def handler(request: Command, peer: Connection) -> Command:
        raise error

    async def later(request: Command, peer: Connection) -> Command:
        raise error

    return Router({1: handler, 2: later})


@virtual_time()
async def test_an_unknown_code_is_answered_with_code_3_and_a_leading_blank() -> None:
    async with world() as here:
        answer = await (await here.connect()).request(Command(999), 1000)
        assert answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        assert answer.remark == " request type 999 not supported"


@virtual_time()
async def test_an_unknown_code_may_be_ignored() -> None:
    async with world(Router({ECHO: echo}, unknown=never)) as here:
        connection = await here.connect()
        with pytest.raises(RequestTimeout):
            await connection.request(Command(999), 1000)
        assert (await connection.request(Command(ECHO), 1000)).code == 0


@pytest.mark.parametrize("code", [1, 2])
@pytest.mark.parametrize(
    ("error", "answer_code", "remark"),
    [
        (RemoteError(17, "no such topic"), 17, "no such topic"),
        (HeaderError("queueId: Expected `int`", 4), 1, "HeaderError: queueId: Expected `int`"),
        (RuntimeError("broke"), 1, "RuntimeError: broke"),
        (ValueError("x" * 10_000_000), 1, "ValueError: xxx"),
    ],
)
@virtual_time()
async def test_an_exception_in_a_handler_becomes_its_response(
    code: int, error: Exception, answer_code: int, remark: str
) -> None:
    async with world(raising(error)) as here:
        connection = await here.connect()
        answer = await connection.request(Command(code), 1000)
        assert answer.code == answer_code
        assert (answer.remark or "").startswith(remark)
        assert connection.is_open


@virtual_time()
async def test_a_bug_in_a_handler_is_logged_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with world() as here:
        await (await here.connect()).request(Command(FAIL), 1000)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None
    assert "request 13 of client" in record.message


@pytest.mark.parametrize("serialize", list(Serialize))
@pytest.mark.parametrize("code", [ECHO, FAIL, 999])
@virtual_time()
async def test_responses_use_the_encoding_of_the_request(serialize: Serialize, code: int) -> None:
    async with world() as here:
        answer = await (await here.connect()).request(Command(code, serialize=serialize), 1000)
        assert answer.serialize == serialize


@virtual_time()
async def test_an_answer_too_large_for_a_frame_becomes_an_error_answer() -> None:
    def large(request: Command, peer: Connection) -> Command:
        return request.answer(0, body=bytes(17 * 1024 * 1024))

    async with world(Router({1: large})) as here:
        answer = await (await here.connect()).request(Command(1), 1000)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert "at most 16777216 bytes" in (answer.remark or "")


def test_a_code_has_one_handler() -> None:
    router = handlers()
    with pytest.raises(InvalidArgument, match="request code 310 has a handler already"):
        router.add(ECHO, never)


@pytest.mark.parametrize(("size", "code"), [(65_536, 0), (65_537, 1), (100_000, 1)])
@virtual_time()
async def test_bodies_of_other_codes_have_the_default_limit(size: int, code: int) -> None:
    async with world(Router({ECHO: echo}, body_bytes_max={1: 3_000_000})) as here:
        connection = await here.connect()
        answer = await connection.request(Command(ECHO, body=b"x" * size), 1000)
        assert answer.code == code
        if code:
            assert (
                answer.remark == f"body of request {ECHO} must be at most 65536 bytes, got {size}"
            )
        assert (await connection.request(Command(ECHO), 1000)).code == 0


@pytest.mark.parametrize(("size", "code"), [(200_000, 0), (200_001, 1)])
@virtual_time()
async def test_a_code_has_a_limit_of_its_own(size: int, code: int) -> None:
    async with world(Router({ECHO: echo}, body_bytes_max={ECHO: 200_000})) as here:
        connection = await here.connect()
        answer = await connection.request(Command(ECHO, body=b"x" * size), 1000)
        assert answer.code == code
