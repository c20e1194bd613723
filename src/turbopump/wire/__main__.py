"""The dissector: ``python -m turbopump.wire decode`` and ``encode``, one line in, one line out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

import msgspec

from turbopump.errors import InvalidArgument, WireError
from turbopump.wire.dissect import Dissector, assemble, parse_hex

BAD_INPUT = 2

_DESCRIPTION = """\
Takes RocketMQ frames apart and puts them together.

decode: reads frames as hex, one or more a line, and prints a JSON object for each.
encode: reads such JSON objects, one a line, and prints the frames as hex.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m turbopump.wire",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("direction", choices=["decode", "encode"])
    convert = _decode if parser.parse_args(arguments).direction == "decode" else _encode
    return _convert(convert(sys.stdin), sys.stdout)


def _convert(lines: Iterator[str], output: TextIO) -> int:
    try:
        for line in lines:
            print(line, file=output)
    except _BadLine as bad:
        output.flush()
        print("line {}: {}".format(*bad.args), file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:
        # The reader has closed the pipe.
        sys.stderr.close()
    return 0


class _BadLine(Exception):
    """The number of a line, and what is wrong with it."""


def _numbered(source: TextIO) -> Iterator[tuple[int, str]]:
    try:
        for number, line in enumerate(source, start=1):
            if line.strip():
                yield number, line.strip()
    except UnicodeDecodeError as error:
        raise _BadLine(0, f"input is not text: {error}") from error


def _decode(source: TextIO) -> Iterator[str]:
    dissector = Dissector()
    for number, line in _numbered(source):
        try:
            for fields in dissector.frames(parse_hex(line)):
                yield msgspec.json.encode(fields).decode()
        except WireError as error:
            raise _BadLine(number, error) from error


def _encode(source: TextIO) -> Iterator[str]:
    for number, line in _numbered(source):
        try:
            yield assemble(line).hex()
        except (WireError, InvalidArgument) as error:
            raise _BadLine(number, error) from error


if __name__ == "__main__":
    sys.exit(main())
