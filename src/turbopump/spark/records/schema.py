"""The columns of a message, as Spark and as Arrow know them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from turbopump.errors import InvalidArgument
from turbopump.spark.option_hints import SOURCE_COLUMN_HINTS
from turbopump.spark.option_values import with_hint

_STRING = (StringType(), pa.string())
_INT = (IntegerType(), pa.int32())
_LONG = (LongType(), pa.int64())
_TIMESTAMP = (TimestampType(), pa.timestamp("us", tz="UTC"))

# The pairs must agree: Spark takes a batch only if its schema equals the one it derives itself.
_TYPES: dict[str, tuple[DataType, pa.DataType]] = {
    "topic": _STRING,
    "broker": _STRING,
    "queueId": _INT,
    "queueOffset": _LONG,
    "msgId": _STRING,
    "offsetMsgId": _STRING,
    "tags": _STRING,
    "keys": _STRING,
    "properties": (MapType(StringType(), StringType()), pa.map_(pa.string(), pa.string())),
    "body": (BinaryType(), pa.binary()),
    "bornTimestamp": _TIMESTAMP,
    "storeTimestamp": _TIMESTAMP,
    "bornHost": _STRING,
    "storeHost": _STRING,
    "reconsumeTimes": _INT,
    "sysFlag": _INT,
    "size": _INT,
    "decodeError": _STRING,
}

DECODE_ERROR = "decodeError"
"""Why a record could not be decoded; only present on request."""

_REPORTED = {
    "string": _STRING,
    "int": _INT,
    "long": _LONG,
    "boolean": (BooleanType(), pa.bool_()),
}

KNOWN_COLUMNS: tuple[str, ...] = tuple(_TYPES)
_BY_LOWER = {name.lower(): name for name in KNOWN_COLUMNS}
COLUMNS: tuple[str, ...] = tuple(name for name in _TYPES if name != DECODE_ERROR)
"""The columns of messages, and of reads that select none."""


def spark_schema(columns: Sequence[str] = COLUMNS) -> StructType:
    """Return the schema that a source declares."""
    return StructType([StructField(name, _TYPES[name][0]) for name in columns])


def arrow_schema(columns: Sequence[str] = COLUMNS) -> pa.Schema:
    """Return the schema of the batches that a source yields; equal to what Spark expects."""
    return pa.schema([pa.field(name, _TYPES[name][1]) for name in columns])


def report_schemas(text: str) -> tuple[StructType, pa.Schema]:
    """Return the schema of rows that tasks report, such as ``topic string, rows long``."""
    columns = [(name, *_REPORTED[kind]) for name, kind in map(str.split, text.split(","))]
    return (
        StructType([StructField(name, kind) for name, kind, _ in columns]),
        pa.schema([pa.field(name, kind) for name, _, kind in columns]),
    )


def with_suggestions(unknown: Iterable[str]) -> str:
    """Return unknown names of columns, each with the column that may be meant."""
    return ", ".join(with_hint(name, KNOWN_COLUMNS, SOURCE_COLUMN_HINTS) for name in unknown)


def chosen_columns(text: str | None, *, with_errors: bool = False) -> tuple[str, ...]:
    """Parse the option ``columns``: names joined by commas, None for all; in the order given.

    ``with_errors`` is whether "all" includes the column of decoding errors.
    """
    if text is None:
        return KNOWN_COLUMNS if with_errors else COLUMNS
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name.lower() not in _BY_LOWER]
    if unknown or not names:
        wrong = f"unknown column {with_suggestions(unknown)}" if unknown else "it is empty"
        raise InvalidArgument(
            f"option columns={text!r}: {wrong}; columns are {', '.join(KNOWN_COLUMNS)}"
        )
    chosen = tuple(_BY_LOWER[name.lower()] for name in names)
    if len(set(chosen)) < len(chosen):
        raise InvalidArgument(f"option columns={text!r} names a column twice")
    return chosen
