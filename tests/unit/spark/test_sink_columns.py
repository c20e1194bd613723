"""Which columns rows to send may have."""

from __future__ import annotations

import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
)

from turbopump.errors import InvalidArgument
from turbopump.spark.writing.options import SinkOptions
from turbopump.spark.writing.sink_columns import COLUMNS, sink_columns

OPTIONS = SinkOptions(nameserver="127.0.0.1:9876")
WITH_TOPIC = SinkOptions(nameserver="127.0.0.1:9876", topic="orders")


def schema(**types: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in types.items()])


def test_all_columns_are_accepted() -> None:
    rows = schema(
        topic=StringType(),
        body=BinaryType(),
        tags=StringType(),
        keys=ArrayType(StringType()),
        properties=MapType(StringType(), StringType()),
        delayLevel=IntegerType(),
        queueId=LongType(),
        broker=StringType(),
    )
    assert sink_columns(rows, OPTIONS) == set(COLUMNS) - {"shardingKey"}


def test_idempotent_writes_reject_delayed_rows() -> None:
    options = SinkOptions(nameserver="127.0.0.1:9876", topic="orders", idempotent=True)
    with pytest.raises(InvalidArgument, match="delayLevel cannot be combined with idempotent"):
        sink_columns(schema(body=StringType(), delayLevel=IntegerType()), options)


def test_columns_that_need_no_conversion_are_omitted() -> None:
    rows = schema(topic=StringType(), body=StringType(), tags=NullType())
    assert sink_columns(rows, WITH_TOPIC) == {"body"}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (schema(topic=StringType()), ["body is missing"]),
        (schema(body=NullType()), ["body is missing", "topic is missing, as column or as option"]),
        (
            schema(body=DoubleType(), topic=IntegerType(), keys=ArrayType(IntegerType())),
            [
                "body is double, not binary or string",
                "topic is int, not string",
                "keys is array<int>, not string or array<string>",
            ],
        ),
        (
            schema(topic=StringType(), body=BinaryType(), msgId=StringType(), Tags=StringType()),
            [
                "'msgId', 'Tags' (did you mean tags?) are unknown: rename or drop them",
                "Expected topic (string), body",
            ],
        ),
        (
            schema(topic=StringType(), value=BinaryType(), key=StringType()),
            ["body is missing", "'value' (use body), 'key' (use shardingKey to choose the queue"],
        ),
        (
            schema(
                topic=StringType(),
                body=BinaryType(),
                queueId=IntegerType(),
                shardingKey=StringType(),
            ),
            ["queueId and shardingKey both choose the queue"],
        ),
        (
            schema(topic=StringType(), body=BinaryType(), broker=StringType()),
            ["broker needs queueId beside it"],
        ),
        (
            StructType([StructField("body", BinaryType())] * 2),
            ["a column appears twice"],
        ),
    ],
)
def test_all_errors_are_listed(rows: StructType, words: list[str]) -> None:
    with pytest.raises(InvalidArgument, match="invalid columns for the rocketmq sink") as raised:
        sink_columns(rows, OPTIONS)
    for word in words:
        assert word in str(raised.value)
