"""A peer that writes arbitrary bytes: hand-made frames over plain sockets."""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import struct
import termios
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

WAIT_S = 15.0
OTHER_HOST = "127.0.0.66"
"""Source address of connections: not the host of the well-behaved clients."""
_LENGTHS = struct.Struct(">ii")


def header(code: int, fields: Mapping[str, object] | None = None, **more: object) -> bytes:
    """Return a frame's header as JSON."""
    texts = {name: str(value) for name, value in (fields or {}).items()}
    command = {"code": code, "flag": 0, "opaque": 1, "language": "JAVA", "version": 399}
    return json.dumps({**command, "extFields": texts, **more}).encode()


def frame(code: int, fields: Mapping[str, object] | None = None, body: bytes = b"") -> bytes:
    """Return a whole request."""
    head = header(code, fields)
    return _LENGTHS.pack(4 + len(head) + len(body), len(head)) + head + body


class NoAnswer(Exception):
    """A request got no answer."""


class Peer:
    """One connection."""

    def __init__(self, address: str, source: str = "") -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection(
            (host, int(port)), timeout=WAIT_S, source_address=(source, 0)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, discarding unread data."""
        self._socket.close()

    def write(self, data: bytes) -> bool:
        """Write; return whether the other side accepted it."""
        try:
            self._socket.sendall(data)
        except OSError:
            return False
        return True

    def wait_until_received(self) -> None:
        """Wait until the other host has received everything; a close may discard unsent data."""
        deadline = time.monotonic() + WAIT_S
        while self._unsent_bytes() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _unsent_bytes(self) -> int:
        answer = fcntl.ioctl(self._socket, termios.TIOCOUTQ, struct.pack("i", 0))
        unsent: int = struct.unpack("i", answer)[0]
        return unsent

    def ask(
        self, code: int, fields: Mapping[str, object] | None = None, body: bytes = b""
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request; return the header and the body of the answer, or raise `NoAnswer`."""
        self.write(frame(code, fields, body))
        try:
            (length,) = struct.unpack(">i", self._read(4))
            (head_bytes,) = struct.unpack(">i", self._read(4))
            head_bytes &= 0xFF_FFFF
            head = json.loads(self._read(head_bytes))
            return head, self._read(length - 4 - head_bytes)
        except (OSError, ValueError) as error:
            raise NoAnswer(f"request {code}: {type(error).__name__} {error}") from error

    def drain(self) -> None:
        """Read until the other side closes, or is silent for a second."""
        self._socket.settimeout(1.0)
        with contextlib.suppress(OSError):
            while self._socket.recv(65536):
                pass

    def _read(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            piece = self._socket.recv(count - len(found))
            if not piece:
                raise OSError("closed")
            found += piece
        return found


def ask(
    address: str, code: int, fields: Mapping[str, object] | None = None, body: bytes = b""
) -> tuple[dict[str, Any], bytes]:
    """Send a request over a new connection; return the answer."""
    try:
        with Peer(address) as peer:
            return peer.ask(code, fields, body)
    except OSError as error:
        raise NoAnswer(f"{address}: {error}") from error


def answer_ms(address: str, code: int) -> float:
    """Return how long an answer takes."""
    begin = time.monotonic()
    ask(address, code)
    return (time.monotonic() - begin) * 1000
