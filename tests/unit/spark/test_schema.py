from __future__ import annotations

import pytest
from pyspark.sql.pandas.types import to_arrow_schema

from turbopump.errors import InvalidArgument
from turbopump.spark.records.schema import COLUMNS, arrow_schema, chosen_columns, spark_schema


@pytest.mark.parametrize("columns", [COLUMNS, ("body", "properties"), ("bornTimestamp",)])
def test_arrow_and_spark_mean_the_same(columns: tuple[str, ...]) -> None:
    declared = spark_schema(columns)
    assert declared.fieldNames() == list(columns)
    assert to_arrow_schema(declared, timezone="UTC").equals(arrow_schema(columns))


def test_columns_are_those_of_a_message() -> None:
    assert ",".join(COLUMNS) == (
        "topic,broker,queueId,queueOffset,msgId,offsetMsgId,tags,keys,properties,body,"
        "bornTimestamp,storeTimestamp,bornHost,storeHost,reconsumeTimes,sysFlag,size"
    )


def test_columns_are_chosen_in_the_order_given() -> None:
    assert chosen_columns(None) == COLUMNS
    assert chosen_columns(" body,queueoffset , ") == ("body", "queueOffset")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [("body,offset", "unknown column 'offset'"), (" , ", "is empty"), ("body,Body", "twice")],
)
def test_other_columns_are_rejected(text: str, wrong: str) -> None:
    with pytest.raises(InvalidArgument, match=wrong) as refused:
        chosen_columns(text)
    assert "columns" in str(refused.value)
