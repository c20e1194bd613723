"""Frames in a byte stream: a length, the header's length and encoding, the header, the body."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from turbopump.errors import FrameError, InvalidArgument, WireError
from turbopump.wire.command import (
    NO_TYPED_HEADERS,
    Buffer,
    Command,
    Serialize,
    TypedHeaders,
    body_parts,
    decode_header,
    decode_typed,
    encode_header,
)

FRAME_BYTES_MAX = 16 * 1024 * 1024

HEADER_BYTES_MAX = 1024 * 1024
"""Far more than the 32 kB of properties that a message may have, however they are escaped."""

_PREFIX = struct.Struct(">ii")
_LENGTH = struct.Struct(">i")
_MARK = struct.Struct(">I")
_LENGTHS = struct.Struct(">iI")
_PREFIX_BYTES = _PREFIX.size
_LENGTH_BYTES = 4
_JSON = Serialize.JSON.value
_HEADER_LENGTH_BITS = 0xFF_FFFF
_LARGE_BYTES = 65536
"""Bodies of this size or more are not copied; callers that keep one for long should copy it."""


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
    """Splits a byte stream into commands, however it is chunked.

    Holds at most one frame and the last chunk. After an error the stream cannot be followed
    further, and every later call raises the same error.
    """

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._frame_bytes_max = frame_bytes_max
        self.typed: TypedHeaders = NO_TYPED_HEADERS
        """Requests whose fields are converted while they are read."""
        self._pending = bytearray()
        self._missing = 0
        self._consumed = 0
        self._error: WireError | None = None
        # The chunk being read, and where its next frame begins.
        self._chunk = b""
        self._next_at = 0

    @property
    def pending_bytes(self) -> int:
        """Bytes received of an incomplete frame."""
        return len(self._pending)

    @property
    def held_bytes(self) -> int:
        """Bytes received of frames that are incomplete or not taken yet."""
        return len(self._pending) + len(self._chunk) - self._next_at

    def clear(self) -> None:
        """Free all buffers; the decoder cannot be used afterwards."""
        self._pending = bytearray()
        self._chunk, self._next_at = b"", 0

    def feed(self, chunk: bytes) -> Iterator[Command]:
        """Yield the commands that the chunk completes; exhaust it before the next chunk.

        Errors count their position from the start of the stream.
        """
        if self._error is not None:
            raise self._error
        at = 0
        if self._pending and not self._missing:
            chunk = bytes(self._pending + chunk)
            self._pending.clear()
        try:
            if self._pending:
                at = self._missing - len(self._pending)
                if at > len(chunk):
                    self._pending += chunk
                    return
                yield self._begun(chunk, at)
            end = len(chunk)
            length_of, length_max = _LENGTH.unpack_from, self._frame_bytes_max
            while end - at >= _LENGTH_BYTES:
                (length,) = length_of(chunk, at)
                if not _LENGTH_BYTES <= length <= length_max:
                    wrong = f"a frame must be 4 to {length_max} bytes, got {length}"
                    raise FrameError(wrong, self._consumed + at)
                frame_end = at + _LENGTH_BYTES + length
                if frame_end > end:
                    break
                command = self._command(chunk, at, frame_end)
                self._chunk, self._next_at = chunk, frame_end
                yield command
                at = frame_end
        except WireError as error:
            self._error = error
            raise
        self._chunk, self._next_at = b"", 0
        if at < end:
            self._keep(chunk, at)
        else:
            self._consumed += at

    def _begun(self, chunk: bytes, end: int) -> Command:
        """Finish the frame that earlier chunks began; the rest of this one is not copied."""
        frame = self._pending
        frame += memoryview(chunk)[:end]
        self._pending = bytearray()
        whole = bytes(frame) if len(frame) < _LARGE_BYTES else memoryview(frame)
        command = self._command(whole, 0, len(frame))
        # What follows counts from the start of its chunk.
        self._consumed += len(frame) - end
        return command

    def _command(self, data: bytes | memoryview, at: int, end: int) -> Command:
        """Read the frame between two positions of a chunk."""
        (mark,) = _MARK.unpack_from(data, at + _LENGTH_BYTES)
        header_at = at + _PREFIX_BYTES
        header_end = header_at + (mark & _HEADER_LENGTH_BITS)
        if header_end > end or header_end - header_at > HEADER_BYTES_MAX:
            raise _wrong_header(at, header_end, end).shifted(self._consumed)
        header = bytes(data[header_at:header_end])
        is_large = end - header_end >= _LARGE_BYTES
        body = memoryview(data)[header_end:end] if is_large else data[header_end:end]
        if mark >> 24 == _JSON and self.typed:
            command = decode_typed(header, self.typed, body)
            if command is not None:
                return command
        try:
            return decode_header(header, mark >> 24, body)
        except WireError as error:
            raise error.shifted(self._consumed + header_at) from error

    def _keep(self, data: bytes, at: int) -> None:
        """Keep the rest of the chunk until the rest of its frame arrives."""
        rest = memoryview(data)[at:]
        self._consumed += at
        self._pending += rest
        known = len(rest) >= _LENGTH_BYTES
        # Known once the length word is complete; until then any byte may complete it.
        self._missing = _LENGTH_BYTES + int.from_bytes(rest[:_LENGTH_BYTES], "big") if known else 0


def decode(frame: bytes, frame_bytes_max: int = FRAME_BYTES_MAX) -> Command:
    """Read exactly one whole frame."""
    decoder = FrameDecoder(frame_bytes_max)
    commands = list(decoder.feed(frame))
    if decoder.pending_bytes or len(commands) != 1:
        whole = len(frame) - decoder.pending_bytes
        raise FrameError(f"expected one whole frame, found {len(commands)} and a rest", whole)
    return commands[0]


def read_header(data: memoryview, at: int, end: int) -> tuple[Command, int, int] | int:
    """Read the frame at a position without its body, which lies between the positions returned.

    While the frame is incomplete, returns where it will end, as far as known.
    """
    if end - at < _PREFIX_BYTES:
        return at + _PREFIX_BYTES
    length: int
    mark: int
    length, mark = _LENGTHS.unpack_from(data, at)
    if not _LENGTH_BYTES <= length <= FRAME_BYTES_MAX:
        raise FrameError(f"a frame must be 4 to {FRAME_BYTES_MAX} bytes, got {length}", at)
    frame_end = at + _LENGTH_BYTES + length
    header_end = at + _PREFIX_BYTES + (mark & _HEADER_LENGTH_BITS)
    if header_end > frame_end or header_end - at - _PREFIX_BYTES > HEADER_BYTES_MAX:
        raise _wrong_header(at, header_end, frame_end)
    if frame_end > end:
        return frame_end
    header = bytes(data[at + _PREFIX_BYTES : header_end])
    return decode_header(header, mark >> 24), header_end, frame_end


def _wrong_header(at: int, header_end: int, frame_end: int) -> FrameError:
    length, place = header_end - at - _PREFIX_BYTES, at + _LENGTH_BYTES
    if header_end > frame_end:
        return FrameError(f"header of {length} bytes in a frame of {frame_end - at - 4}", place)
    return FrameError(f"header must be at most {HEADER_BYTES_MAX} bytes, got {length}", place)
