"""How Spark finds the source by itself: a lightweight import that cannot fail."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

import pyspark_rocketmq
from turbopump.errors import InvalidArgument
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.records.schema import spark_schema
from turbopump.spark.source import BatchReader, DefaultSource, StreamReader

PROGRAM = """
import sys
import pyspark.sql.datasource
before = set(sys.modules)
import pyspark_rocketmq
print(*sorted(set(sys.modules) - before))
"""


def test_the_module_exports_the_source() -> None:
    assert pyspark_rocketmq.DefaultSource is DefaultSource
    assert DefaultSource.name() == "rocketmq"


def test_installation_problems_are_reported_on_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as broken:
        broken.setitem(sys.modules, "turbopump.spark.source", None)
        found = importlib.reload(pyspark_rocketmq).DefaultSource
        assert found.name() == "rocketmq"
        source = found({})
        for call in (source.schema, lambda: source.reader(schema=None), source.streamWriter):
            with pytest.raises(
                ImportError, match=r"cannot be used here: .*turbopump\.spark\.source"
            ):
                call()
    assert importlib.reload(pyspark_rocketmq).DefaultSource is DefaultSource


def test_a_schema_chooses_among_the_columns_of_the_options() -> None:
    options = {"nameserver": "127.0.0.1:1", "topic": "orders", "includeProperties": "false"}
    source = DefaultSource(options)
    reader = source.reader(spark_schema(("body", "topic")))
    assert isinstance(reader, BatchReader)
    assert reader._options.columns == ("body", "topic")
    for make in (source.reader, source.streamReader):
        with pytest.raises(InvalidArgument, match="schema has properties, which the options"):
            make(spark_schema(("body", "properties")))


@pytest.mark.parametrize(
    ("options", "rows_max"),
    [
        ({}, 2**63 - 1),
        ({"maxBytesPerTrigger": "1k", "minOffsetsPerTrigger": "5"}, 2**63 - 1),
        ({"maxOffsetsPerTrigger": "70", "maxBytesPerTrigger": "1k"}, 70),
    ],
)
def test_spark_always_gets_a_limit(options: dict[str, str], rows_max: int) -> None:
    # Never `ReadAllAvailable`, which is for `trigger(once=True)`.
    plain = {"nameserver": "127.0.0.1:1", "topic": "orders"}
    reader = StreamReader(SourceOptions.for_stream(plain | options))
    assert reader.getDefaultReadLimit() == ReadMaxRows(rows_max)


@pytest.mark.slow
def test_finding_the_source_loads_nothing_that_it_needs_later() -> None:
    asked = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    loaded = asked.stdout.split()
    assert "turbopump.spark.source" in loaded
    heavy = {"pyarrow", "numpy", "asyncio", "turbopump.client"}
    assert heavy.isdisjoint(loaded)
