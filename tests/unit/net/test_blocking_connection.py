"""A connection for threads: what it writes and reads, how it fails, and when it is reused."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import pytest

from turbopump.errors import (
    ConnectFailed,
    ConnectionLost,
    InvalidArgument,
    Overloaded,
    RequestTimeout,
)
from turbopump.net.blocking_connection import TRUSTED_MS, BlockingConnection, readable
from turbopump.net.blocking_pool import BlockingPool
from turbopump.net.limits import DEFAULT_LIMITS
from turbopump.net.request_protocol import RequestHook, RequestProtocol
from turbopump.net.sockets import SocketNetwork
from turbopump.testing import VirtualClock
from turbopump.wire.command import FLAG_ONEWAY, FLAG_RESPONSE, Command, Response, request
from turbopump.wire.framing import FrameDecoder, decode, encode

IN_TIME_MS = 10_000
JOIN_S = 10.0


def over(near: socket.socket, hooks: Sequence[RequestHook] = ()) -> BlockingConnection:
    clock = VirtualClock()
    return BlockingConnection("peer", near, RequestProtocol(clock, DEFAULT_LIMITS, hooks))


@contextmanager
def pair(hooks: Sequence[RequestHook] = ()) -> Iterator[tuple[BlockingConnection, socket.socket]]:
    """Return a connection and the socket at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        pool = BlockingPool(SocketNetwork(), hooks=hooks)
        connection = pool.take("{}:{}".format(*listening.getsockname()))
        peer, _ = listening.accept()
        with peer:
            try:
                yield connection, peer
            finally:
                connection.close()
                pool.close()


@contextmanager
def answering(
    peer: socket.socket, answer: Callable[[Command], Command | None]
) -> Iterator[list[Command]]:
    """Answer requests in a thread, and list them."""
    asked: list[Command] = []

    def serve() -> None:
        decoder = FrameDecoder()
        with suppress(OSError):
            while data := peer.recv(1 << 16):
                for command in decoder.feed(data):
                    asked.append(command)
                    if (response := answer(command)) is not None:
                        peer.sendall(encode(response))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield asked
    finally:
        peer.shutdown(socket.SHUT_RDWR)
        thread.join(JOIN_S)
        assert not thread.is_alive()


def answer(opaque: int, remark: str = "") -> Command:
    return Command(0, flag=FLAG_RESPONSE, opaque=opaque, remark=remark or None)


def received(connection: BlockingConnection, count: int) -> list[Response]:
    found: list[Response] = []
    while len(found) < count:
        assert readable([connection], IN_TIME_MS)
        found += connection.responses()
    return found


# --- requests -------------------------------------------------------------------------------------


def test_a_request_returns_its_response() -> None:
    with (
        pair() as (connection, peer),
        answering(peer, lambda asked: answer(asked.opaque, f"to {asked.opaque}")) as asked,
    ):
        for number in range(3):
            assert connection.request(Command(310), IN_TIME_MS).remark == f"to {number}"
        connection.oneway(Command(34), IN_TIME_MS)
        assert connection.request(Command(310), IN_TIME_MS).remark == "to 4"
        assert [each.flag & FLAG_ONEWAY for each in asked] == [0, 0, 0, FLAG_ONEWAY, 0]
        assert connection.is_usable()


class Counted(socket.socket):
    """A socket that records how it is used."""

    calls: ClassVar[list[str]] = []

    def send(self, *args: Any) -> int:
        self.calls.append("send")
        return super().send(*args)

    def recv(self, *args: Any) -> bytes:
        self.calls.append("recv")
        return super().recv(*args)

    def setsockopt(self, *args: Any) -> None:
        self.calls.append("setsockopt")
        super().setsockopt(*args)

    def settimeout(self, value: float | None) -> None:
        self.calls.append("settimeout")
        super().settimeout(value)

    def getsockopt(self, *args: Any) -> Any:
        self.calls.append("getsockopt")
        return super().getsockopt(*args)


def test_a_request_takes_three_system_calls(listening: socket.socket) -> None:
    """Two of them release the interpreter's lock: sending and receiving."""
    with Counted() as counted:
        counted.connect(listening.getsockname())
        far, _ = listening.accept()
        connection = over(counted)
        with answering(far, lambda command: answer(command.opaque)):
            connection.request(request(310, body=b"one"), IN_TIME_MS)
            Counted.calls.clear()
            for timeout_ms in (IN_TIME_MS, IN_TIME_MS - 1, IN_TIME_MS - 2):
                assert connection.is_usable()
                connection.request(request(310, body=b"other"), timeout_ms)
            connection.close()
        far.close()
    assert Counted.calls == ["getsockopt", "send", "recv"] * 3


def test_hooks_change_requests_and_see_responses() -> None:
    seen: list[tuple[int, int]] = []

    class Sign:
        def before_request(self, address: str, command: Command) -> Command:
            return Command(command.code, ext_fields={"signed": address})

        def after_response(self, address: str, request: Command, response: Command) -> None:
            seen.append((request.code, response.code))

    with pair([Sign()]) as (connection, peer), answering(peer, lambda asked: answer(asked.opaque)):
        connection.request(Command(310), IN_TIME_MS)
    with pair([Sign()]) as (connection, peer):
        connection.oneway(Command(34), IN_TIME_MS)
        assert decode(peer.recv(1000)).ext_fields == {"signed": connection.address}
    assert seen == [(310, 0)]


def test_a_hook_that_raises_decides_the_request_and_leaves_the_connection_usable() -> None:
    class Refuse:
        def before_request(self, address: str, command: Command) -> Command:
            raise PermissionError("not signed")

        def after_response(self, address: str, request: Command, response: Command) -> None: ...

    with pair([Refuse()]) as (connection, _):
        with pytest.raises(PermissionError, match="not signed"):
            connection.request(Command(310), IN_TIME_MS)
        assert connection.is_usable()


def test_a_request_without_a_response_times_out_and_closes_the_connection() -> None:
    with pair() as (connection, peer):
        with pytest.raises(RequestTimeout, match=r"no answer to request 310 of .* within 20 ms"):
            connection.request(Command(310), 20)
        assert decode(peer.recv(1000)).code == 310
        assert connection.fileno() < 0
        with pytest.raises(ConnectionLost, match="request 310 timed out"):
            connection.request(Command(310), 20)


def test_signals_do_not_extend_the_timeout() -> None:
    signals = 0

    def handle(*_: object) -> None:
        nonlocal signals
        signals += 1
        if signals == 200:
            signal.setitimer(signal.ITIMER_REAL, 0)

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with pair() as (connection, _):
            signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
            with pytest.raises(RequestTimeout):
                connection.request(request(10), 300)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert 0 < signals < 200


def test_write_time_counts_towards_the_timeout() -> None:
    clock = VirtualClock()

    class Slow(socket.socket):
        waits: ClassVar[list[float | None]] = []

        def send(self, *arguments: Any) -> int:
            clock.advance_ns(700_000_000)
            return super().send(*arguments)

        def recv(self, *_: Any) -> bytes:
            self.waits.append(self.gettimeout())
            clock.advance_ns(1_000_000_000)
            raise TimeoutError

    near, far = socket.socketpair()
    slow = Slow(fileno=near.detach())
    with far:
        connection = BlockingConnection("peer", slow, RequestProtocol(clock, DEFAULT_LIMITS, ()))
        with pytest.raises(RequestTimeout):
            connection.request(request(10), 1000)
    assert slow.waits[0] == pytest.approx(0.3, abs=0.01)


def test_a_peer_that_closes_instead_of_answering_is_a_lost_connection() -> None:
    with pair() as (connection, peer):
        connection.send(Command(310), IN_TIME_MS)
        peer.recv(1000)
        peer.close()
        with pytest.raises(ConnectionLost, match="closed by the peer"):
            connection.responses()
        assert not connection.is_usable()


def test_a_connection_is_not_reused_after_an_interrupted_request() -> None:
    def interrupt(number: int, _: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    main = threading.main_thread().ident or 0
    try:
        with pair() as (connection, peer):

            def ask_then_signal(asked: Command) -> None:
                signal.pthread_kill(main, signal.SIGUSR1)

            with answering(peer, ask_then_signal), pytest.raises(KeyboardInterrupt):
                connection.request(Command(310), IN_TIME_MS)
            assert not connection.is_clean
    finally:
        signal.signal(signal.SIGUSR1, before)


# --- many in flight -------------------------------------------------------------------------------


def test_requests_are_numbered_and_responses_arrive_in_any_order() -> None:
    with pair() as (connection, peer):
        numbers = [connection.send(Command(310, body=b"x"), IN_TIME_MS) for _ in range(3)]
        assert numbers == [0, 1, 2]
        peer.sendall(b"".join(encode(answer(number)) for number in (2, 0, 1)))
        assert [each.opaque for each in received(connection, 3)] == [2, 0, 1]


def test_fragmented_responses_are_reassembled() -> None:
    with pair() as (connection, peer):
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.send(Command(310), IN_TIME_MS)
        frame = encode(answer(0, "in pieces"))
        peer.sendall(frame[:9])
        assert readable([connection], IN_TIME_MS)
        assert connection.responses() == []
        peer.sendall(frame[9:])
        assert received(connection, 1)[0].remark == "in pieces"


def test_requests_of_the_peer_and_unknown_responses_are_ignored() -> None:
    with pair() as (connection, peer):
        connection.send(Command(310), IN_TIME_MS)
        peer.sendall(encode(Command(40)) + encode(answer(1)) + encode(answer(0)))
        assert [each.opaque for each in received(connection, 1)] == [0]


def test_a_body_that_does_not_fit_into_the_socket_arrives_whole() -> None:
    with pair() as (connection, peer):
        body = memoryview(os.urandom(8 * 1024 * 1024))
        read = bytearray()

        def read_all() -> None:
            while chunk := peer.recv(1 << 20):
                read.extend(chunk)

        reading = threading.Thread(target=read_all)
        reading.start()
        connection.send(Command(320, body=[b"first", body[:3], body[3:]]), IN_TIME_MS)
        connection.close()
        reading.join()
        assert decode(bytes(read)).body == b"first" + body


def test_a_peer_that_does_not_read_has_not_received_the_request() -> None:
    with pair() as (connection, _):
        body = bytes(15 * 1024 * 1024)
        with pytest.raises(Overloaded, match="read too little for 30 ms"):
            connection.send(Command(320, body=body), 30)
        assert connection.fileno() < 0


def test_a_request_too_large_for_a_frame_is_rejected_and_nothing_is_written() -> None:
    with pair() as (connection, peer):
        with pytest.raises(InvalidArgument, match="at most 16777216 bytes"):
            connection.send(Command(320, body=bytes(17 * 1024 * 1024)), IN_TIME_MS)
        connection.send(Command(34), IN_TIME_MS)
        assert decode(peer.recv(1000)).code == 34


def test_reading_and_writing_both_notice_the_end() -> None:
    with pair() as (connection, peer):
        peer.close()
        assert readable([connection], IN_TIME_MS)
        with pytest.raises(ConnectionLost, match="closed by the peer"):
            connection.responses()
        with pytest.raises(ConnectionLost, match="closed by the peer"):
            connection.send(Command(34), IN_TIME_MS)
        with pytest.raises(ConnectionLost, match="closed by the peer"):
            connection.oneway(Command(34), IN_TIME_MS)


def test_bytes_that_are_no_frame_close_it() -> None:
    with pair() as (connection, peer):
        peer.sendall(b"HTTP/1.1 200 OK\r\n")
        assert readable([connection], IN_TIME_MS)
        with pytest.raises(ConnectionLost, match=r"malformed frame: .* got 1213486160"):
            connection.responses()
        assert connection.fileno() < 0


def test_encoded_requests_that_the_peer_does_not_read_yet_do_not_block() -> None:
    requests = b"".join(b"%07d," % n for n in range(100_000))
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    connection = over(near)
    read = bytearray()

    def read_all_and_answer() -> None:
        while len(read) < len(requests) and (data := far.recv(1 << 16)):
            read.extend(data)
        far.sendall(b"abc")

    with far:
        connection.put(requests)
        connection.flush()
        far.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                read.extend(far.recv(1 << 16))
        assert 0 < len(read) < len(requests), "the rest waits for room"
        assert not connection.is_usable()
        far.settimeout(JOIN_S)
        reader = threading.Thread(target=read_all_and_answer)
        reader.start()
        room = memoryview(bytearray(10))
        try:
            assert connection.receive_into(room, IN_TIME_MS) == 3
            assert connection.receive_into(room[3:], 0) == 0
            with pytest.raises(RequestTimeout, match="no data from peer within 5 ms"):
                connection.receive_into(room[3:], 5)
        finally:
            connection.close()
            reader.join(JOIN_S)
    assert bytes(read) == requests
    assert bytes(room[:3]) == b"abc"


# --- the pool -------------------------------------------------------------------------------------


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


def address_of(listening: socket.socket) -> str:
    return f"127.0.0.1:{listening.getsockname()[1]}"


def test_an_unreachable_address_is_named_and_avoided_for_a_while(
    listening: socket.socket,
) -> None:
    clock = VirtualClock()
    pool = BlockingPool(SocketNetwork(), clock=clock)
    address = address_of(listening)
    listening.close()
    with pytest.raises(ConnectFailed, match=f"{address}: .*refused[^(]*$") as caught:
        pool.take(address)
    pause_ms = round(caught.value.retry_after * 1000)
    assert 0 < pause_ms <= 100
    with socket.create_server(("127.0.0.1", int(address.split(":")[1]))):
        with pytest.raises(ConnectFailed, match=r"refused.* \(0 ms ago\)"):
            pool.take(address)
        clock.advance_ns(pause_ms * 1_000_000)
        pool.give_back(pool.take(address))
    assert len(pool) == 1
    pool.close()
    with pytest.raises(ConnectFailed, match=r"x{70}:1: "):
        BlockingPool(SocketNetwork()).take(f"{'x' * 70}:1")


def test_a_peer_that_drops_connections_without_answering_is_avoided_too(
    listening: socket.socket,
) -> None:
    pool = BlockingPool(SocketNetwork(), clock=VirtualClock())
    address = address_of(listening)
    connection = pool.take(address)
    far, _ = listening.accept()
    far.close()
    assert readable([connection], IN_TIME_MS)
    with pytest.raises(ConnectionLost):
        connection.request(Command(310), 1000)
    pool.give_back(connection)
    with pytest.raises(ConnectFailed, match="closed without sending anything"):
        pool.request(address, Command(310), 1000)


def test_a_connection_is_reused_while_it_is_young_and_idle(listening: socket.socket) -> None:
    clock = VirtualClock()
    pool = BlockingPool(SocketNetwork(), clock=clock)
    address = address_of(listening)
    first = pool.take(address)
    far, _ = listening.accept()
    second = pool.take(address)
    assert second is not first, "one thread has exclusive use of it"
    second.close()
    pool.give_back(first)
    assert pool.take(address) is first
    pool.give_back(first)
    with far:
        far.send(b"x")
        assert readable([first], IN_TIME_MS)
        clock.advance_ns(TRUSTED_MS * 1_000_000)
        third = pool.take(address)
        assert third is not first, "it sent an unrequested frame"
    pool.give_back(third)
    clock.advance_ns((DEFAULT_LIMITS.idle_ms // 2 + 1) * 1_000_000)
    fourth = pool.take(address)
    assert fourth is not third
    pool.give_back(fourth)
    pool.drop_idle()
    fifth = pool.take(address)
    assert fifth is not fourth
    pool.give_back(fifth)
    pool.close_idle()
    assert len(pool) == 1
    clock.advance_ns((DEFAULT_LIMITS.idle_ms // 2 + 1) * 1_000_000)
    pool.close_idle()
    assert len(pool) == 0
    assert fifth.fileno() < 0


def test_a_connection_that_the_peer_has_closed_is_not_reused(listening: socket.socket) -> None:
    clock = VirtualClock()
    pool = BlockingPool(SocketNetwork(), clock=clock)
    for unused_ms in (0, TRUSTED_MS):
        connection = pool.take(address_of(listening))
        far, _ = listening.accept()
        pool.give_back(connection)
        far.close()
        assert readable([connection], IN_TIME_MS)
        clock.advance_ns(unused_ms * 1_000_000)
        again = pool.take(address_of(listening))
        assert again is not connection
        again.close()
        listening.accept()[0].close()


def test_threads_get_their_own_connections_again(listening: socket.socket) -> None:
    pool = BlockingPool(SocketNetwork())
    address = address_of(listening)
    taken = threading.Barrier(2)

    def use_twice(found: list[BlockingConnection]) -> None:
        found.append(pool.take(address))
        taken.wait(JOIN_S)
        pool.give_back(found[0])
        taken.wait(JOIN_S)
        found.append(pool.take(address))
        pool.give_back(found[1])

    used: list[list[BlockingConnection]] = [[], []]
    threads = [threading.Thread(target=use_twice, args=(each,)) for each in used]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    assert used[0][0] is used[0][1] is not used[1][0] is used[1][1]
    pool.close()


def test_a_second_connection_of_a_thread_is_closed_not_the_pooled_one(
    listening: socket.socket,
) -> None:
    pool, address = BlockingPool(SocketNetwork()), address_of(listening)
    one, other = pool.take(address), pool.take(address)
    pool.give_back(one)
    # From now on any thread may use it.
    pool.give_back(other)
    assert (one.is_open, other.is_open, len(pool)) == (True, False, 1)
    pool.close()


def test_a_closed_pool_closes_returned_connections(listening: socket.socket) -> None:
    pool = BlockingPool(SocketNetwork())
    connection = pool.take(address_of(listening))
    pool.close()
    pool.give_back(connection)
    assert connection.fileno() < 0
    with pytest.raises(ConnectFailed, match="the pool is closed"):
        pool.oneway(address_of(listening), Command(34), 1000)
