"""Mutated frames, random chunking: an error or a command, never a crash, hang or memory blow-up."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from header_catalogue import REQUEST_HEADERS
from turbopump.errors import TurbopumpError
from turbopump.wire import framing
from turbopump.wire.catalogue import REQUEST_BODIES, RESPONSE_BODIES
from turbopump.wire.command import Command, whole_body
from turbopump.wire.dissect import Dissector
from turbopump.wire.framing import FrameDecoder
from turbopump.wire.record import decode_records
from turbopump.wire.schema import Body
from vectors import frames

pytestmark = pytest.mark.slow

FRAMES = [bytes.fromhex(vector["hex"]) for vector in frames()]
FRAME_BYTES_MAX = 1 << 20


def mutated(frame: bytes, chance: random.Random) -> bytes:
    data = bytearray(frame)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data))
        match chance.randrange(5):
            case 0:
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                data[at] = chance.choice([0, 1, 0x22, 0x5C, 0x7B, 0x7F, 0x80, 0xFF])
            case 2:
                del data[at : at + chance.randint(1, 9)]
            case 3:
                data[at:at] = chance.randbytes(chance.randint(1, 9))
            case _:
                data[at:at] = data[: chance.randint(1, 40)]
        if not data:
            data = bytearray(frame)
    return bytes(data)


def with_true_length(data: bytes) -> bytes:
    """Correct the frame's length field, so that damage reaches the header and the body."""
    return (len(data) - 4).to_bytes(4, "big") + data[4:]


def chunks(stream: bytes, chance: random.Random) -> list[bytes]:
    found = []
    while stream:
        size = chance.choice([1, 2, 3, 7, 50, 1000, len(stream)])
        found.append(stream[:size])
        stream = stream[size:]
    return found


def look_into(command: Command) -> None:
    """Read everything in a command that a peer would read."""
    Dissector().fields(command)
    header = REQUEST_HEADERS.get(command.code)
    if header is not None:
        header.from_ext_fields(command.ext_fields)
    for kinds in (REQUEST_BODIES, RESPONSE_BODIES):
        kind = kinds.get(command.code)
        assert isinstance(command.body, bytes)
        if isinstance(kind, type) and issubclass(kind, Body):
            kind.decode(command.body)


def survive(data: bytes, chance: random.Random) -> int:
    decoder = FrameDecoder(FRAME_BYTES_MAX)
    count = 0
    try:
        for chunk in chunks(data, chance):
            for command in decoder.feed(chunk):
                count += 1
                framing.encode(command)
                look_into(command)
            assert decoder.pending_bytes <= FRAME_BYTES_MAX + 4
    except TurbopumpError as error:
        assert str(error)
    return count


def test_mutated_frames() -> None:
    chance = random.Random(20260)
    survived = 0
    for _ in range(6000):
        data = mutated(chance.choice(FRAMES), chance)
        if chance.random() < 0.7 and len(data) > 8:
            data = with_true_length(data)
        survived += survive(data + chance.choice(FRAMES), chance)
    assert survived > 1000, "too few mutated frames could be decoded"


def odd_json(chance: random.Random, depth: int = 0) -> str:
    """Generate JSON that is hard on parsers: deep, huge, with references and odd keys."""
    match chance.randrange(9 if depth < 6 else 6):
        case 0:
            return chance.choice(["1e999", "-0", "9" * chance.choice([20, 6000]), "1.5", "2\u0661"])
        case 1:
            return chance.choice(["true", "null", "nul", "NaN", "Infinity", "-"])
        case 2:
            return chance.choice(['"a"', '"\\ud800"', '"\\u0001"', '"\x01"', '"', '"\\x"'])
        case 3:
            path = chance.choice(["$", "$.a", "$.a[0]", "$[1]", "..", "@", "$.a[99999999999]"])
            return f'{{"$ref":"{path}"}}'
        case 4:
            size = chance.choice([10, 100, 900])
            return "[" * size + "]" * chance.choice([size, size - 1])
        case 5:
            return "{}"
        case 6:
            return "[" + ",".join(odd_json(chance, depth + 1) for _ in range(3)) + "]"
        case _:
            entries = (f"{odd_key(chance, depth)}:{odd_json(chance, depth + 1)}" for _ in range(3))
            return "{" + ",".join(entries) + "}"


def odd_key(chance: random.Random, depth: int) -> str:
    names = ['"a"', '"offsetTable"', '"code"', '"extFields"', "0", "-7", "true", "1.5"]
    return chance.choice([*names, odd_json(chance, depth + 3)])


def test_json_that_is_hard_to_read() -> None:
    chance = random.Random(3)
    for _ in range(4000):
        text = odd_json(chance).encode("utf-8", "replace")
        header = b'{"code":34,"opaque":1,"x":' + text + b',"extFields":{"a":' + text + b"}}"
        frames_of_it = [
            framing.encode(Command(code=chance.choice([34, 103, 220, 41, 105]), body=text)),
            (4 + len(header)).to_bytes(4, "big") + len(header).to_bytes(4, "big") + header,
        ]
        for data in frames_of_it:
            survive(data, chance)


def test_random_bytes() -> None:
    chance = random.Random(7)
    for _ in range(2000):
        survive(chance.randbytes(chance.randint(1, 200)), chance)


def test_mutated_records() -> None:
    chance = random.Random(99)
    bodies = [
        command.body
        for command in map(framing.decode, FRAMES)
        if isinstance(command.body, bytes) and command.body[4:8] == bytes.fromhex("daa320a7")
    ]
    read = 0
    for _ in range(4000):
        data = mutated(chance.choice(bodies), chance)
        try:
            for view in decode_records(data):
                _ = view.properties, view.body, view.message_id, str(view.born_host)
                read += 1
        except TurbopumpError as error:
            assert str(error)
    assert read > 1000


def test_a_peer_that_announces_a_large_frame_and_sends_nothing_costs_no_memory() -> None:
    tracemalloc.start()
    decoders = [FrameDecoder() for _ in range(1000)]
    announced = (16 * 1024 * 1024).to_bytes(4, "big")
    for decoder in decoders:
        assert not list(decoder.feed(announced))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * 1024 * 1024


def test_a_large_frame_in_small_chunks_is_not_copied_repeatedly() -> None:
    body = bytes(8 * 1024 * 1024)
    frame = framing.encode(Command(code=10, body=body))
    decoder = FrameDecoder()
    tracemalloc.start()
    received = [
        command
        for at in range(0, len(frame), 65536)
        for command in decoder.feed(frame[at : at + 65536])
    ]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [len(whole_body(command)) for command in received] == [len(body)]
    assert peak < 4 * len(body)
