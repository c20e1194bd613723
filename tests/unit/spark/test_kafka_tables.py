"""The tables for users of Kafka's connector: complete, and true about our side."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pyspark.sql.types import StringType, StructField, StructType

from turbopump.errors import InvalidArgument
from turbopump.spark.reading.options import OPTIONS as SOURCE_OPTIONS
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.records.schema import KNOWN_COLUMNS as SOURCE_COLUMNS
from turbopump.spark.source import DefaultSource
from turbopump.spark.writing.options import OPTIONS as SINK_OPTIONS
from turbopump.spark.writing.options import SinkOptions
from turbopump.spark.writing.sink_columns import COLUMNS as SINK_COLUMNS

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "spark.md"
THEIR_OPTIONS = [
    "kafka.bootstrap.servers",
    "subscribe",
    "subscribePattern",
    "assign",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "startingOffsetsByTimestamp",
    "endingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "maxRecordsPerPartition",
    "failOnDataLoss",
    "kafka.group.id",
    "groupIdPrefix",
    "includeHeaders",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    "kafkaConsumer.pollTimeoutMs",
    "topic",
]
THEIR_COLUMNS = [
    "key",
    "value",
    "topic",
    "partition",
    "offset",
    "timestamp",
    "timestampType",
    "headers",
]
OF_BROKERS = {"flushDiskType"}
FUNCTIONS = {"without_duplicates"}


def rows() -> list[tuple[str, str]]:
    text = GUIDE.read_text(encoding="utf-8").partition("## Coming from Kafka's connector")[2]
    cells = re.findall(r"^\| ?(.*?) \| (.*) \|$", text.partition("\n## ")[0], re.MULTILINE)
    return [(theirs, ours) for theirs, ours in cells if "`" in theirs + ours]


def named(cell: str) -> set[str]:
    return set(re.findall(r"`([\w.]+)`", cell))


def test_every_option_and_column_of_kafkas_connector_has_a_row() -> None:
    told = set().union(*(named(theirs) for theirs, _ in rows()))
    assert sorted({*THEIR_OPTIONS, *THEIR_COLUMNS} - told) == []


def test_documented_counterparts_exist() -> None:
    options = {*SOURCE_OPTIONS, *SINK_OPTIONS}
    known = options | set(SOURCE_COLUMNS) | set(SINK_COLUMNS) | OF_BROKERS | FUNCTIONS
    told = set().union(*(named(ours) for _, ours in rows()))
    assert len(told) > 40
    assert sorted(told - known) == []


def test_every_column_of_ours_is_documented() -> None:
    told = set().union(*(named(ours) for _, ours in rows()))
    assert sorted({*SOURCE_COLUMNS, *SINK_COLUMNS} - told) == []


def _theirs(heading: str) -> list[str]:
    """Return the options of a table in the guide that do not exist here."""
    section = GUIDE.read_text(encoding="utf-8").partition(f"\n{heading}")[2].partition("\n\n| ")[2]
    cells = re.findall(r"^\| ?(.*?) \| ", section.partition("\n\n")[0], re.MULTILINE)
    ours = {name.lower() for name in (*SINK_OPTIONS, *SOURCE_OPTIONS)}
    options = {name for cell in cells if "column" not in cell for name in named(cell)}
    return sorted(name for name in options if name.lower() not in ours)


@pytest.mark.parametrize("option", _theirs("Reading, all"))
def test_the_source_names_the_counterpart_of_kafkas_options(option: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"'{option}' \((use|not needed)") as raised:
        SourceOptions.for_batch({"nameserver": "127.0.0.1:1", "topic": "t", option: "1"})
    meant = set(re.findall(r"\w+", str(raised.value).partition("(use ")[2].partition(")")[0]))
    assert not meant or meant & set(SOURCE_OPTIONS), meant


@pytest.mark.parametrize("option", _theirs("Writing, all"))
def test_the_sink_names_the_counterpart_of_kafkas_options(option: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"'{option}' \((use|not needed)"):
        SinkOptions.parse({"nameserver": "127.0.0.1:1", "topic": "t", option: "1"})


@pytest.mark.parametrize("column", sorted({*THEIR_COLUMNS} - {*SOURCE_COLUMNS}))
def test_the_source_names_the_counterpart_of_kafkas_columns(column: str) -> None:
    told = rf"'{column}' \((use|not needed)"
    given = {"nameserver": "127.0.0.1:1", "topic": "t"}
    with pytest.raises(InvalidArgument, match=told):
        SourceOptions.for_batch({**given, "columns": f"topic,{column.lower()}"})
    schema = StructType([StructField(name, StringType()) for name in ("topic", column)])
    source = DefaultSource(given)
    for read in (source.reader, source.streamReader):
        with pytest.raises(InvalidArgument, match=rf"the schema has {told}"):
            read(schema)


@pytest.mark.parametrize(
    "option",
    [
        "asyncProgressTrackingEnabled",
        "asyncProgressTrackingCheckpointIntervalMs",
        "asyncProgressTrackingOverrideSinkSupportCheck",
    ],
)
def test_asynchronous_progress_tracking_is_documented_as_missing(option: str) -> None:
    given = {"nameserver": "127.0.0.1:1", "topic": "t", option: "true"}
    with pytest.raises(InvalidArgument, match=rf"'{option}' \(use it with writeStream"):
        SourceOptions.for_stream(given)
    with pytest.raises(InvalidArgument, match=rf"'{option}' \(not supported: Spark refuses it"):
        SinkOptions.parse(given)
