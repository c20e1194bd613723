from __future__ import annotations

from itertools import chain, islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbopump.errors import FrameError, HeaderError, InvalidArgument, WireError
from turbopump.wire import framing
from turbopump.wire.command import Command, Serialize, request, whole_body
from turbopump.wire.framing import FrameDecoder
from vectors import frames

STREAM = b"".join(bytes.fromhex(vector["hex"]) for vector in frames()[:40])
COMMANDS = [framing.decode(bytes.fromhex(vector["hex"])) for vector in frames()[:40]]


@given(st.lists(st.integers(0, len(STREAM)), max_size=60))
def test_any_chunking_gives_the_same_commands(cuts: list[int]) -> None:
    decoder = FrameDecoder()
    received: list[Command] = []
    edges = [0, *sorted(cuts), len(STREAM)]
    for start, end in pairwise(edges):
        received += decoder.feed(STREAM[start:end])
    assert received == COMMANDS
    assert decoder.pending_bytes == 0


def test_byte_by_byte() -> None:
    decoder = FrameDecoder()
    stream = STREAM[:5000]
    received = [command for byte in stream for command in decoder.feed(bytes([byte]))]
    assert received == COMMANDS[: len(received)]
    assert received


def test_a_length_beyond_the_limit_is_rejected_before_the_frame_arrives() -> None:
    decoder = FrameDecoder(frame_bytes_max=1000)
    with pytest.raises(
        FrameError, match=r"a frame must be 4 to 1000 bytes, got 1001 \(at byte 0\)"
    ):
        list(decoder.feed((1001).to_bytes(4, "big")))


@pytest.mark.parametrize("length", [-1, -(2**31), 0, 3])
def test_an_invalid_length(length: int) -> None:
    with pytest.raises(FrameError, match=f"bytes, got {length} "):
        list(FrameDecoder().feed(length.to_bytes(4, "big", signed=True)))


def test_header_longer_than_its_frame() -> None:
    frame = (8).to_bytes(4, "big") + (5).to_bytes(4, "big") + b"abcd"
    with pytest.raises(FrameError, match=r"header of 5 bytes in a frame of 8 \(at byte 4\)"):
        list(FrameDecoder().feed(frame))


def test_frames_before_a_bad_one_are_delivered_and_the_position_counts_the_whole_stream() -> None:
    good = framing.encode(request(34))
    decoder = FrameDecoder()
    received: list[Command] = list(decoder.feed(good))
    frames_of_chunk = decoder.feed(good + b"\xff\xff\xff\xff")
    received.append(next(frames_of_chunk))
    with pytest.raises(FrameError) as failure:
        next(frames_of_chunk)
    assert [command.code for command in received] == [34, 34]
    assert failure.value.position == 2 * len(good)


@given(
    st.lists(st.integers(0, 400), max_size=12),
    st.sampled_from(
        [b"\xff\xff\xff\xff", (8).to_bytes(4, "big") + (5).to_bytes(4, "big") + b"abcd"]
    ),
)
def test_any_chunking_finds_an_error_at_the_same_place(cuts: list[int], bad: bytes) -> None:
    good = framing.encode(request(34))
    stream = good * 3 + bad
    with pytest.raises(FrameError) as expected:
        list(FrameDecoder().feed(stream))
    decoder = FrameDecoder()
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    chunks = [stream[start:end] for start, end in pairwise(edges)]
    commands = chain.from_iterable(map(decoder.feed, chunks))
    assert len(list(islice(commands, 3))) == 3
    with pytest.raises(FrameError) as failure:
        next(commands)
    assert str(failure.value) == str(expected.value)


def test_after_an_error_the_decoder_stays_failed() -> None:
    decoder = FrameDecoder()
    with pytest.raises(FrameError):
        list(decoder.feed(b"\xff\xff\xff\xff"))
    with pytest.raises(FrameError):
        list(decoder.feed(framing.encode(request(34))))


def test_a_header_error_counts_from_the_start_of_the_frame() -> None:
    frame = framing.encode(request(34)).replace(b'"code":34', b'"code":xx')
    with pytest.raises(HeaderError) as failure:
        framing.decode(frame)
    assert frame[failure.value.position :].startswith(b"xx")


def test_unknown_header_encoding() -> None:
    frame = bytearray(framing.encode(request(34)))
    frame[4] = 7
    with pytest.raises(HeaderError, match="header encoding 7 is neither JSON"):
        framing.decode(bytes(frame))


@pytest.mark.parametrize("data", [b"", b"\0", framing.encode(request(34)) * 2, STREAM[:30]])
def test_decode_expects_exactly_one_frame(data: bytes) -> None:
    with pytest.raises(WireError, match="expected one whole frame"):
        framing.decode(data)


def test_a_frame_beyond_the_limit_is_not_encoded() -> None:
    with pytest.raises(InvalidArgument, match="at most 100 bytes"):
        framing.encode(request(34, body=b"x" * 100), frame_bytes_max=100)


def test_body_pieces_are_not_copied() -> None:
    piece = memoryview(b"x" * 1000)
    parts = framing.encode_parts(request(11, body=[piece, piece]))
    assert parts[1] is piece
    assert framing.decode(b"".join(parts)).body == b"x" * 2000


def test_protocol_example_of_the_binary_form() -> None:
    frame = bytes.fromhex(
        "000000250100001f002200019900000001000000000000000268690000000800016100000001620102"
    )
    command = framing.decode(frame)
    assert command == Command(
        code=34,
        opaque=1,
        language=0,
        remark="hi",
        ext_fields={"a": "b"},
        body=b"\x01\x02",
        serialize=Serialize.ROCKETMQ,
    )
    assert framing.encode(command) == frame


def test_protocol_example_of_the_json_form() -> None:
    header = (
        b'{"code":105,"extFields":{"topic":"T"},"flag":0,"language":"PYTHON","opaque":1,'
        b'"serializeTypeCurrentRPC":"JSON","version":409}'
    )
    command = Command(code=105, opaque=1, ext_fields={"topic": "T"})
    assert framing.encode(command) == bytes.fromhex("000000810000007d") + header


@pytest.mark.parametrize("chunk_bytes", [1000, 70_000, 300_000])
def test_a_large_body_is_kept_in_pieces_until_it_is_requested_whole(chunk_bytes: int) -> None:
    commands = [
        Command(code=10, opaque=number, body=bytes([number]) * (100_000 + number))
        for number in range(3)
    ]
    stream = b"".join(map(framing.encode, commands))
    decoder = FrameDecoder()
    found: list[Command] = []
    for at in range(0, len(stream), chunk_bytes):
        found += decoder.feed(stream[at : at + chunk_bytes])
    assert all(isinstance(each.body, memoryview) for each in found)
    bodies = [whole_body(each) for each in found]
    assert all(isinstance(body, bytes) for body in bodies)
    assert bodies == [each.body for each in commands]


def test_an_oversized_header_is_rejected() -> None:
    header = b'{"code":1,"remark":"' + b"x" * framing.HEADER_BYTES_MAX + b'"}'
    frame = (4 + len(header)).to_bytes(4, "big") + len(header).to_bytes(4, "big") + header
    with pytest.raises(FrameError, match="header must be at most 1048576 bytes"):
        framing.decode(frame)
    with pytest.raises(InvalidArgument, match="header must be at most"):
        framing.encode(Command(1, remark="x" * framing.HEADER_BYTES_MAX))
