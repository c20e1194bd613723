"""Frames in a byte stream: a length, the header's length and encoding, the header, the body."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from turbopump import core
from turbopump.errors import FrameError, InvalidArgument, WireError
from turbopump.wire.command import (
    Buffer,
    Command,
    body_parts,
    command_of,
    encode_header,
)

FRAME_BYTES_MAX = core.FRAME_BYTES_MAX
HEADER_BYTES_MAX = core.HEADER_BYTES_MAX

_PREFIX = struct.Struct(">ii")
_LENGTH_BYTES = 4


def encode(command: Command, frame_bytes_max: int = FRAME_BYTES_MAX) -> bytes:
    """Return the whole frame in one piece."""
    return b"".join(encode_parts(command, frame_bytes_max))


def encode_parts(command: Command, frame_bytes_max: int = FRAME_BYTES_MAX) -> list[Buffer]:
    """Return the frame as its first piece and the pieces of its body, which are not copied."""
    header = encode_header(command)
    parts = body_parts(command.body) if command.body else ()
    length = _LENGTH_BYTES + len(header) + sum(map(len, parts))
    if length > frame_bytes_max:
        raise too_long(length, frame_bytes_max)
    if len(header) > HEADER_BYTES_MAX:
        raise InvalidArgument(f"header must be at most {HEADER_BYTES_MAX} bytes, got {len(header)}")
    return [_PREFIX.pack(length, command.serialize << 24 | len(header)) + header, *parts]


def frame_length(parts: Sequence[Buffer]) -> int:
    """Return the length that an encoded frame states."""
    return sum(map(len, parts)) - _LENGTH_BYTES


def too_long(length: int, frame_bytes_max: int) -> InvalidArgument:
    return InvalidArgument(f"a frame must be at most {frame_bytes_max} bytes, got {length}")


class FrameDecoder:
    """Splits a byte stream into commands; see `turbopump.core.FrameDecoder`."""

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._frames = core.FrameDecoder(frame_bytes_max)
        self._error: WireError | None = None

    @property
    def pending_bytes(self) -> int:
        """Bytes received of an incomplete frame."""
        return self._frames.pending_bytes

    def feed(self, chunk: bytes) -> Iterator[Command]:
        """Yield the commands that the chunk completes; exhaust it before the next chunk."""
        if self._error is not None:
            raise self._error
        try:
            for frame in self._frames.feed(chunk):
                yield command_of(frame)
        except WireError as error:
            self._error = error
            raise


def decode(frame: bytes, frame_bytes_max: int = FRAME_BYTES_MAX) -> Command:
    """Read exactly one whole frame."""
    decoder = FrameDecoder(frame_bytes_max)
    commands = list(decoder.feed(frame))
    if decoder.pending_bytes or len(commands) != 1:
        whole = len(frame) - decoder.pending_bytes
        raise FrameError(f"expected one whole frame, found {len(commands)} and a rest", whole)
    return commands[0]
