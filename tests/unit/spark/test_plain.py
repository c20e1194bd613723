"""A plain connection: what is sent and heard, and how it ends."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from turbopump.errors import ConnectFailed, ConnectionLost, InvalidArgument, RequestTimeout
from turbopump.spark import plain
from turbopump.spark.plain import PlainConnection, connected, connections, readable
from turbopump.wire.command import FLAG_RESPONSE, Command
from turbopump.wire.framing import decode, encode

IN_TIME_MS = 10_000


@contextmanager
def pair() -> Iterator[tuple[PlainConnection, socket.socket]]:
    """Return a connection and the socket at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host, port = listening.getsockname()
        connection = connected(f"{host}:{port}")
        peer, _ = listening.accept()
        with peer:
            try:
                yield connection, peer
            finally:
                connection.close()
                connections.close()


def answer(opaque: int, remark: str = "") -> Command:
    return Command(0, flag=FLAG_RESPONSE, opaque=opaque, remark=remark or None)


def heard(connection: PlainConnection, count: int) -> list[Command]:
    found: list[Command] = []
    while len(found) < count:
        assert readable([connection], IN_TIME_MS)
        found += connection.received()
    return found


def test_requests_are_numbered_and_answers_come_in_any_order() -> None:
    with pair() as (connection, peer):
        numbers = [connection.send(Command(310, body=b"x"), IN_TIME_MS) for _ in range(3)]
        assert numbers == [0, 1, 2]
        peer.sendall(b"".join(encode(answer(number)) for number in (2, 0, 1)))
        assert [each.opaque for each in heard(connection, 3)] == [2, 0, 1]


def test_answers_in_pieces_are_put_together() -> None:
    with pair() as (connection, peer):
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        frame = encode(answer(7, "in pieces"))
        peer.sendall(frame[:9])
        assert readable([connection], IN_TIME_MS)
        assert connection.received() == []
        peer.sendall(frame[9:])
        assert heard(connection, 1)[0].remark == "in pieces"


def test_what_the_peer_asks_is_no_answer() -> None:
    with pair() as (connection, peer):
        peer.sendall(encode(Command(40)) + encode(answer(1)))
        assert [each.opaque for each in heard(connection, 1)] == [1]


def test_a_body_that_does_not_fit_into_the_socket_arrives_whole() -> None:
    with pair() as (connection, peer):
        body = memoryview(os.urandom(8 * 1024 * 1024))
        received = bytearray()

        def read() -> None:
            while chunk := peer.recv(1 << 20):
                received.extend(chunk)

        reading = threading.Thread(target=read)
        reading.start()
        connection.send(Command(320, body=[b"first", body[:3], body[3:]]), IN_TIME_MS)
        connection.close()
        reading.join()
        assert decode(bytes(received)).body == b"first" + body


def test_a_peer_that_does_not_read_is_given_up_in_time() -> None:
    with pair() as (connection, _):
        body = bytes(15 * 1024 * 1024)
        with pytest.raises(RequestTimeout, match="did not take request 320 within 30 ms"):
            connection.send(Command(320, body=body), 30)
        assert connection.fileno() < 0


def test_a_request_that_no_frame_can_hold_is_refused_and_nothing_is_written() -> None:
    with pair() as (connection, peer):
        with pytest.raises(InvalidArgument, match="at most 16777216 are allowed"):
            connection.send(Command(320, body=bytes(17 * 1024 * 1024)), IN_TIME_MS)
        connection.send(Command(34), IN_TIME_MS)
        assert decode(peer.recv(1000)).code == 34


def test_the_end_is_noticed_by_who_reads_and_who_writes() -> None:
    with pair() as (connection, peer):
        peer.close()
        assert readable([connection], IN_TIME_MS)
        with pytest.raises(ConnectionLost, match="closed by the peer"):
            connection.received()
        with pytest.raises(ConnectionLost):
            connection.send(Command(34), IN_TIME_MS)


def test_what_is_no_frame_ends_it() -> None:
    with pair() as (connection, peer):
        peer.sendall(b"HTTP/1.1 200 OK\r\n")
        assert readable([connection], IN_TIME_MS)
        with pytest.raises(ConnectionLost, match="malformed frame: frame of 1213486160 bytes"):
            connection.received()
        assert connection.fileno() < 0


def test_nobody_there_is_said_with_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = "{}:{}".format(*listening.getsockname())
    with pytest.raises(ConnectFailed, match=f"{address}: .*refused"):
        connected(address)
    with pytest.raises(ConnectFailed, match=r"x{70}:1: "):
        connected(f"{'x' * 70}:1")


def test_a_kept_connection_is_used_again_unless_the_peer_has_closed_it() -> None:
    with pair() as (connection, peer):
        connections.give_back(connection)
        assert connections.take(connection.address) is connection
        connections.give_back(connection)
        peer.close()
        assert readable([connection], IN_TIME_MS)
        other = connections.take(connection.address)
        assert other is not connection
        assert connection.fileno() < 0
        other.close()


def test_an_answer_that_comes_too_late_ends_a_kept_connection() -> None:
    with pair() as (connection, peer):
        connections.give_back(connection)
        peer.sendall(encode(answer(5)))
        assert readable([connection], IN_TIME_MS)
        other = connections.take(connection.address)
        assert other is not connection
        other.close()


def test_an_old_connection_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as (connection, _):
        monkeypatch.setattr(plain, "KEPT_MS", -1)
        assert not connection.is_fresh()
