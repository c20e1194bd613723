"""Bytes that are not frames, and broken frames: the server closes, reports why, and continues."""

from __future__ import annotations

import asyncio
import logging
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netkit import ECHO, FAIL, NEVER, SLOW, SMALL, RawPeer, in_flight, world
from turbopump.net.connection import Connection
from turbopump.net.router import Router
from turbopump.testing import LinkQuality, run_virtual, virtual_time, wait_until
from turbopump.wire.command import Command, Serialize
from turbopump.wire.framing import encode

pytestmark = pytest.mark.slow


def frame(header: bytes, body: bytes = b"", kind: int = 0) -> bytes:
    length = 4 + len(header) + len(body)
    return struct.pack(">ii", length, kind << 24 | len(header)) + header + body


BAD = {
    "too short for itself": struct.pack(">ii", 3, 0),
    "negative length": struct.pack(">ii", -1, 0),
    "longer than allowed": struct.pack(">ii", SMALL.frame_bytes_max + 1, 0),
    "header longer than frame": struct.pack(">ii", 8, 9) + bytes(8),
    "no JSON": frame(b"{nonsense"),
    "no object": frame(b"[1]"),
    "no code": frame(b"{}"),
    "unknown encoding": frame(b"{}", kind=7),
    "short binary header": frame(b"\x00", kind=1),
    "HTTP": b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n",
}


@pytest.mark.parametrize("name", BAD)
@virtual_time()
async def test_a_malformed_frame_closes_its_connection_with_a_reason(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(limits=SMALL) as here:
        other = await here.connect()
        peer = await here.connect_raw("fuzzer")
        peer.transport.write(encode(Command(ECHO, opaque=7)) + BAD[name])
        await wait_until(lambda: peer.is_lost)
        assert b'"opaque":7' in peer.received, "earlier requests are answered"
        assert (await other.request(Command(ECHO), 1000)).code == 0
        assert len(here.server.connections) == 1
    (reason,) = [record for record in caplog.records if "malformed" in record.getMessage()]
    assert reason.levelno == logging.WARNING
    assert "fuzzer:" in reason.getMessage()
    assert "at byte" in reason.getMessage()


@virtual_time()
async def test_an_unfinished_frame_holds_its_connection_until_it_is_idle() -> None:
    async with world() as here:
        peer = await here.connect_raw("fuzzer")
        peer.transport.write(encode(Command(ECHO, body=bytes(1000)))[:-1])
        await asyncio.sleep(119)
        assert not peer.is_lost
        await wait_until(lambda: peer.is_lost)


VALID = [
    encode(
        Command(code, opaque=opaque, flag=flag, serialize=serialize, ext_fields=fields, body=body)
    )
    for code in (ECHO, SLOW, NEVER, FAIL, 999)
    for opaque, flag, fields, body in (
        (0, 0, None, b""),
        (1, 2, {"ms": "5"}, b"body"),
        (-1, 1, {"topic": "T", "queueId": "0"}, bytes(300)),
    )
    for serialize in Serialize
]


@st.composite
def mutated_stream(draw: st.DrawFn) -> bytes:
    """Several valid frames, with some bytes changed, removed or inserted."""
    data = bytearray(b"".join(draw(st.lists(st.sampled_from(VALID), min_size=1, max_size=6))))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.sampled_from(("change", "remove", "insert", "cut"))):
            case "change" if data:
                data[at] = draw(st.integers(0, 255))
            case "remove":
                del data[at : at + draw(st.integers(1, 20))]
            case "insert":
                data[at:at] = draw(st.binary(max_size=20))
            case _:
                del data[at:]
    return bytes(data)


@settings(max_examples=150)
@given(st.lists(mutated_stream(), min_size=1, max_size=4), st.integers(0, 1000))
def test_no_stream_of_bytes_harms_the_server(streams: list[bytes], seed: int) -> None:
    async def main() -> None:
        async with world(
            limits=SMALL, quality=LinkQuality(latency=0.001, jitter=0.005, cut_chance=0.5)
        ) as here:
            other = await here.connect()
            peers = [await here.connect_raw("fuzzer") for _ in streams]
            for peer, stream in zip(peers, streams, strict=True):
                peer.transport.write(stream)
            await asyncio.sleep(2)
            assert (await other.request(Command(ECHO, body=b"alive"), 1000)).body == b"alive"
            for peer in peers:
                peer.transport.abort()
            await wait_until(lambda: len(here.server.connections) == 1)

    logging.disable(logging.CRITICAL)
    try:
        run_virtual(main(), seed)
    finally:
        logging.disable(logging.NOTSET)


@settings(max_examples=100)
@given(mutated_stream(), st.integers(0, 1000))
def test_no_stream_of_bytes_harms_a_client(stream: bytes, seed: int) -> None:
    async def main() -> None:
        async with world(quality=LinkQuality(latency=0.001, jitter=0.005, cut_chance=0.5)) as here:
            peers: list[RawPeer] = []

            def accept() -> RawPeer:
                peers.append(RawPeer())
                return peers[-1]

            listener = await here.network.host("liar").listen("liar", 0, accept)
            connection = await here.network.host("client").connect(
                "liar", listener.port, lambda: Connection(Router(), here.deadlines)
            )
            call = asyncio.create_task(connection.request(Command(ECHO), 1000))
            peers[0].transport.write(stream)
            await asyncio.wait([call])
            connection.abort("done")
            await connection.wait_closed()
            assert len(in_flight(connection)) == 0

    logging.disable(logging.CRITICAL)
    try:
        run_virtual(main(), seed)
    finally:
        logging.disable(logging.NOTSET)
