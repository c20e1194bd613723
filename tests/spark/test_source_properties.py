"""Conditions on properties: the broker's with the option sql, Spark's own on the column."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from servers import Standalone
from source_topics import fresh_topic, made_topic
from turbopump.client.blocking import Producer
from turbopump.filters.sql92 import compile_sql
from turbopump.message import Message

VALUES = [
    "x",
    " x ",
    "5",
    "05",
    "5.0",
    "1e1",
    "-5",
    "NaN",
    "true",
    "NULL",
    "it's",
    'say "x"',
    "100%",
    "a_b",
    "back\\slash",
    "-- x",
    "x' OR 'x' = 'x",
    "标签",
    "e\u0301",
    "😀",
]


@pytest.fixture(scope="module")
def topic(broker: Standalone) -> str:
    """A topic in which each message has another value of a property, and some have none."""
    name = made_topic(broker.nameserver, fresh_topic(), queues=2)
    with Producer("shop", nameserver=broker.nameserver) as producer:
        for number, value in enumerate(VALUES):
            other = {"q": str(number)} if number % 2 else {}
            producer.send(Message(name, b"%d" % number, properties={"p": value, **other}))
        producer.send(Message(name, b"100"))
        producer.send(Message(name, b"101", properties={"q": "101"}))
    return name


def read(spark: SparkSession, broker: Standalone, topic: str, **options: str) -> DataFrame:
    rows = spark.read.format("rocketmq").option("nameserver", broker.nameserver)
    return rows.options(topic=topic, columns="properties,body", **options).load()


def numbers(rows: DataFrame) -> list[int]:
    return sorted(int(row.body) for row in rows.select("body").collect())


def quoted(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def spark_quoted(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def test_equality_means_the_same_to_the_broker_and_to_spark(
    spark: SparkSession, broker: Standalone, topic: str
) -> None:
    several = VALUES[::3]
    conditions = {
        f"properties['p'] = {spark_quoted(value)}": f"p = {quoted(value)}" for value in VALUES
    }
    conditions |= {
        f"properties['p'] IN ({', '.join(map(spark_quoted, several))})"
        " AND properties['q'] IS NOT NULL": (
            f"p IN ({', '.join(map(quoted, several))}) AND q IS NOT NULL"
        ),
        "properties['p'] IS NULL": "p IS NULL",
    }
    rows = read(spark, broker, topic).select(
        "properties", *(f.expr(f"coalesce({each}, false)") for each in conditions)
    )
    found = rows.collect()
    assert len(found) == len(VALUES) + 2
    for number, (condition, sql) in enumerate(conditions.items(), 1):
        matches = compile_sql(sql).matches
        assert [row[number] for row in found] == [matches(row[0]) for row in found], condition
        assert any(row[number] for row in found), condition
    # And the same through the option.
    assert numbers(read(spark, broker, topic, sql="p IS NULL")) == [100, 101]
    sql = f"p IN ({', '.join(map(quoted, VALUES))}) AND q IS NOT NULL"
    assert numbers(read(spark, broker, topic, sql=sql)) == list(range(1, len(VALUES), 2))


def register_probe(spark: SparkSession, noted: str) -> None:
    """Register a source that writes the conditions that Spark passes to it into a file."""

    class ProbeReader(DataSourceReader):
        def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
            with open(noted, "a") as file:  # noqa: PTH123 - sent to the worker as it is
                file.writelines(f"{each}\n" for each in filters)
            return filters

        def read(self, partition: InputPartition) -> Iterator[tuple[int, dict[str, str]]]:
            yield 1, {"a": "x"}
            yield 2, {}

    class Probe(DataSource):
        @classmethod
        def name(cls) -> str:
            return "filter-probe"

        def schema(self) -> str:
            return "n int, properties map<string,string>"

        def reader(self, schema: StructType) -> DataSourceReader:
            return ProbeReader()

    spark.dataSource.register(Probe)


@pytest.mark.usefixtures("filters_allowed")
def test_spark_passes_no_lookups_in_maps_to_sources(spark: SparkSession, tmp_path: Path) -> None:
    """The basis of ADR 10: if a later Spark passes more than this, the decision is open again."""
    noted = tmp_path / "conditions"
    register_probe(spark, str(noted))
    of_map = ["IsNotNull(attribute=('properties',))"]
    passed = {
        "n = 1": ["IsNotNull(attribute=('n',))", "EqualTo(attribute=('n',), value=1)"],
        "properties['a'] = 'x'": of_map,
        "properties.a IS NOT NULL": of_map,
        "element_at(properties, 'a') = 'x'": of_map,
        "properties['a'] IN ('x', 'y')": [],
    }
    for condition, expected in passed.items():
        noted.write_text("")
        rows = spark.read.format("filter-probe").load()
        assert [row.n for row in rows.where(condition).collect()] == [1], condition
        assert noted.read_text().splitlines() == expected, condition
