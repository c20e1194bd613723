"""What can be set about reading a store's files; all of it is checked before anything is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from turbopump.broker.names import SYSTEM_PREFIX, is_forbidden_to_send
from turbopump.errors import InvalidArgument
from turbopump.filters.tags import parse_tags
from turbopump.spark.records.schema import chosen_columns

T = TypeVar("T")
D = TypeVar("D")

FORMAT = "rocketmq-store"
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
    "ignoreDamage",
)
_BY_KEY = {name.lower(): name for name in OPTIONS}
_TOPIC_OPTIONS = ("topic", "topics", "topicPattern")
_PARTITION_BYTES = 128 * 1024 * 1024
_BATCH_ROWS = 10_000
_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SIZE = re.compile(r"(\d+)\s*([bkmg]?)b?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which messages are wanted; times in ms, the end exclusive, None for no limit."""

    topics: frozenset[str] | None = None
    pattern: str | None = None
    internal: bool = False
    tags: frozenset[str] | None = None
    start_ms: int | None = None
    end_ms: int | None = None

    @property
    def has_time(self) -> bool:
        """Whether there is any time between start and end."""
        return self.start_ms is None or self.end_ms is None or self.start_ms < self.end_ms

    def has_topic(self, topic: str) -> bool:
        """Whether messages of a topic are wanted."""
        if self.topics is not None:
            return topic in self.topics
        if not self.internal and is_internal(topic):
            return False
        return self.pattern is None or re.fullmatch(self.pattern, topic) is not None


def is_internal(topic: str) -> bool:
    """Whether a topic is a broker's own book-keeping: nobody else may write to it."""
    return is_forbidden_to_send(topic) or topic.startswith(SYSTEM_PREFIX)


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Everything that is set about a read, checked."""

    directory: Path
    wanted: Wanted
    columns: tuple[str, ...]
    broker: str | None
    partition_bytes: int
    batch_rows_max: int
    ignore_damage: bool

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> StoreOptions:
        """Read the options; raises InvalidArgument."""
        given = _Given(options)
        return cls(
            directory=_directory(given.find("path", _not_empty, None)),
            wanted=_wanted(given),
            columns=chosen_columns(given.find("columns", _text, None)),
            broker=given.find("broker", _text, None),
            partition_bytes=given.find("bytesPerPartition", _bytes, _PARTITION_BYTES),
            batch_rows_max=given.find("maxRowsPerBatch", _positive, _BATCH_ROWS),
            ignore_damage=given.find("ignoreDamage", _boolean, default=False),
        )


def columns_of(options: Mapping[str, str]) -> tuple[str, ...]:
    """Return the columns that are asked for."""
    return chosen_columns(_Given(options).find("columns", _text, None))


class _Given:
    """The options that were given, by the names that are documented."""

    def __init__(self, options: Mapping[str, str]) -> None:
        unknown = sorted(key for key in options if key.lower() not in _BY_KEY)
        if unknown:
            raise InvalidArgument(
                f"there is no option {', '.join(map(_with_guess, unknown))} of format {FORMAT}; "
                f"options are {', '.join(OPTIONS)}"
            )
        self._values = {_BY_KEY[key.lower()]: str(text).strip() for key, text in options.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def find(self, name: str, read: Callable[[str, str], T], default: D) -> T | D:
        """Return an option's value as ``read`` understands it."""
        return read(name, self._values[name]) if name in self._values else default


def _with_guess(key: str) -> str:
    close = get_close_matches(key.lower(), _BY_KEY, 1)
    return f"{key!r} (did you mean {_BY_KEY[close[0]]}?)" if close else repr(key)


def _directory(path: str | None) -> Path:
    if path is None:
        raise InvalidArgument(f"format {FORMAT} needs a path: the store's directory, as in load()")
    if not path.startswith("file:"):
        return Path(path)
    return Path(unquote(urlsplit(path).path))


def _wanted(given: _Given) -> Wanted:
    chosen = [name for name in _TOPIC_OPTIONS if name in given]
    if len(chosen) > 1:
        raise InvalidArgument(f"options {' and '.join(chosen)} exclude each other: give one")
    tags = given.find("tags", lambda _, text: parse_tags(text), None)
    wanted = Wanted(
        topics=given.find("topic", _one_topic, given.find("topics", _topics, None)),
        pattern=given.find("topicPattern", _expression, None),
        internal=given.find("includeInternal", _boolean, default=False),
        tags=None if tags is None or tags.everything else frozenset(tags.tags),
        start_ms=given.find("startingTime", _time_ms, None),
        end_ms=given.find("endingTime", _time_ms, None),
    )
    if not wanted.has_time:
        raise InvalidArgument("option endingTime is not after startingTime")
    return wanted


# --- single values --------------------------------------------------------------------------------


def _text(name: str, text: str) -> str:  # noqa: ARG001 - as all who read a value
    return text


def _not_empty(name: str, text: str) -> str:
    if not text:
        raise InvalidArgument(f"option {name} is empty")
    return text


def _one_topic(name: str, text: str) -> frozenset[str]:
    return frozenset({_not_empty(name, text)})


def _topics(name: str, text: str) -> frozenset[str]:
    return frozenset(_not_empty(name, topic.strip()) for topic in text.split(","))


def _expression(name: str, text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        wrong = f"option {name} is {text!r}, no regular expression: {error}"
        raise InvalidArgument(wrong) from None
    return _not_empty(name, text)


def _boolean(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise InvalidArgument(f"option {name} is {text!r}: true or false is allowed")
    return text.lower() == "true"


def _positive(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) == 0:
        raise InvalidArgument(f"option {name} is {text!r}: a whole number from 1 on is allowed")
    return int(text)


def _bytes(name: str, text: str) -> int:
    match = _SIZE.fullmatch(text)
    size = int(match[1]) * _UNITS[match[2].lower()] if match else 0
    if not size:
        raise InvalidArgument(
            f"option {name} is {text!r}: a size such as 1048576 or 64m is allowed"
        )
    return size


def _time_ms(name: str, text: str) -> int:
    if text.isascii() and text.isdecimal():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(
            f"option {name} is {text!r}: milliseconds since 1970 or an ISO time such as "
            "2026-11-15T08:30:00+01:00 is allowed (UTC if it names no zone)"
        ) from None
    zoned = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return round(zoned.timestamp() * 1000)
