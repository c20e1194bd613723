"""Options for reading a store's files, checked before anything is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from turbopump.errors import InvalidArgument
from turbopump.filters.tags import wanted_tags
from turbopump.spark.offline import FORMAT
from turbopump.spark.option_values import (
    Given,
    boolean,
    expression,
    not_empty,
    on_bad_record,
    one_topic,
    positive,
    size_bytes,
    text_of,
    timestamp_ms,
)
from turbopump.spark.records.bad_records import OnBadRecord
from turbopump.spark.records.schema import chosen_columns
from turbopump.wire.names import SYSTEM_PREFIX, is_forbidden_to_send

OPTIONS = (
    "path",
    "topic",
    "topics",
    "topicPattern",
    "includeInternal",
    "tags",
    "startingTime",
    "endingTime",
    "columns",
    "broker",
    "bytesPerPartition",
    "maxRowsPerBatch",
    "onBadRecord",
)
_TOPIC_OPTIONS = ("topic", "topics", "topicPattern")
_PARTITION_BYTES = 128 * 1024 * 1024
_BATCH_ROWS = 10_000
_time_ms = partial(
    timestamp_ms,
    forms="milliseconds since 1970 or an ISO timestamp such as 2026-11-15T08:30:00+01:00 (UTC "
    "without a zone)",
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which messages to read; times in ms, the end exclusive, None for no limit."""

    topics: frozenset[str] | None = None
    pattern: str | None = None
    internal: bool = False
    tags: frozenset[str] | None = None
    start_ms: int | None = None
    end_ms: int | None = None

    def has_topic(self, topic: str) -> bool:
        if self.topics is not None:
            return topic in self.topics
        # Internal to brokers: no client may write to it.
        is_internal = is_forbidden_to_send(topic) or topic.startswith(SYSTEM_PREFIX)
        if is_internal and not self.internal:
            return False
        return self.pattern is None or re.fullmatch(self.pattern, topic) is not None


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """All options of a read, checked."""

    directory: Path
    wanted: Wanted
    columns: tuple[str, ...]
    broker: str | None
    partition_bytes: int
    batch_rows_max: int
    on_bad_record: OnBadRecord

    @property
    def ignore_damage(self) -> bool:
        return self.on_bad_record is not OnBadRecord.FAIL

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> StoreOptions:
        """Parse the options; raises InvalidArgument."""
        given = Given(options, OPTIONS, FORMAT)
        return cls(
            directory=_directory(given.find("path", not_empty, None)),
            wanted=_wanted(given),
            columns=_columns(given),
            broker=given.find("broker", text_of, None),
            partition_bytes=given.find("bytesPerPartition", size_bytes, _PARTITION_BYTES),
            batch_rows_max=given.find("maxRowsPerBatch", positive, _BATCH_ROWS),
            on_bad_record=_on_bad_record(given),
        )


def columns_of(options: Mapping[str, str]) -> tuple[str, ...]:
    return _columns(Given(options, OPTIONS, FORMAT))


def _columns(given: Given) -> tuple[str, ...]:
    keeps_rows = _on_bad_record(given) is OnBadRecord.NULL
    return chosen_columns(given.find("columns", text_of, None), with_errors=keeps_rows)


def _on_bad_record(given: Given) -> OnBadRecord:
    if given["onBadRecord"].lower() == OnBadRecord.DEAD_LETTER.lower():
        raise InvalidArgument(
            f"option onBadRecord=deadLetter needs a broker, which format {FORMAT} does not have: "
            "use fail, null or skip"
        )
    allowed = OnBadRecord.FAIL, OnBadRecord.NULL, OnBadRecord.SKIP
    return given.find("onBadRecord", on_bad_record(*allowed), OnBadRecord.FAIL)


def _directory(path: str | None) -> Path:
    if path is None:
        raise InvalidArgument(f"format {FORMAT} needs the store's directory: pass it to load(path)")
    if not path.startswith("file:"):
        return Path(path)
    return Path(unquote(urlsplit(path).path))


def _wanted(given: Given) -> Wanted:
    chosen = [name for name in _TOPIC_OPTIONS if name in given]
    if len(chosen) > 1:
        raise InvalidArgument(
            f"options {' and '.join(chosen)} are mutually exclusive; set one of them"
        )
    tags = wanted_tags(given.as_written("tags"), "option tags")
    wanted = Wanted(
        topics=given.find("topic", _one_topic, given.find("topics", _topics, None)),
        pattern=given.find("topicPattern", expression, None),
        internal=given.find("includeInternal", boolean, default=False),
        tags=None if tags.everything else frozenset(tags.tags),
        start_ms=given.find("startingTime", _time_ms, None),
        end_ms=given.find("endingTime", _time_ms, None),
    )
    start_ms, end_ms = wanted.start_ms, wanted.end_ms
    if start_ms is not None and end_ms is not None and start_ms >= end_ms:
        raise InvalidArgument("option endingTime must be after startingTime")
    return wanted


def _one_topic(name: str, text: str) -> frozenset[str]:
    return frozenset({one_topic(name, text)})


def _topics(name: str, text: str) -> frozenset[str]:
    return frozenset(not_empty(name, topic.strip()) for topic in text.split(","))
