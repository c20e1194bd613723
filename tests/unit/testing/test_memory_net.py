from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from example_counts import at_most
from turbopump.errors import ConnectFailed, InvalidArgument, ListenFailed
from turbopump.testing import (
    LinkQuality,
    MemoryNetwork,
    run_virtual,
    virtual_loop,
    virtual_time,
    wait_until,
)
from turbopump.testing.memory_transport import WINDOW_BYTES


class End(asyncio.Protocol):
    """One end of a connection that records what happens to it."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.received = bytearray()
        self.chunks = 0
        self.error: Exception | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.events.append("made")

    def data_received(self, data: bytes) -> None:
        assert data
        self.received += data
        self.chunks += 1

    def eof_received(self) -> None:
        self.events.append("eof")

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.error = exc
        self.events.append("lost")


async def pair(network: MemoryNetwork) -> tuple[End, End]:
    far = End()
    listener = await network.host("b").listen("b", 0, lambda: far)
    near = await network.host("a").connect("b", listener.port, End)
    await listener.close()
    return near, far


@settings(max_examples=at_most(30))
@given(
    st.lists(st.binary(max_size=5000), max_size=20),
    st.floats(0, 50),
    st.floats(0, 50),
    st.floats(0, 1),
    st.integers(0, 100),
)
def test_bytes_arrive_whole_and_in_order(
    writes: list[bytes], latency: float, jitter: float, cut: float, seed: int
) -> None:
    async def main() -> None:
        quality = LinkQuality(latency=latency / 1000, jitter=jitter / 1000, cut_chance=cut)
        near, far = await pair(MemoryNetwork(quality))
        for data in writes:
            near.transport.write(data)
            await asyncio.sleep(0.001)
        near.transport.close()
        await wait_until(lambda: "lost" in far.events)
        assert far.received == b"".join(writes)
        assert [*far.events[:1], *far.events[-2:]] == ["made", "eof", "lost"]
        assert far.error is None

    run_virtual(main(), seed)


@virtual_time()
async def test_latency_and_names_are_as_set() -> None:
    near, far = await pair(MemoryNetwork(LinkQuality(latency=0.04, jitter=0)))
    start = virtual_loop().time()
    near.transport.write(b"x")
    await wait_until(lambda: far.received)
    assert 0.04 <= round(virtual_loop().time() - start, 9) <= 0.046
    assert near.transport.get_extra_info("peername") == far.transport.get_extra_info("sockname")
    assert near.transport.get_extra_info("sockname")[0] == "a"
    assert near.transport.get_extra_info("peername")[0] == "b"


@virtual_time()
async def test_a_paused_reader_pauses_the_writer_and_bounds_the_buffer() -> None:
    near, far = await pair(MemoryNetwork())
    far.transport.pause_reading()
    while "pause" not in near.events:
        near.transport.write(bytes(1000))
    _, high = near.transport.get_write_buffer_limits()
    await asyncio.sleep(1)
    assert near.transport.get_write_buffer_size() <= high + 1000
    assert far.received == b""
    far.transport.resume_reading()
    await wait_until(lambda: "resume" in near.events)
    await wait_until(lambda: len(far.received) >= WINDOW_BYTES)
    assert near.events.count("pause") == near.events.count("resume") == 1


@virtual_time()
async def test_an_aborted_connection_is_reset_at_the_peer() -> None:
    near, far = await pair(MemoryNetwork())
    near.transport.write(b"lost")
    near.transport.abort()
    await wait_until(lambda: "lost" in far.events)
    assert isinstance(far.error, ConnectionResetError)
    assert near.events[-1] == "lost"
    assert near.error is None


@virtual_time()
async def test_an_abort_travels_as_long_as_bytes_and_does_not_overtake_them() -> None:
    near, far = await pair(MemoryNetwork(LinkQuality(latency=0.1, jitter=0)))
    near.transport.write(b"sent already")
    await asyncio.sleep(0.05)
    start = virtual_loop().time()
    near.transport.abort()
    await wait_until(lambda: "lost" in near.events)
    assert "lost" not in far.events
    await wait_until(lambda: "lost" in far.events)
    assert 0.1 <= virtual_loop().time() - start <= 0.11
    assert far.received == b"sent already"
    assert isinstance(far.error, ConnectionResetError)


@virtual_time()
async def test_an_abort_discards_unsent_bytes() -> None:
    near, far = await pair(MemoryNetwork())
    far.transport.pause_reading()
    near.transport.write(bytes(WINDOW_BYTES + 1000))
    near.transport.abort()
    assert near.transport.get_write_buffer_size() == 0
    await wait_until(lambda: "lost" in far.events)
    assert len(far.received) == WINDOW_BYTES, "received data is read, as from a socket's buffer"


class Broken(End):
    """Fails on any input."""

    def data_received(self, data: bytes) -> None:
        raise RuntimeError("cannot read")

    def eof_received(self) -> None:
        raise RuntimeError("cannot end")


@pytest.mark.parametrize("call", ["data_received", "eof_received"])
@virtual_time()
async def test_a_protocol_that_raises_is_reported_and_closed(call: str) -> None:
    reported: list[dict[str, Any]] = []
    virtual_loop().set_exception_handler(lambda _, context: reported.append(context))
    network, far = MemoryNetwork(), Broken()
    await network.host("b").listen("b", 1, lambda: far)
    near = await network.host("a").connect("b", 1, End)
    if call == "data_received":
        near.transport.write(b"x")
    else:
        near.transport.close()
    await wait_until(lambda: "lost" in far.events and "lost" in near.events)
    (context,) = reported
    assert context["message"] == f"Fatal error: protocol.{call}() call failed."
    assert context["exception"] is far.error
    assert context["protocol"] is far
    assert network.open_connections == 0


@virtual_time()
async def test_writing_to_a_closed_peer_is_a_reset() -> None:
    network = MemoryNetwork(LinkQuality(latency=0.01))
    near, far = await pair(network)
    near.transport.pause_reading()
    far.transport.close()
    near.transport.write(bytes(1_000_000))
    await wait_until(lambda: "lost" in near.events)
    assert isinstance(near.error, ConnectionResetError)


@virtual_time()
async def test_bytes_sent_before_closing_arrive_before_the_reset() -> None:
    near, far = await pair(MemoryNetwork(LinkQuality(latency=0.01, jitter=0, cut_chance=0)))
    far.transport.write(b"the last answer")
    far.transport.close()
    near.transport.write(b"one more request")
    await wait_until(lambda: "lost" in near.events)
    assert near.received == b"the last answer"


@virtual_time()
async def test_cutting_resets_both_ends() -> None:
    network = MemoryNetwork()
    near, far = await pair(network)
    assert network.open_connections == 1
    assert network.cut("a", "c") == 0
    assert network.cut("a", "b") == 1
    await wait_until(lambda: "lost" in near.events and "lost" in far.events)
    assert network.open_connections == 0


@virtual_time()
async def test_a_partition_delays_and_never_loses() -> None:
    network = MemoryNetwork()
    near, far = await pair(network)
    near.transport.write(b"before ")
    network.partition("a", "b")
    near.transport.write(b"during ")
    far.transport.write(b"back")
    await asyncio.sleep(60)
    assert far.received == near.received == b""
    with pytest.raises(ConnectFailed, match="no answer within 3000 ms"):
        await network.host("a").connect("b", 1, End)
    network.heal()
    near.transport.write(b"after")
    await wait_until(lambda: far.received == b"before during after" and near.received == b"back")


@virtual_time()
async def test_a_connection_closed_during_a_partition_is_noticed_after_it() -> None:
    network = MemoryNetwork()
    near, far = await pair(network)
    network.partition("a", "b")
    near.transport.abort()
    await asyncio.sleep(60)
    assert "lost" not in far.events
    network.heal()
    far.transport.write(b"anybody there?")
    await wait_until(lambda: "lost" in far.events)
    assert isinstance(far.error, ConnectionResetError)


@virtual_time()
async def test_bytes_sent_before_closing_in_a_partition_arrive_after_it() -> None:
    network = MemoryNetwork()
    near, far = await pair(network)
    network.partition("a", "b")
    near.transport.write(b"last words")
    near.transport.close()
    await wait_until(lambda: "lost" in near.events, 1)
    await asyncio.sleep(60)
    assert far.received == b""
    network.heal()
    await wait_until(lambda: far.events[-2:] == ["eof", "lost"])
    assert far.received == b"last words"
    assert network.open_connections == 0


@virtual_time()
async def test_lost_bytes_are_lost_one_way_only() -> None:
    network = MemoryNetwork()
    near, far = await pair(network)
    network.lose("a", "b")
    near.transport.write(b"into the void")
    far.transport.write(b"heard")
    await wait_until(lambda: near.received == b"heard")
    network.stop_losing()
    near.transport.write(b"again")
    await wait_until(lambda: far.received == b"again")


@virtual_time()
async def test_a_frozen_host_receives_nothing_until_it_thaws() -> None:
    network = MemoryNetwork()
    near, far = await pair(network)
    network.stop_reading("b")
    near.transport.write(b"x")
    await asyncio.sleep(10)
    assert far.received == b""
    network.resume_reading("b")
    await wait_until(lambda: far.received == b"x")


@virtual_time()
async def test_connecting_may_be_refused() -> None:
    network = MemoryNetwork()
    listener = await network.host("b").listen("0.0.0.0", 9876, End)
    assert (listener.host, listener.port) == ("b", 9876)
    network.refuse("b")
    with pytest.raises(ConnectFailed, match="b:9876: connection refused"):
        await network.host("a").connect("b", 9876, End)
    network.accept("b")
    await network.host("a").connect("b", 9876, End)
    await network.host("b").connect("127.0.0.1", 9876, End)
    with pytest.raises(ConnectFailed, match="refused"):
        await network.host("a").connect("b", 1, End)


@virtual_time()
async def test_hosts_listen_at_themselves_only() -> None:
    with pytest.raises(InvalidArgument, match="host 'c': b can only listen at itself"):
        await MemoryNetwork().host("b").listen("c", 0, End)


@pytest.mark.parametrize(
    ("quality", "text"),
    [
        ({"latency": -1}, "latency must be at least 0 seconds, got -1"),
        ({"jitter": timedelta(-1)}, "jitter must be at least 0 seconds, got datetime"),
        ({"cut_chance": 2}, "cut_chance must be 0 to 1, got 2"),
    ],
)
def test_invalid_link_settings_are_rejected(quality: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        LinkQuality(**quality)


@virtual_time()
async def test_nothing_passes_to_or_from_a_host_that_is_isolated() -> None:
    network = MemoryNetwork()
    near, far = await pair(network)
    network.isolate("b")
    near.transport.write(b"held up")
    await asyncio.sleep(60)
    assert far.received == b""
    with pytest.raises(ConnectFailed, match="no answer"):
        await network.host("newcomer").connect("b", 1, End)
    network.heal()
    await asyncio.sleep(1)
    assert far.received == b"held up"


@virtual_time()
async def test_a_host_that_is_killed_makes_room_for_another_of_its_name() -> None:
    network = MemoryNetwork()
    killed = network.host("b")
    await killed.listen("b", 10911, End)
    near = await network.host("a").connect("b", 10911, End)
    network.kill(killed)
    await asyncio.sleep(1)
    assert isinstance(near.error, ConnectionResetError)
    with pytest.raises(ConnectFailed, match="b was killed"):
        await killed.connect("a", 1, End)
    with pytest.raises(ListenFailed, match="b was killed"):
        await killed.listen("b", 10911, End)
    await network.host("b").listen("b", 10911, End)
    await network.host("a").connect("b", 10911, End)
