"""What is sent and accepted when a short text is fetched by HTTP."""

from __future__ import annotations

import pytest

from address_servers import address_server, http
from turbopump.errors import ConnectFailed, InvalidArgument
from turbopump.net.http_get import ANSWER_BYTES_MAX, check_url, http_get, parse_answer
from turbopump.testing import LinkQuality, MemoryNetwork, virtual_loop, virtual_time

URL = "http://web:8080/rocketmq/nsaddr"


async def fetched(answer: bytes | None, *, closes: bool = False, url: str = URL) -> str:
    network = MemoryNetwork(LinkQuality(cut_chance=1))
    server = address_server(network.host("web"), answer=answer, host="web", port=8080)
    server.answer, server.closes = answer, closes
    async with server:
        return await http_get(network.host("client"), url, 3000)


@virtual_time()
async def test_the_request_is_one_that_every_server_understands() -> None:
    network = MemoryNetwork()
    server = address_server(network.host("web"), "a:1", host="web", port=8080)
    async with server:
        await http_get(network.host("client"), "http://web:8080/ns-unit?nofix=1#part", 3000)
        await http_get(network.host("client"), "http://web:8080", 3000)
    ends = " HTTP/1.1\r\nHost: web:8080\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    assert server.requests == [f"GET /ns-unit?nofix=1{ends}", f"GET /{ends}"]


@virtual_time()
@pytest.mark.parametrize(
    ("answer", "closes"),
    [
        (http("a:1;b:2\n"), False),
        (b"HTTP/1.0 200 OK\r\n\r\na:1;b:2\n", True),
        (
            (
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
                b"4\r\na:1;\r\n4\r\nb:2\n\r\n0\r\n\r\n"
            ),
            False,
        ),
    ],
    ids=["length", "until the end", "chunked"],
)
async def test_a_body_ends_in_any_of_three_ways(answer: bytes, closes: bool) -> None:
    assert await fetched(answer, closes=closes) == "a:1;b:2\n"


@virtual_time()
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (http("a:1", "404 Not Found"), "status 404 Not Found, expected 200"),
        (http("", "204 No Content"), "status 204 No Content"),
        (http("", "302 Found"), "status 302 Found"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not an HTTP answer: b'SSH-2.0-OpenSSH_9.2"),
        (b"HTTP/1.1 abc\r\n\r\n", "not an HTTP answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\na:1", "closed before the answer"),
        (b"HTTP/1.1 200 OK\r\nConte", "closed before the answer was complete"),
        (b"HTTP/1.1 200 OK\r\n\r\n\xff", "the answer is not UTF-8"),
        (http("a" * ANSWER_BYTES_MAX), f"longer than {ANSWER_BYTES_MAX} bytes"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nab\r\n", "answer"),
        (http("", "302 Found", "Location: file:///etc/passwd"), "scheme 'file' is not supported"),
        (http("", "302 Found", "Location: /again"), "more than 3 redirects"),
    ],
)
async def test_another_answer_is_refused_with_a_reason(answer: bytes, reason: str) -> None:
    with pytest.raises(ConnectFailed) as refused:
        await fetched(answer, closes=True)
    assert reason in str(refused.value)


@virtual_time()
async def test_a_server_that_does_not_answer_costs_its_timeout() -> None:
    with pytest.raises(ConnectFailed, match="no answer within 3000 ms"):
        await fetched(None)
    assert virtual_loop().time() == pytest.approx(3, abs=0.1)


@virtual_time()
async def test_redirects_are_followed() -> None:
    network = MemoryNetwork()
    moved = http("", "307 Temporary Redirect", "Location: //other:81/ns")
    async with (
        address_server(network.host("web"), answer=moved, host="web", port=8080),
        address_server(network.host("other"), "a:1", host="other", port=81) as other,
    ):
        assert await http_get(network.host("client"), URL, 3000) == "a:1"
    assert other.requests[0].startswith("GET /ns HTTP/1.1\r\nHost: other:81\r\n")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("file:///etc/passwd", "scheme 'file' is not supported"),
        ("http:///ns", "it has no host"),
        ("http://me:secret@web/ns", "user and password are not supported"),
        ("http://web:99999/ns", "out of range"),
        ("http://web:0/ns", "port 0"),
        ("http://[::1/ns", "Invalid IPv6 URL"),
        ("http://web/a\r\nX: b", "must be percent-encoded"),
        ("http://web/a b", "must be percent-encoded"),
    ],
)
def test_a_url_that_cannot_be_fetched_is_refused(url: str, problem: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_url(url)
    assert problem in str(refused.value)
    assert "expected http://host/path or https://host/path" in str(refused.value)


def test_every_beginning_of_an_answer_is_incomplete() -> None:
    answer = http("a:1")
    for size in range(len(answer)):
        assert parse_answer(answer[:size], is_end=False) is None
        with pytest.raises(ConnectFailed):
            parse_answer(answer[:size], is_end=True)
