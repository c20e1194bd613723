"""Options for reading topics, checked before any request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Annotated, Any, TypeAlias

import msgspec

from turbopump.client.config import ClientConfig
from turbopump.client.names import check_group, check_topic, check_topic_for_sending
from turbopump.errors import InvalidArgument, InvalidExpression
from turbopump.filters.sql92 import Sql
from turbopump.filters.tags import wanted_tags
from turbopump.spark.option_hints import SOURCE_HINTS
from turbopump.spark.option_values import (
    Given,
    boolean,
    duration_ms,
    duration_ms_from,
    expression,
    natural,
    not_empty,
    on_bad_record,
    one_of,
    one_topic,
    positive,
    size_bytes,
    text_of,
)
from turbopump.spark.reading.partition_planner import PlanLimits
from turbopump.spark.reading.positions import (
    AtTime,
    Earliest,
    Latest,
    OfGroup,
    Position,
    has_time,
    parse_position,
)
from turbopump.spark.reading.queue_selection import Assigned, Chosen, TopicPattern, Topics
from turbopump.spark.records.bad_records import OnBadRecord
from turbopump.spark.records.schema import chosen_columns

FORMAT = "rocketmq"
READER_GROUP = "turbopump-spark"
"""The group of pulls if the user names none: pulls always need one."""

_TOPIC_OPTIONS = ("topic", "topics", "topicPattern", "assign")
_STRATEGY = "startingOffsetsByTimestampStrategy"
BATCH_ONLY = ("endingOffsets",)
STREAM_ONLY = (
    "maxOffsetsPerTrigger",
    "maxBytesPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "commitOffsets",
    "idleWait",
)
OPTIONS = (
    *("nameserver", "namespace", *_TOPIC_OPTIONS, "group", "allowSharedGroup"),
    *("startingOffsets", _STRATEGY, *BATCH_ONLY, "tags", "sql", *STREAM_ONLY),
    *("minPartitions", "maxRecordsPerPartition", "partitionPerQueue", "failOnDataLoss"),
    *("onBadRecord", "deadLetterTopic", "pullBatchSize", "pullsInFlight", "includeProperties"),
    *("columns", "readFrom", "requestTimeout", "retries", "discoveryInterval"),
)
"""The documented names of all options."""
_QueueIds: TypeAlias = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1)
]
_REQUEST_LEAST_MS = 100
_INTERVAL_LEAST_MS = 100
_IDLE_LEAST_MS = 10
"""Shorter times only load brokers and cause timeouts."""


@dataclass(frozen=True, slots=True)
class TriggerLimits:
    """How much a micro-batch may hold, and what it waits for."""

    rows_max: int | None = None
    bytes_max: int | None = None
    rows_min: int = 0
    delay_max_ms: int = 900_000


@dataclass(frozen=True, slots=True)
class Pulling:
    """How tasks pull messages."""

    tags: frozenset[str] | None = None
    """None for all."""
    expression: str | Sql = "*"
    count_max: int = 1000
    in_flight_max: int = 128
    timeout_ms: int = 10_000
    retries: int = 8
    by_topic: tuple[tuple[str, tuple[str, ...] | Sql], ...] = ()
    """Topics filtered by tags or an expression."""
    prefers_slave: bool = False

    def of(self, topic: str) -> Pulling:
        """Return the pull settings of one topic."""
        wanted = dict(self.by_topic).get(topic)
        if wanted is None:
            return self
        return replace(self, expression=wanted) if isinstance(wanted, Sql) else self.only(wanted)

    def only(self, tags: Iterable[str]) -> Pulling:
        """Return a copy restricted to some tags."""
        names = tuple(tags)
        return replace(self, tags=frozenset(names), expression=" || ".join(names))

    @property
    def is_filtered(self) -> bool:
        return self.tags is not None or isinstance(self.expression, Sql)


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """All options of a read, checked."""

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
    idle_wait_ms: int
    is_stream: bool
    on_bad_record: OnBadRecord = OnBadRecord.FAIL
    dead_letter_topic: str | None = None
    starts_at_message: bool = False
    """Whether a start time after the last message of a queue is an error."""

    @property
    def reader_group(self) -> str:
        """The group that pulls name."""
        return self.group or READER_GROUP

    @classmethod
    def for_batch(cls, options: Mapping[str, str]) -> SourceOptions:
        """Parse the options of a batch; raises InvalidArgument."""
        return _parsed(_given(options), is_stream=False)

    @classmethod
    def for_stream(cls, options: Mapping[str, str]) -> SourceOptions:
        """Parse the options of a stream; raises InvalidArgument."""
        return _parsed(_given(options), is_stream=True)


def columns_of(options: Mapping[str, str]) -> tuple[str, ...]:
    """Return the requested columns, before the kind of read is known."""
    return _columns(_given(options))


def on_bad_record_of(options: Mapping[str, str]) -> OnBadRecord:
    """Return the configured handling of records that cannot be decoded."""
    return _on_bad_record(_given(options))


def _given(options: Mapping[str, str]) -> Given:
    return Given(options, OPTIONS, FORMAT, SOURCE_HINTS)


def _parsed(given: Given, *, is_stream: bool) -> SourceOptions:
    _require_consistent(given, is_stream=is_stream)
    start: Position = Latest() if is_stream else Earliest()
    group = given.find("group", _group, None)
    is_shared = given.find("allowSharedGroup", boolean, default=False)
    client = _client(given)
    return SourceOptions(
        client=client,
        chosen=_chosen(given),
        group=group,
        allow_shared_group=is_shared,
        start=given.find("startingOffsets", parse_position, start if group is None else OfGroup()),
        end=parse_position("endingOffsets", given["endingOffsets"] or "latest"),
        pulling=_pulling(given, client.request_timeout_ms),
        trigger=_trigger(given),
        plan=PlanLimits(
            given.find("minPartitions", positive, None),
            given.find("maxRecordsPerPartition", positive, None),
            given.find("partitionPerQueue", boolean, default=False),
        ),
        fail_on_data_loss=given.find("failOnDataLoss", boolean, default=True),
        commit_offsets=given.find("commitOffsets", boolean, group is not None and not is_shared),
        columns=_columns(given),
        idle_wait_ms=given.find("idleWait", duration_ms_from(_IDLE_LEAST_MS), 500),
        is_stream=is_stream,
        on_bad_record=_on_bad_record(given),
        dead_letter_topic=given.find("deadLetterTopic", _topic_to_send, None),
        starts_at_message=given.find(_STRATEGY, one_of("error", "latest"), "latest") == "error",
    )


def _require_consistent(given: Given, *, is_stream: bool) -> None:
    """Refuse contradictory options, all in one message."""
    others, of_others = (BATCH_ONLY, "batch reads") if is_stream else (STREAM_ONLY, "streams")
    wrong = [f"{name} is for {of_others} only" for name in others if name in given]
    chosen = [name for name in _TOPIC_OPTIONS if name in given]
    if len(chosen) != 1:
        which = " and ".join(chosen) or "none"
        wrong.append(f"specify exactly one of {', '.join(_TOPIC_OPTIONS)}, got {which}")
    if "tags" in given and "sql" in given and not _is_json(given, "tags", "sql"):
        wrong.append("tags and sql are mutually exclusive, unless both are JSON by topic")
    wrong += _incomplete(given)
    if "includeProperties" in given and "columns" in given:
        wrong.append("includeProperties and columns are mutually exclusive: list the columns")
    is_on = partial(given.find, read=boolean, default=False)
    if is_on("partitionPerQueue"):
        wrong += [
            f"partitionPerQueue and {name} are mutually exclusive"
            for name in ("minPartitions", "maxRecordsPerPartition")
            if name in given
        ]
    if "group" not in given:
        wrong += _without_group(given)
    wrong += _about_dead_letters(given)
    if is_on("allowSharedGroup") and is_on("commitOffsets"):
        wrong.append(
            "commitOffsets and allowSharedGroup are mutually exclusive: push consumers of the "
            "group would skip what this query commits"
        )
    if not is_stream:
        wrong += _without_rows(given)
    if wrong:
        raise InvalidArgument(f"invalid options of format {FORMAT}: {'; '.join(wrong)}")


def _incomplete(given: Given) -> list[str]:
    """Return options that have no effect without another one."""
    wrong = []
    if "maxTriggerDelay" in given and "minOffsetsPerTrigger" not in given:
        wrong.append("maxTriggerDelay needs minOffsetsPerTrigger")
    if _STRATEGY in given and not has_time(given.find("startingOffsets", parse_position, Latest())):
        wrong.append(f"{_STRATEGY} needs a timestamp in startingOffsets")
    return wrong


def _without_group(given: Given) -> list[str]:
    wrong = [
        f"{name}=group needs the option group"
        for name in ("startingOffsets", "endingOffsets")
        if isinstance(given.find(name, parse_position, None), OfGroup)
    ]
    if given.find("commitOffsets", boolean, default=False):
        wrong.append("commitOffsets needs a group")
    if "allowSharedGroup" in given:
        wrong.append("allowSharedGroup needs a group")
    return wrong


def _about_dead_letters(given: Given) -> list[str]:
    sends = _on_bad_record(given) is OnBadRecord.DEAD_LETTER
    if "deadLetterTopic" in given and not sends:
        return ["deadLetterTopic needs onBadRecord=deadLetter"]
    if sends and "deadLetterTopic" not in given and "group" not in given:
        return ["onBadRecord=deadLetter needs a group or the option deadLetterTopic"]
    read = [name.strip() for name in f"{given['topic']},{given['topics']}".split(",")]
    if sends and given["deadLetterTopic"] in filter(None, read):
        return ["deadLetterTopic must not be a topic that is read"]
    return []


def _without_rows(given: Given) -> list[str]:
    """Return why a batch would have no rows, whatever the topics contain."""
    start = given.find("startingOffsets", parse_position, Earliest())
    end = given.find("endingOffsets", parse_position, Latest())
    wrong = []
    if isinstance(start, Latest):
        wrong.append("startingOffsets=latest leaves a batch nothing to read")
    if isinstance(end, Earliest):
        wrong.append("endingOffsets=earliest leaves a batch nothing to read")
    if (
        isinstance(start, AtTime)
        and isinstance(end, AtTime)
        and start.timestamp_ms >= end.timestamp_ms
    ):
        wrong.append(
            f"startingOffsets {given['startingOffsets']} must be before endingOffsets "
            f"{given['endingOffsets']}"
        )
    return wrong


def _client(given: Given) -> ClientConfig:
    client = ClientConfig(
        nameserver=given["nameserver"],
        namespace=given["namespace"],
        request_timeout=given.find("requestTimeout", duration_ms_from(_REQUEST_LEAST_MS), 10_000)
        / 1000,
        route_interval=given.find("discoveryInterval", duration_ms_from(_INTERVAL_LEAST_MS), 30_000)
        / 1000,
    )
    # Executors may run in another environment than the driver.
    return replace(client, nameserver=";".join(client.nameserver_addresses))


def _chosen(given: Given) -> Chosen:
    if "topicPattern" in given:
        return TopicPattern(expression("topicPattern", given["topicPattern"]))
    if "assign" in given:
        return Assigned(tuple(sorted(set(_assigned(given["assign"])))))
    names = [name.strip() for name in given["topics"].split(",")]
    if "topic" in given:
        names = [one_topic("topic", given["topic"])]
    for name in names:
        check_topic(name)
    return Topics(tuple(dict.fromkeys(names)))


def _assigned(text: str) -> list[tuple[str, str, int]]:
    try:
        topics = msgspec.json.decode(text, type=dict[str, _QueueIds | dict[str, _QueueIds]])
    except msgspec.DecodeError:
        topics = {}
    found = []
    for topic, below in topics.items():
        check_topic(topic)
        for broker, numbers in ({"": below} if isinstance(below, list) else below).items():
            found += [(topic, broker, number) for number in numbers]
    if not found:
        raise InvalidArgument(
            'option assign must be JSON such as {"orders": {"broker-a": [0, 1]}}, or {"orders": '
            f"[0, 1]}} with one broker, got {text!r}"
        )
    return found


def _pulling(given: Given, timeout_ms: int) -> Pulling:
    pulling = Pulling(
        count_max=given.find("pullBatchSize", positive, 1000),
        in_flight_max=given.find("pullsInFlight", positive, 128),
        timeout_ms=timeout_ms,
        retries=given.find("retries", natural, 8),
        prefers_slave=given.find("readFrom", one_of("master", "slave"), "master") == "slave",
    )
    if _is_json(given, "sql") or _is_json(given, "tags"):
        return replace(pulling, by_topic=_by_topic(given))
    if "sql" in given:
        return replace(pulling, expression=_sql(not_empty("sql", given["sql"]), "option sql"))
    wanted = wanted_tags(given.as_written("tags"), "option tags")
    return pulling if wanted.everything else pulling.only(wanted.tags)


def _is_json(given: Given, *names: str) -> bool:
    return all(given[name].startswith("{") for name in names)


def _sql(text: object, what: str) -> Sql:
    if not isinstance(text, str):
        raise InvalidArgument(f"{what} must be an SQL92 expression, got {text!r}")
    try:
        return Sql(text)
    except InvalidExpression as error:
        raise InvalidArgument(f"{what} is {text!r}: {error}") from error


def _by_topic(given: Given) -> tuple[tuple[str, tuple[str, ...] | Sql], ...]:
    tags = {
        topic: wanted_tags(expression, f"option tags: the tag expression of topic {topic!r}")
        for topic, expression in _json_by_topic(given, "tags", "created || paid").items()
    }
    sql = {
        topic: _sql(expression, f"option sql: the expression of topic {topic!r}")
        for topic, expression in _json_by_topic(given, "sql", "amount > 100").items()
    }
    if both := tags.keys() & sql.keys():
        raise InvalidArgument(f"options tags and sql both name {', '.join(sorted(both))}")
    some_tags = {topic: wanted.tags for topic, wanted in tags.items() if not wanted.everything}
    return tuple(sorted((some_tags | sql).items(), key=itemgetter(0)))


def _json_by_topic(given: Given, name: str, example: str) -> dict[str, Any]:
    """Parse an option that is JSON by topic; empty if it is not given."""
    text = given[name] or "{}"
    refusal = f'option {name} must be JSON such as {{"orders": "{example}"}}, got {text!r}'
    try:
        found = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        raise InvalidArgument(refusal) from None
    chosen = _chosen(given)
    if isinstance(chosen, Topics) and (others := found.keys() - set(chosen.names)):
        raise InvalidArgument(f"option {name} names {', '.join(sorted(others))}, which is not read")
    return found


def _trigger(given: Given) -> TriggerLimits:
    limits = TriggerLimits(
        given.find("maxOffsetsPerTrigger", positive, None),
        given.find("maxBytesPerTrigger", size_bytes, None),
        given.find("minOffsetsPerTrigger", natural, 0),
        given.find("maxTriggerDelay", duration_ms, 900_000),
    )
    if limits.rows_max is not None and limits.rows_min > limits.rows_max:
        raise InvalidArgument(
            f"minOffsetsPerTrigger must be at most maxOffsetsPerTrigger, {limits.rows_max}, got "
            f"{limits.rows_min}"
        )
    return limits


def _columns(given: Given) -> tuple[str, ...]:
    keeps_rows = _on_bad_record(given) is OnBadRecord.NULL
    columns = chosen_columns(given.find("columns", text_of, None), with_errors=keeps_rows)
    if given.find("includeProperties", boolean, default=True):
        return columns
    return tuple(name for name in columns if name != "properties")


def _on_bad_record(given: Given) -> OnBadRecord:
    return given.find("onBadRecord", on_bad_record(*OnBadRecord), OnBadRecord.FAIL)


def _topic_to_send(name: str, text: str) -> str:
    check_topic_for_sending(one_topic(name, text))
    return text


def _group(name: str, text: str) -> str:  # noqa: ARG001 - the signature of all parsers
    check_group(text)
    return text
