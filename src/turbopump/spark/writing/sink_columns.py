"""The columns that rows to send may have; checked on the driver, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql.types import StructType

from turbopump.errors import InvalidArgument
from turbopump.spark.option_hints import COLUMN_HINTS
from turbopump.spark.option_values import with_hint
from turbopump.spark.writing.options import SinkOptions

_WHOLE_NUMBERS = ("int", "bigint", "smallint", "tinyint")
_ABSENT = "void"
"""The type of a column that is null in every row."""

COLUMNS: dict[str, tuple[str, ...]] = {
    "topic": ("string",),
    "body": ("binary", "string"),
    "tags": ("string",),
    "keys": ("string", "array<string>"),
    "properties": ("map<string,string>",),
    "delayLevel": _WHOLE_NUMBERS,
    "queueId": _WHOLE_NUMBERS,
    "broker": ("string",),
    "shardingKey": ("string", *_WHOLE_NUMBERS),
}
"""The columns that a sink knows, with their valid types."""


@dataclass(frozen=True, slots=True)
class SinkColumns:
    """The columns of rows to send, without those that are null in every row."""

    names: frozenset[str]

    def __contains__(self, name: object) -> bool:
        return name in self.names


def sink_columns(schema: StructType, options: SinkOptions) -> SinkColumns:
    """Return the columns to convert; raises InvalidArgument that lists all errors."""
    types = {field.name: _type_name(field.dataType.simpleString()) for field in schema.fields}
    present = frozenset(name for name, found in types.items() if found != _ABSENT)
    problems = [
        *_missing(present, options),
        *_unknown(types),
        *_mistyped(types),
        *_contradicting(present, options),
    ]
    if len(types) < len(schema.fields):
        problems.append("a column appears twice")
    if problems:
        raise InvalidArgument(
            f"invalid columns for the rocketmq sink: {'; '.join(problems)}. Expected {_allowed()}"
        )
    # The option overrides the column, as users of other connectors expect.
    return SinkColumns(present - {"topic"} if options.topic is not None else present)


def _missing(present: frozenset[str], options: SinkOptions) -> list[str]:
    missing = []
    if "body" not in present:
        missing.append("body is missing")
    if "topic" not in present and options.topic is None:
        missing.append("topic is missing, as column or as option")
    return missing


def _unknown(types: dict[str, str]) -> list[str]:
    by_lower = {name.lower(): name for name in COLUMNS}
    unknown = [with_hint(name, by_lower, COLUMN_HINTS) for name in types if name not in COLUMNS]
    if not unknown:
        return []
    verb, what = ("is", "it") if len(unknown) == 1 else ("are", "them")
    return [f"{', '.join(unknown)} {verb} unknown: rename or drop {what}"]


def _mistyped(types: dict[str, str]) -> list[str]:
    return [
        f"{name} is {found}, not {' or '.join(COLUMNS[name])}"
        for name, found in types.items()
        if name in COLUMNS and found not in (*COLUMNS[name], _ABSENT)
    ]


def _contradicting(present: frozenset[str], options: SinkOptions) -> list[str]:
    problems = []
    if options.idempotent and "delayLevel" in present:
        # They are not in the topic before they are due.
        problems.append("delayLevel cannot be combined with idempotent: delayed rows are not found")
    if {"queueId", "shardingKey"} <= present:
        problems.append("queueId and shardingKey both choose the queue: keep one")
    if "broker" in present and "queueId" not in present:
        problems.append("broker needs queueId beside it")
    return problems


def _type_name(text: str) -> str:
    # A collation only affects comparisons; the text is the same.
    return text.partition(" collate ")[0]


def _allowed() -> str:
    return ", ".join(f"{name} ({' or '.join(types)})" for name, types in COLUMNS.items())
