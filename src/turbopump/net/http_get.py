"""Fetching a short text by HTTP over a `Network`, in memory as well as by sockets."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from typing import Any, NamedTuple, cast
from urllib.parse import SplitResult, urljoin, urlsplit

from turbopump.errors import ConnectFailed, InvalidArgument
from turbopump.net.network import Network, address_text
from turbopump.net.tls import ClientTls
from turbopump.timeouts import timeout

SCHEMES = ("http", "https")
REDIRECTS_MAX = 3
ANSWER_BYTES_MAX = 64 * 1024
"""Header and body; name servers need a line."""

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PORTS = {"http": 80, "https": 443}


class Answer(NamedTuple):
    """A complete response."""

    status: int
    reason: str
    location: str
    body: bytes


def check_url(url: str) -> None:
    """Raise InvalidArgument unless a URL can be fetched."""
    _split(url)


async def http_get(network: Network, url: str, timeout_ms: int) -> str:
    """Return the text at a URL, after up to three redirects; raises ConnectFailed.

    A certificate is checked against the system's. No redirect leads from HTTPS to HTTP.
    """
    try:
        async with timeout(timeout_ms / 1000):
            return await _followed(network, url)
    except TimeoutError as error:
        raise ConnectFailed(f"no answer within {timeout_ms} ms") from error


async def _followed(network: Network, url: str) -> str:
    for _ in range(REDIRECTS_MAX + 1):
        answer = await _answer(network, _split(url))
        if answer.status not in _REDIRECTS or not answer.location:
            return _text(answer)
        url = _redirected(url, answer.location)
    raise ConnectFailed(f"more than {REDIRECTS_MAX} redirects")


def _redirected(url: str, location: str) -> str:
    """Return where a redirect leads; raises ConnectFailed if it must not be followed."""
    target = urljoin(url, location)
    try:
        scheme = _split(target).scheme
    except InvalidArgument as error:
        raise ConnectFailed(f"redirected to an unusable URL: {error}") from error
    if scheme != "https" and urlsplit(url).scheme == "https":
        raise ConnectFailed(f"redirected from https to {target[:200]!r}")
    return target


def _text(answer: Answer) -> str:
    if answer.status != 200:
        raise ConnectFailed(f"status {answer.status} {answer.reason}, expected 200".strip())
    try:
        return answer.body.decode()
    except UnicodeDecodeError as error:
        raise ConnectFailed(f"the answer is not UTF-8: {error}") from error


async def _answer(network: Network, url: SplitResult) -> Answer:
    assert url.hostname is not None
    port = url.port or _PORTS[url.scheme]
    tls = ClientTls() if url.scheme == "https" else None
    exchange = await network.connect(url.hostname, port, lambda: _Exchange(_request(url)), tls=tls)
    try:
        return await exchange.answer
    finally:
        exchange.close()


def _request(url: SplitResult) -> bytes:
    target = url._replace(scheme="", netloc="", fragment="").geturl() or "/"
    target = target if target.startswith("/") else f"/{target}"
    assert url.hostname is not None
    name = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    host = address_text((url.hostname, url.port)) if url.port else name
    lines = (f"GET {target} HTTP/1.1", f"Host: {host}", "Accept: */*", "Connection: close")
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


class _Exchange(asyncio.Protocol):
    """Sends a request and reads until the answer is complete."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) > ANSWER_BYTES_MAX:
            self._fail(f"the answer is longer than {ANSWER_BYTES_MAX} bytes")
        else:
            self._read(is_end=False)

    def eof_received(self) -> None:
        self._read(is_end=True)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None:
            self._read(is_end=True)
        else:
            self._fail(f"connection lost: {exc}")

    def close(self) -> None:
        self.answer.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _read(self, *, is_end: bool) -> None:
        if self.answer.done():
            return
        try:
            answer = parse_answer(bytes(self._received), is_end=is_end)
        except ConnectFailed as error:
            self._fail(str(error))
            return
        if answer is not None:
            self.answer.set_result(answer)

    def _fail(self, text: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(ConnectFailed(text))


def parse_answer(received: bytes, *, is_end: bool) -> Answer | None:
    """Read a response; None while more is expected. Raises ConnectFailed if it is not HTTP."""
    # Only clients that fetch pay for importing it.
    from http.client import HTTPException, HTTPResponse, IncompleteRead

    if not received.startswith(b"HTTP/1."[: len(received)]):
        raise ConnectFailed(f"not an HTTP answer: {received[:40]!r}")
    if b"\r\n\r\n" not in received and b"\n\n" not in received:
        if is_end:
            raise ConnectFailed("closed before the answer was complete")
        return None
    response = HTTPResponse(cast("Any", _Received(received)), method="GET")
    try:
        response.begin()
        # A body without a length ends with the connection.
        if response.length is None and not response.chunked and not is_end:
            return None
        body = response.read()
    except IncompleteRead:
        if is_end:
            raise ConnectFailed("closed before the answer was complete") from None
        return None
    except (HTTPException, ValueError, OSError) as error:
        raise ConnectFailed(f"not an HTTP answer: {error!r}") from error
    location = response.getheader("Location") or ""
    return Answer(response.status, response.reason, location, body)


class _Received:
    """What `HTTPResponse` needs of a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def _split(url: str) -> SplitResult:
    problem = next(_problems(url), None)
    if problem is not None:
        raise InvalidArgument(
            f"URL {url[:200]!r}: {problem}; expected http://host/path or https://host/path"
        )
    return urlsplit(url)


def _problems(url: str) -> Iterator[str]:
    """Return what is wrong with a URL, if anything."""
    if any(not "!" <= mark <= "~" for mark in url):
        # They would end the line of the request.
        yield "blanks and other characters than ASCII must be percent-encoded"
    try:
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES:
            yield f"scheme {parts.scheme!r} is not supported"
        if not parts.hostname:
            yield "it has no host"
        if parts.username is not None or parts.password is not None:
            yield "user and password are not supported"
        if parts.port == 0:
            yield "port 0 cannot be connected to"
    except ValueError as error:
        yield str(error)
