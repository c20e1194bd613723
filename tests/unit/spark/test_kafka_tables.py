"""The tables for those who know Kafka's connector: complete, and true about our side."""

from __future__ import annotations

import re
from pathlib import Path

from turbopump.spark.reading.options import OPTIONS as SOURCE_OPTIONS
from turbopump.spark.records.schema import COLUMNS as SOURCE_COLUMNS
from turbopump.spark.writing.options import OPTIONS as SINK_OPTIONS
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


def test_what_is_said_to_be_here_is_here() -> None:
    options = {option.name for option in SOURCE_OPTIONS} | set(SINK_OPTIONS)
    known = options | set(SOURCE_COLUMNS) | set(SINK_COLUMNS) | OF_BROKERS | FUNCTIONS
    told = set().union(*(named(ours) for _, ours in rows()))
    assert len(told) > 40
    assert sorted(told - known) == []


def test_every_column_of_ours_is_told() -> None:
    told = set().union(*(named(ours) for _, ours in rows()))
    assert sorted({*SOURCE_COLUMNS, *SINK_COLUMNS} - told) == []
