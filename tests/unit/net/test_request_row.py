from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import pytest

from turbopump.net.request_row import RequestRow
from turbopump.wire.command import Buffer, Command
from turbopump.wire.frame_template import Numbers, VaryingFields
from turbopump.wire.framing import FrameDecoder, decode, encode

VARYING = VaryingFields(
    (re.compile(rb'"opaque":([0-9]+)'), re.compile(rb'"a":"([0-9]+)')),
    lambda frame: (decode(frame).opaque, int((decode(frame).ext_fields or {})["a"])),
)


def frames(*kinds: str) -> bytes:
    """Return requests of some kinds, and of the same length."""
    return b"".join(
        encode(Command(1, opaque=100 + number, ext_fields={"kind": kind, "a": "5"}))
        for number, kind in enumerate(kinds)
    )


def rows(chunks: Sequence[bytes], most: int) -> tuple[list[int], list[int]]:
    """Return the numbers of requests that were served the usual way, and in rows."""
    sent: list[Buffer] = []
    decoder = FrameDecoder()
    row = RequestRow(decoder, 1000, lambda parts, _: sent.extend(parts))
    usual: list[int] = []
    in_rows: list[int] = []

    def serve(asked: Iterator[Numbers], bytes_max: int) -> int:
        found = [number for (number, _), _ in zip(asked, range(min(bytes_max, most)), strict=False)]
        in_rows.extend(found)
        return len(found)

    for chunk in chunks:
        for command in decoder.feed(chunk):
            usual.append(command.opaque)
            if row.is_followed:
                row.begin(VARYING, serve)
            while row.begun is not None:
                row.take(bytes_max=2)
    return usual, in_rows


def test_requests_that_are_alike_make_a_row() -> None:
    chunk = frames(*"aaaabbbc")
    assert rows([chunk], most=9) == ([100, 104, 107], [101, 102, 103, 105, 106])
    # Each chunk begins the usual way, as does what nobody serves.
    assert rows([frames("a", "a")] * 3, most=9) == ([100] * 3, [101] * 3)
    assert rows([frames(*"aaaa")], most=0) == ([100, 101, 102, 103], [])


def test_requests_that_cannot_be_compared_make_no_row(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: bytes) -> Numbers:
        raise ValueError("a mistake")

    decoder = FrameDecoder()
    row = RequestRow(decoder, 1000, lambda *_: None)
    for _ in decoder.feed(frames("a", "a")):
        row.begin(VaryingFields(VARYING.places, fail), lambda *_: 0)
        assert row.begun is None
    assert "a mistake" in caplog.text


def test_where_rows_are_rare_they_are_looked_for_less_and_less() -> None:
    # At the first request, the third and the seventh; and from there on at each again.
    usual, in_rows = rows([frames(*"ababbaccdd")], most=9)
    assert in_rows == [107, 109]
    assert usual == [100, 101, 102, 103, 104, 105, 106, 108]
