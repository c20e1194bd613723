"""What can be set about reading topics; all of it is checked before anything is asked or read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TypeVar

from turbopump.client.config import ClientConfig
from turbopump.client.names import (
    DEAD_LETTER_PREFIX,
    RETRY_PREFIX,
    check_group,
    check_topic,
)
from turbopump.errors import InvalidArgument
from turbopump.filters.tags import SQL92, parse_tags
from turbopump.message import MessageQueue
from turbopump.spark.reading.planning import PlanLimits
from turbopump.spark.reading.positions import (
    Earliest,
    Latest,
    OfGroup,
    Position,
    parse_position,
)
from turbopump.spark.records.schema import chosen_columns

T = TypeVar("T")
D = TypeVar("D")

READER_GROUP = "turbopump-spark"
"""Pulls name a group in any case: this one where the user names none."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option as users write it; ``default`` is what the documentation says of it."""

    name: str
    default: str
    meaning: str


OPTIONS = (
    Option("nameserver", "`NAMESRV_ADDR`", "name servers, `host:port;host:port`"),
    Option("namespace", "none", "precedes the names of topics and groups"),
    Option("topic", "", "the one topic to read"),
    Option("topics", "", "topics to read, `a,b,c`"),
    Option("topicPattern", "", "a regular expression that names of topics match as a whole"),
    Option("assign", "", "the queues to read, JSON `{topic: {broker: [0, 1]}}`"),
    Option("group", "none", "the consumer group that the query is"),
    Option("allowSharedGroup", "`false`", "whether push consumers may have the same group"),
    Option("startingOffsets", "see below", "where a read begins"),
    Option("endingOffsets", "`latest`", "where a batch read ends; batch only"),
    Option(
        "tags",
        "all",
        "the tags wanted, `a || b`, or JSON by topic, `{topic: a || b}`; the broker leaves out the "
        "others",
    ),
    Option("sql", "none", "an SQL-92 expression over properties, for brokers that know it"),
    Option("maxOffsetsPerTrigger", "no limit", "messages in one micro-batch at most"),
    Option("maxBytesPerTrigger", "no limit", "about so many bytes in one micro-batch at most"),
    Option("minOffsetsPerTrigger", "0", "fewer messages wait for more to come"),
    Option("maxTriggerDelay", "`15m`", "and wait no longer than this"),
    Option("minPartitions", "none", "tasks of a batch at least, by splitting large ranges"),
    Option("maxRecordsPerPartition", "none", "messages that one task reads at most"),
    Option("partitionPerQueue", "`false`", "whether each queue has a task of its own, in order"),
    Option("failOnDataLoss", "`true`", "whether messages that are gone fail the query"),
    Option("commitOffsets", "`true` with `group`", "whether the group's offsets are committed"),
    Option(
        "pullBatchSize", "1000", "messages asked for in one request; the broker may return fewer"
    ),
    Option("pullsInFlight", "16", "requests of one task that are on their way at once"),
    Option("includeProperties", "`true`", "`false` leaves the column `properties` out"),
    Option("columns", "all", "the columns to have, `a,b,c`"),
    Option("pushFilters", "`false`", "whether a batch query's filters narrow the read; see below"),
    Option("requestTimeout", "`10s`", "for the answer to one request"),
    Option("retries", "8", "how often a request is repeated that failed"),
    Option("discoveryInterval", "`30s`", "how often new queues, brokers and topics are looked for"),
    Option("idleWait", "`500ms`", "how long a stream without news waits for some at a time"),
)

_BY_KEY = {option.name.lower(): option.name for option in OPTIONS}
_BATCH_ONLY = ("endingOffsets", "pushFilters")
_STREAM_ONLY = (
    "maxOffsetsPerTrigger",
    "maxBytesPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "commitOffsets",
    "idleWait",
)
_TOPIC_OPTIONS = ("topic", "topics", "topicPattern", "assign")
_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d+)\s*(ms|s|m|h|d)?")


@dataclass(frozen=True, slots=True)
class Topics:
    """Topics by name."""

    names: tuple[str, ...]

    def has(self, queue: MessageQueue) -> bool:
        return queue.topic in self.names


@dataclass(frozen=True, slots=True)
class TopicPattern:
    """Topics whose whole name matches an expression.

    Retry topics and dead letters are meant only if the expression begins like them.
    """

    pattern: str

    def has(self, queue: MessageQueue) -> bool:
        return self.matches(queue.topic)

    def matches(self, topic: str) -> bool:
        if topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX)) and self.pattern[0] != "%":
            return False
        return re.fullmatch(self.pattern, topic) is not None


@dataclass(frozen=True, slots=True)
class Assigned:
    """Single queues, as (topic, broker, number); the broker is empty if there is only one."""

    queues: tuple[tuple[str, str, int], ...]

    def has(self, queue: MessageQueue) -> bool:
        return not self.places(queue).isdisjoint(self.queues)

    @staticmethod
    def places(queue: MessageQueue) -> frozenset[tuple[str, str, int]]:
        """Return the ways in which a queue can be assigned."""
        return frozenset((queue.topic, broker, queue.queue_id) for broker in ("", queue.broker))


Chosen = Topics | TopicPattern | Assigned


@dataclass(frozen=True, slots=True)
class TriggerLimits:
    """How much a micro-batch may hold, and what it waits for."""

    rows_max: int | None = None
    bytes_max: int | None = None
    rows_min: int = 0
    delay_max_ms: int = 900_000


@dataclass(frozen=True, slots=True)
class Pulling:
    """How tasks ask for messages."""

    tags: frozenset[str] | None = None
    """None for all."""
    expression: str = "*"
    expression_type: str = "TAG"
    count_max: int = 1000
    in_flight_max: int = 16
    timeout_ms: int = 10_000
    retries: int = 8
    tags_by_topic: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Topics of which only some tags are wanted."""

    def of(self, topic: str) -> Pulling:
        """Return how one topic is pulled."""
        for name, tags in self.tags_by_topic:
            if name == topic:
                return self.only(tags)
        return self

    def only(self, tags: Iterable[str]) -> Pulling:
        """Return the same for some tags."""
        names = tuple(tags)
        return replace(self, tags=frozenset(names), expression=" || ".join(names))

    @property
    def is_filtered(self) -> bool:
        return self.tags is not None or self.expression_type == SQL92


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Everything that is set about a read, checked."""

    client: ClientConfig
    chosen: Chosen
    group: str | None
    allow_shared_group: bool
    start: Position
    end: Position
    pulling: Pulling
    trigger: TriggerLimits
    plan: PlanLimits
    fail_on_data_loss: bool
    commit_offsets: bool
    columns: tuple[str, ...]
    push_filters: bool
    idle_wait_ms: int
    is_stream: bool

    @property
    def reader_group(self) -> str:
        """The group that pulls name."""
        return self.group or READER_GROUP

    @classmethod
    def for_batch(cls, options: Mapping[str, str]) -> SourceOptions:
        """Read the options of a batch; raises InvalidArgument."""
        return _parsed(_Given(options), is_stream=False)

    @classmethod
    def for_stream(cls, options: Mapping[str, str]) -> SourceOptions:
        """Read the options of a stream; raises InvalidArgument."""
        return _parsed(_Given(options), is_stream=True)


def columns_of(options: Mapping[str, str]) -> tuple[str, ...]:
    """Return the columns that options ask for, before it is known what kind of read it will be."""
    given = _Given(options)
    given.require_known()
    return _columns(given)


class _Given:
    """The options that were given, by the names that are documented."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._values: dict[str, str] = {}
        self._unknown: list[str] = []
        for key, value in options.items():
            if (name := _BY_KEY.get(key.lower())) is None:
                self._unknown.append(key)
            else:
                self._values[name] = str(value).strip()

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __getitem__(self, name: str) -> str:
        """Return an option's text, nothing if it is not given."""
        return self._values.get(name, "")

    def find(self, name: str, read: Callable[[str, str], T], default: D) -> T | D:
        """Return an option's value as ``read`` understands it."""
        return read(name, self._values[name]) if name in self._values else default

    def require_known(self) -> None:
        """Refuse options that do not exist; the text lists those that do."""
        if not self._unknown:
            return
        guesses = [
            f"{key!r} (did you mean {_BY_KEY[close[0]]}?)"
            if (close := get_close_matches(key.lower(), _BY_KEY, 1))
            else repr(key)
            for key in sorted(self._unknown)
        ]
        names = ", ".join(option.name for option in OPTIONS)
        raise InvalidArgument(
            f"there is no option {', '.join(guesses)} of format rocketmq; options are {names}"
        )


def _parsed(given: _Given, *, is_stream: bool) -> SourceOptions:
    given.require_known()
    _require_consistent(given, is_stream=is_stream)
    start: Position = Latest() if is_stream else Earliest()
    group = given.find("group", _group, None)
    return SourceOptions(
        client=_client(given),
        chosen=_chosen(given),
        group=group,
        allow_shared_group=given.find("allowSharedGroup", _boolean, default=False),
        start=given.find("startingOffsets", parse_position, start if group is None else OfGroup()),
        end=_end(given),
        pulling=_pulling(given),
        trigger=_trigger(given),
        plan=PlanLimits(
            given.find("minPartitions", _positive, None),
            given.find("maxRecordsPerPartition", _positive, None),
            given.find("partitionPerQueue", _boolean, default=False),
        ),
        fail_on_data_loss=given.find("failOnDataLoss", _boolean, default=True),
        commit_offsets=given.find("commitOffsets", _boolean, group is not None),
        columns=_columns(given),
        push_filters=given.find("pushFilters", _boolean, default=False),
        idle_wait_ms=given.find("idleWait", _duration_ms, 500),
        is_stream=is_stream,
    )


def _end(given: _Given) -> Position:
    return parse_position("endingOffsets", given["endingOffsets"] or "latest")


def _require_consistent(given: _Given, *, is_stream: bool) -> None:
    """Refuse what contradicts itself, all of it in one text."""
    others, of_others = (_BATCH_ONLY, "batch reads") if is_stream else (_STREAM_ONLY, "streams")
    wrong = [f"{name} is for {of_others} only" for name in others if name in given]
    chosen = [name for name in _TOPIC_OPTIONS if name in given]
    if len(chosen) != 1:
        which = f"{' and '.join(chosen)} are given" if chosen else "none is given"
        wrong.append(f"exactly one of {', '.join(_TOPIC_OPTIONS)} is needed and {which}")
    if "tags" in given and "sql" in given:
        wrong.append("tags and sql exclude each other")
    if "maxTriggerDelay" in given and "minOffsetsPerTrigger" not in given:
        wrong.append("maxTriggerDelay needs minOffsetsPerTrigger")
    if "includeProperties" in given and "columns" in given:
        wrong.append("includeProperties and columns exclude each other: name the columns")
    if given.find("partitionPerQueue", _boolean, default=False):
        wrong += [
            f"partitionPerQueue and {name} exclude each other"
            for name in ("minPartitions", "maxRecordsPerPartition")
            if name in given
        ]
    if "group" not in given:
        wrong += _without_group(given)
    if wrong:
        raise InvalidArgument(f"the options of format rocketmq contradict: {'; '.join(wrong)}")


def _without_group(given: _Given) -> list[str]:
    wrong = [
        f"{name} is group and no group is given"
        for name in ("startingOffsets", "endingOffsets")
        if isinstance(given.find(name, parse_position, None), OfGroup)
    ]
    if given.find("commitOffsets", _boolean, default=False):
        wrong.append("commitOffsets needs a group")
    if "allowSharedGroup" in given:
        wrong.append("allowSharedGroup needs a group")
    return wrong


def _client(given: _Given) -> ClientConfig:
    return ClientConfig(
        nameserver=given.find("nameserver", _text, ""),
        namespace=given.find("namespace", _text, ""),
        request_timeout_ms=given.find("requestTimeout", _duration_ms, 10_000),
        route_interval_ms=given.find("discoveryInterval", _duration_ms, 30_000),
    )


def _chosen(given: _Given) -> Chosen:
    if "topicPattern" in given:
        return TopicPattern(_expression("topicPattern", given["topicPattern"]))
    if "assign" in given:
        return Assigned(tuple(sorted(set(_assigned(given["assign"])))))
    text = given["topic"] if "topic" in given else given["topics"]
    names = [text] if "topic" in given else [name.strip() for name in text.split(",")]
    for name in names:
        check_topic(name)
    return Topics(tuple(dict.fromkeys(names)))


def _assigned(text: str) -> Iterable[tuple[str, str, int]]:
    refusal = (
        f'option assign is {text!r}: JSON such as {{"orders": {{"broker-a": [0, 1]}}}} is '
        'allowed, or {"orders": [0, 1]} if there is one broker'
    )
    try:
        parsed = json.loads(text)
        for topic, below in parsed.items():
            check_topic(topic)
            for broker, numbers in ({"": below} if isinstance(below, list) else below).items():
                for number in numbers:
                    if type(number) is not int or number < 0:
                        raise InvalidArgument(refusal)
                    yield topic, broker, number
    except (AttributeError, TypeError, json.JSONDecodeError):
        raise InvalidArgument(refusal) from None
    if not parsed:
        raise InvalidArgument(refusal)


def _pulling(given: _Given) -> Pulling:
    pulling = Pulling(
        count_max=given.find("pullBatchSize", _positive, 1000),
        in_flight_max=given.find("pullsInFlight", _positive, 16),
        timeout_ms=given.find("requestTimeout", _duration_ms, 10_000),
        retries=given.find("retries", _natural, 8),
    )
    if "sql" in given:
        return replace(pulling, expression=_not_empty("sql", given["sql"]), expression_type=SQL92)
    if given["tags"].startswith("{"):
        return replace(pulling, tags_by_topic=_tags_by_topic(given))
    wanted = parse_tags(given["tags"] or None)
    return pulling if wanted.everything else pulling.only(wanted.tags)


def _tags_by_topic(given: _Given) -> tuple[tuple[str, tuple[str, ...]], ...]:
    text = given["tags"]
    refusal = f'option tags is {text!r}: JSON such as {{"orders": "created || paid"}} is allowed'
    try:
        parsed = json.loads(text)
        wanted = {topic: parse_tags(expression) for topic, expression in parsed.items()}
    except (AttributeError, TypeError, json.JSONDecodeError):
        raise InvalidArgument(refusal) from None
    chosen = _chosen(given)
    if isinstance(chosen, Topics) and (others := wanted.keys() - set(chosen.names)):
        raise InvalidArgument(f"option tags names {', '.join(sorted(others))}, which is not read")
    return tuple(
        (topic, tuple(tags.tags)) for topic, tags in sorted(wanted.items()) if not tags.everything
    )


def _trigger(given: _Given) -> TriggerLimits:
    limits = TriggerLimits(
        given.find("maxOffsetsPerTrigger", _positive, None),
        given.find("maxBytesPerTrigger", _bytes, None),
        given.find("minOffsetsPerTrigger", _natural, 0),
        given.find("maxTriggerDelay", _duration_ms, 900_000),
    )
    if limits.rows_max is not None and limits.rows_min > limits.rows_max:
        raise InvalidArgument(
            f"the options of format rocketmq contradict: minOffsetsPerTrigger {limits.rows_min} is "
            f"more than maxOffsetsPerTrigger {limits.rows_max}"
        )
    return limits


def _columns(given: _Given) -> tuple[str, ...]:
    columns = chosen_columns(given.find("columns", _text, None))
    if given.find("includeProperties", _boolean, default=True):
        return columns
    return tuple(name for name in columns if name != "properties")


# --- single values --------------------------------------------------------------------------------


def _text(name: str, text: str) -> str:  # noqa: ARG001 - as all who read a value
    return text


def _not_empty(name: str, text: str) -> str:
    if not text:
        raise InvalidArgument(f"option {name} is empty")
    return text


def _group(name: str, text: str) -> str:  # noqa: ARG001 - as all who read a value
    check_group(text)
    return text


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


def _natural(name: str, text: str) -> int:
    if not text.isdecimal():
        raise InvalidArgument(f"option {name} is {text!r}: a whole number from 0 on is allowed")
    return int(text)


def _positive(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise InvalidArgument(f"option {name} is {text!r}: a whole number from 1 on is allowed")
    return int(text)


_BYTE_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_BYTES = re.compile(r"(\d+)\s*([bkmg]?)b?", re.IGNORECASE)


def _bytes(name: str, text: str) -> int:
    match = _BYTES.fullmatch(text)
    count = int(match[1]) * _BYTE_UNITS[match[2].lower()] if match else 0
    if not count:
        raise InvalidArgument(f"option {name} is {text!r}: bytes such as 500k, 64m, 1g are allowed")
    return count


def _duration_ms(name: str, text: str) -> int:
    match = _DURATION.fullmatch(text)
    duration_ms = int(match[1]) * _UNIT_MS[match[2] or "ms"] if match else 0
    if not duration_ms:
        raise InvalidArgument(
            f"option {name} is {text!r}: a time such as 500ms, 5s, 1m is allowed; "
            "a bare number is milliseconds"
        )
    return duration_ms
