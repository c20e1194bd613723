"""The columns that rows to send may have; checked on the driver, before anything runs."""

from __future__ import annotations

from typing import TypeAlias

from pyspark.sql.types import StructType

from turbopump.errors import InvalidArgument
from turbopump.spark.option_hints import SINK_COLUMN_HINTS
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

SinkColumns: TypeAlias = frozenset[str]
"""The columns of rows to send, without those that are null in every row."""


def sink_columns(schema: StructType, options: SinkOptions) -> SinkColumns:
    """Return the columns to convert; raises InvalidArgument that lists all errors."""
    # A collation only affects comparisons; the text is the same.
    types = {
        field.name: field.dataType.simpleString().partition(" collate ")[0]
        for field in schema.fields
    }
    present = frozenset(name for name, found in types.items() if found != _ABSENT)
    checks = {
        "body is missing": "body" not in present,
        "topic is missing, as column or as option": not options.topic and "topic" not in present,
        "a column appears twice": len(types) < len(schema.fields),
        "queueId and shardingKey both choose the queue: keep one": (
            {"queueId", "shardingKey"} <= present
        ),
        "broker needs queueId beside it": "broker" in present and "queueId" not in present,
        # They are not in the topic before they are due.
        "delayLevel cannot be combined with idempotent: delayed rows are not found": (
            options.idempotent and "delayLevel" in present
        ),
    }
    wrong = [text for text, is_wrong in checks.items() if is_wrong]
    mistyped = (
        f"{name} is {found}, not {' or '.join(COLUMNS[name])}"
        for name, found in types.items()
        if name in COLUMNS and found not in (*COLUMNS[name], _ABSENT)
    )
    problems = [*wrong, *_unknown(types), *mistyped]
    if problems:
        expected = (f"{name} ({' or '.join(types)})" for name, types in COLUMNS.items())
        raise InvalidArgument(
            f"invalid columns for the rocketmq sink: {'; '.join(problems)}. Expected "
            f"{', '.join(expected)}"
        )
    # The option overrides the column, as users of other connectors expect.
    return present if options.topic is None else present - {"topic"}


def _unknown(types: dict[str, str]) -> list[str]:
    unknown = [with_hint(name, COLUMNS, SINK_COLUMN_HINTS) for name in types if name not in COLUMNS]
    if not unknown:
        return []
    verb, what = ("is", "it") if len(unknown) == 1 else ("are", "them")
    return [f"{', '.join(unknown)} {verb} unknown: rename or drop {what}"]
