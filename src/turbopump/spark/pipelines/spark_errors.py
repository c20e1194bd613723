"""Error causes in one line: Spark wraps them in pages of Java and Python traces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.errors import AnalysisException, PySparkException

from turbopump.errors import (
    DataLost,
    GroupInUse,
    InvalidArgument,
    NoNameServer,
    NoRoute,
    SparkError,
    TurbopumpError,
)

_OURS = re.compile(r"^(?:\w+\.)*errors\.(\w+): (.+)$", re.MULTILINE)
_PYTHON = re.compile(r"^(\w*(?:Error|Exception)\b): (.+)$", re.MULTILINE)
_RAISED_AGAIN: dict[str, type[TurbopumpError]] = {
    each.__name__: each for each in (InvalidArgument, DataLost, GroupInUse, NoNameServer, NoRoute)
}
"""Errors that callers distinguish; they were raised in another process."""


@contextmanager
def explain_errors() -> Iterator[None]:
    """Convert Spark's errors to ours: to the original one if it can be recognized."""
    try:
        yield
    except PySparkException as error:
        name, text = reason(str(error))
        # What Spark rejects before a query runs is an invalid argument.
        other = InvalidArgument if isinstance(error, AnalysisException) else SparkError
        raise _RAISED_AGAIN.get(name, other)(text) from error


def reason(text: str) -> tuple[str, str]:
    """Return the class and message of the error that a trace reports.

    The last one of ours if there is any, else the last one of Python, else the first line.
    """
    for pattern in (_OURS, _PYTHON):
        found = pattern.findall(text)
        if found:
            name, words = found[-1]
            return name, words.strip()
    return "", first_line(text)


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
