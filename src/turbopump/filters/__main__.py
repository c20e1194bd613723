"""Evaluating expressions: ``python -m turbopump.filters eval``, one JSON object per line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from turbopump.errors import InvalidExpression
from turbopump.filters.sql92 import ConversionFailed, compile_sql

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
    number = 0
    try:
        for number, line in enumerate(sys.stdin, start=1):  # noqa: B007 - errors name the line
            if line.strip():
                verdict = _judged(msgspec.json.decode(line, type=Case))
                print(msgspec.json.encode(verdict).decode())
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        sys.stdout.flush()
        print(f"line {number}: {error}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:
        # The reader closed the pipe, as head does.
        sys.stderr.close()
    return 0


def _judged(case: Case) -> Verdict:
    try:
        result = compile_sql(case.expression).result(case.properties)
    except InvalidExpression as error:
        return Verdict("error", str(error))
    except ConversionFailed as error:
        return Verdict("ok", str(error), "error")
    return Verdict("ok", None, result, result is True)


if __name__ == "__main__":
    sys.exit(main())
