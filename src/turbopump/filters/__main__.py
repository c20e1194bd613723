"""Evaluating expressions: ``python -m turbopump.filters eval``, one JSON object per line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec import Struct

from turbopump.errors import InvalidExpression
from turbopump.filters.sql92 import ConversionFailed, SqlFilter, compile_sql

BAD_INPUT = 2

_DESCRIPTION = """\
Evaluates SQL92 filter expressions.

eval: reads lines such as {"expression": "a > 5", "properties": {"a": "7"}} and prints a line for
each: {"compile": "ok" or "error", "error": what was wrong or null, "result": true, false, null or
"error", "match": whether the message is delivered}.
"""


class Case(Struct):
    """An expression and the properties of a message."""

    expression: str
    properties: dict[str, str] | None = None


class Verdict(Struct):
    """The result of a case."""

    compile: str
    error: str | None = None
    result: bool | str | None = None
    match: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m turbopump.filters",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=["eval"])
    parser.parse_args(arguments)
    try:
        for verdict in _verdicts(sys.stdin):
            print(msgspec.json.encode(verdict).decode())
    except _BadLine as bad:
        sys.stdout.flush()
        print(bad, file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:
        # The reader closed the pipe, as head does.
        sys.stderr.close()
    return 0


class _BadLine(Exception):
    pass


def _verdicts(lines: Iterable[str]) -> Iterator[Verdict]:
    number = 0
    try:
        for number, line in enumerate(lines, start=1):  # noqa: B007 - errors name the line
            if line.strip():
                yield _judged(msgspec.json.decode(line, type=Case))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _BadLine(f"line {number}: {error}") from error


def _judged(case: Case) -> Verdict:
    try:
        compiled = compile_sql(case.expression)
    except InvalidExpression as error:
        return Verdict("error", str(error))
    return _evaluated(compiled, case.properties)


def _evaluated(compiled: SqlFilter, properties: dict[str, str] | None) -> Verdict:
    try:
        result = compiled.result(properties)
    except ConversionFailed as error:
        return Verdict("ok", str(error), "error")
    return Verdict("ok", None, result, result is True)


if __name__ == "__main__":
    sys.exit(main())
