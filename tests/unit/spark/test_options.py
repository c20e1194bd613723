"""The options of the source: their meaning, and the errors for invalid values."""

from __future__ import annotations

import pickle
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from turbopump.errors import InvalidArgument
from turbopump.message import MessageQueue
from turbopump.spark.reading.options import OPTIONS, SourceOptions, columns_of
from turbopump.spark.reading.positions import AtTime, Earliest, Explicit, Latest, OfGroup
from turbopump.spark.reading.queue_selection import Assigned, TopicPattern, Topics
from turbopump.spark.records.schema import COLUMNS

PLAIN = {"nameserver": "127.0.0.1:9876", "topic": "orders"}


def batch(**options: str) -> SourceOptions:
    return SourceOptions.for_batch({key.lower(): text for key, text in (PLAIN | options).items()})


def stream(**options: str) -> SourceOptions:
    return SourceOptions.for_stream({key.lower(): text for key, text in (PLAIN | options).items()})


def instead_of_topic(**options: str) -> SourceOptions:
    return SourceOptions.for_batch({"nameserver": "127.0.0.1:9876", **options})


def test_few_options_are_required() -> None:
    found = batch()
    assert found.chosen == Topics(("orders",))
    assert (found.start, found.end) == (Earliest(), Latest())
    assert found.fail_on_data_loss
    assert not found.commit_offsets
    assert found.columns == COLUMNS
    assert not found.pulling.is_filtered
    assert stream().start == Latest()


def test_a_group_sets_the_start_offsets_and_the_committed_ones() -> None:
    found = stream(group="billing")
    assert found.start == OfGroup()
    assert found.commit_offsets
    assert not stream(group="billing", commitOffsets="false").commit_offsets
    assert stream(group="billing", startingOffsets="earliest").start == Earliest()


def test_topics_are_chosen_in_one_of_four_ways() -> None:
    assert instead_of_topic(topics="a, b,a").chosen == Topics(("a", "b"))
    assert instead_of_topic(topicPattern="order.*").chosen == TopicPattern("order.*")
    assigned = instead_of_topic(assign='{"a": {"broker-b": [1, 0]}, "c": [2]}').chosen
    assert assigned == Assigned((("a", "broker-b", 0), ("a", "broker-b", 1), ("c", "", 2)))


@pytest.mark.parametrize("text", ["a,b", "a, b"])
def test_several_topics_have_their_own_option(text: str) -> None:
    with pytest.raises(InvalidArgument, match="use option topics for several"):
        instead_of_topic(topic=text)


def test_queues_of_a_checkpoint_are_still_chosen_or_not() -> None:
    queue, retry = MessageQueue("a", "b1", 2), MessageQueue("%RETRY%a", "b1", 0)
    assert Topics(("a",)).has(queue)
    assert not Topics(("b",)).has(queue)
    assert TopicPattern("a.*|.*a").has(queue)
    assert not TopicPattern(".*").has(retry)
    assert TopicPattern("%RETRY%.*").has(retry)
    assert Assigned((("a", "", 2),)).has(queue)
    assert Assigned((("a", "b1", 2),)).has(queue)
    assert not Assigned((("a", "b2", 2), ("a", "", 1))).has(queue)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("earliest", Earliest()),
        ("LATEST", Latest()),
        ("1769846400000", AtTime(1769846400000)),
        ("2026-01-31T08:00:00Z", AtTime(1769846400000)),
        ("2026-01-31T09:00:00+01:00", AtTime(1769846400000)),
        ("2026-01-31T08:00:00", AtTime(1769846400000)),
        (
            '{"orders": {"b": {"0": 5, "1": -2}}}',
            Explicit((("orders", "b", 0, 5), ("orders", "b", 1, -2))),
        ),
        ('{"orders": {"0": -1}}', Explicit((("orders", "", 0, -1),))),
        (
            '{"orders": {"0": "2026-01-31T08:00:00Z", "1": " 1769846400000", "2": 7}}',
            Explicit(
                (
                    ("orders", "", 0, AtTime(1769846400000)),
                    ("orders", "", 1, AtTime(1769846400000)),
                    ("orders", "", 2, 7),
                )
            ),
        ),
    ],
)
def test_positions_are_given_in_several_ways(text: str, meant: object) -> None:
    assert stream(startingOffsets=text).start == meant
    if text != "earliest":
        assert batch(endingOffsets=text).end == meant


def test_a_time_without_zone_is_utc() -> None:
    at = batch(startingOffsets="2026-01-31").start
    assert at == AtTime(round(datetime(2026, 1, 31, tzinfo=UTC).timestamp() * 1000))


def test_everything_else_that_can_be_set() -> None:
    found = stream(
        namespace="staging",
        group="billing",
        allowSharedGroup="true",
        tags="paid || created",
        maxOffsetsPerTrigger="1000",
        maxBytesPerTrigger="64m",
        minOffsetsPerTrigger="10",
        maxTriggerDelay="1m",
        minPartitions="8",
        maxRecordsPerPartition="500",
        failOnDataLoss="FALSE",
        pullBatchSize="64",
        pullsInFlight="4",
        includeProperties="false",
        requestTimeout="5s",
        retries="3",
        discoveryInterval="10s",
        idleWait="250",
    )
    assert found.client.namespace == "staging"
    assert found.allow_shared_group
    assert found.pulling.tags == frozenset({"paid", "created"})
    assert (found.pulling.count_max, found.pulling.in_flight_max) == (64, 4)
    assert (found.pulling.timeout_ms, found.pulling.retries) == (5000, 3)
    assert (found.trigger.rows_max, found.trigger.bytes_max) == (1000, 64 << 20)
    assert (found.trigger.rows_min, found.trigger.delay_max_ms) == (10, 60_000)
    assert (found.plan.partitions_min, found.plan.rows_per_partition_max) == (8, 500)
    assert not found.fail_on_data_loss
    assert "properties" not in found.columns
    assert found.client.route_interval_ms == 10_000
    assert found.idle_wait_ms == 250
    assert batch(sql="price > 3").pulling.is_filtered
    assert batch(columns="body, queueid").columns == ("body", "queueId")


def test_options_can_be_sent_to_executors() -> None:
    found = stream(group="billing", tags="a")
    assert pickle.loads(pickle.dumps(found)) == found


def test_executors_get_the_name_servers_of_the_drivers_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NAMESRV_ADDR", "10.0.0.1:9876; 10.0.0.2:9876")
    sent = pickle.dumps(SourceOptions.for_batch({"topic": "orders"}))
    monkeypatch.delenv("NAMESRV_ADDR")
    assert pickle.loads(sent).client.nameserver_addresses == ("10.0.0.1:9876", "10.0.0.2:9876")


def test_a_shared_group_is_left_where_it_is() -> None:
    assert stream(group="billing").commit_offsets
    assert not stream(group="billing", allowSharedGroup="true").commit_offsets
    assert stream(group="billing", allowSharedGroup="false", commitOffsets="true").commit_offsets


@pytest.mark.parametrize("option", OPTIONS)
def test_names_are_the_same_in_any_case(option: str) -> None:
    values = {"includeProperties": "true", "onBadRecord": "skip"}
    assert columns_of({option.upper(): values.get(option, "body")})


def test_an_unknown_option_is_reported_with_all_valid_ones() -> None:
    with pytest.raises(InvalidArgument) as raised:
        batch(startingOffset="latest", strange="1")
    text = str(raised.value)
    assert "'startingoffset' (did you mean startingOffsets?)" in text
    assert "'strange'" in text
    assert all(option in text for option in OPTIONS)


def test_contradictions_are_reported_together() -> None:
    with pytest.raises(InvalidArgument) as raised:
        stream(topics="a,b", tags="a", sql="b > 1", endingOffsets="latest", commitOffsets="true")
    text = str(raised.value)
    assert (
        "specify exactly one of topic, topics, topicPattern, assign, got topic and topics" in text
    )
    assert "tags and sql are mutually exclusive" in text
    assert "endingOffsets is for batch reads only" in text
    assert "commitOffsets needs a group" in text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"startingOffsets": "group"}, "startingOffsets=group needs the option group"),
        ({"startingOffsets": "yesterday"}, "option startingOffsets must be earliest"),
        ({"startingOffsets": "{"}, "got '{': Input data was truncated"),
        ({"startingOffsets": '{"orders": 3}'}, "option startingOffsets must be earliest"),
        ({"startingOffsets": '{"orders": {"0": -3}}'}, "got '0' at -3"),
        ({"startingOffsets": '{"orders": {"b": {"x": 3}}}'}, "got 'x' at 3"),
        ({"startingOffsets": '{"orders": {"0": true}}'}, "got `bool`"),
        ({"startingOffsets": '{"orders": {"b": {"0": "17"}}}'}, "between 1973 and 9999, got '17'"),
        (
            {"startingOffsets": '{"orders": {"0": "noon"}}'},
            "must be offsets as numbers and timestamps as quoted text",
        ),
        ({"path": "orders"}, "'path' (use topic, or topics for several; load() takes no path)"),
        ({"checkpointLocation": "x"}, "'checkpointLocation' (use it with writeStream"),
        ({"kafka.sasl.mechanism": "x"}, "(TLS and credentials are not supported)"),
        (
            {"startingOffsetsByTimestamp": "{}"},
            '(use timestamps in startingOffsets, as startingOffsets={"orders": {"0": "2026-01-31',
        ),
        ({"maxOffsetsPerTrigger": "5"}, "maxOffsetsPerTrigger is for streams only"),
        ({"minPartitions": "0"}, "option minPartitions must be a whole number, 1 or more, got '0'"),
        ({"minPartitions": "9" * 5000}, "a whole number, 1 or more"),
        ({"retries": "-1"}, "option retries must be a whole number, 0 or more, got '-1'"),
        ({"failOnDataLoss": "no"}, "option failOnDataLoss must be true or false, got 'no'"),
        ({"requestTimeout": "9" * 5000}, "a duration such as"),
        ({"requestTimeout": "25d"}, "1m, up to 24d"),
        ({"group": None}, "option group must not be None; omit it"),
        ({"requestTimeout": "soon"}, "option requestTimeout must be a duration such as"),
        ({"allowSharedGroup": "true"}, "allowSharedGroup needs a group"),
        ({"columns": "body,colour"}, "unknown column 'colour'"),
        ({"columns": "body,propertis"}, "'propertis' (did you mean properties?)"),
        ({"columns": "value,timestampType"}, "'value' (use body), 'timestampType' (not needed"),
        ({"keys": "k1"}, "'keys' (use where() on the column keys; brokers filter by tags and sql)"),
        (
            {"startingOffsetsByTimestampStrategy": "error"},
            "startingOffsetsByTimestampStrategy needs a timestamp in startingOffsets",
        ),
        (
            {"startingOffsets": "earliest", "startingOffsetsByTimestampStrategy": "latest"},
            "startingOffsetsByTimestampStrategy needs a timestamp in startingOffsets",
        ),
        (
            {"startingOffsets": "2026-02-01", "startingOffsetsByTimestampStrategy": "eror"},
            "Strategy must be error or latest, got 'eror' (did you mean error?)",
        ),
        ({"columns": "body", "includeProperties": "false"}, "includeProperties and columns"),
        ({"group": "bad group"}, ", got 'bad group'"),
        ({"topic": "bad topic"}, ", got 'bad topic'"),
        ({"nameserver": "nowhere"}, "nowhere"),
        ({"sql": ""}, "option sql must not be empty"),
        ({"sql": "a >< 1"}, "option sql is 'a >< 1': expected a property name"),
        (
            {"startingOffsets": "latest"},
            "startingOffsets=latest leaves a batch nothing to read",
        ),
        ({"endingOffsets": "earliest"}, "endingOffsets=earliest leaves a batch nothing to read"),
        (
            {"startingOffsets": "2026-02-01", "endingOffsets": "1769846400000"},
            "startingOffsets 2026-02-01 must be before endingOffsets 1769846400000",
        ),
        (
            {"startingOffsets": "20260131"},
            "must be a timestamp between 1973 and 9999, got '20260131'",
        ),
        ({"endingOffsets": "1769846400"}, "write one such as 2026-01-31T08:00:00Z"),
        ({"startingOffsets": "1769846400000000"}, "a timestamp between 1973 and 9999"),
        ({"requestTimeout": "5"}, "option requestTimeout must be at least 100ms, got '5' (5 ms)"),
        ({"discoveryInterval": "30"}, "must be at least 100ms, got '30' (30 ms)"),
    ],
)
def test_invalid_values_are_reported(options: dict[str, str], told: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        batch(**options)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"maxTriggerDelay": "1m"}, "maxTriggerDelay needs minOffsetsPerTrigger"),
        ({"maxBytesPerTrigger": "many"}, "option maxBytesPerTrigger must be a size"),
        (
            {"minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "4"},
            "minOffsetsPerTrigger must be at most maxOffsetsPerTrigger, 4, got 5",
        ),
        ({"pushFilters": "true"}, "'pushFilters' (use startingOffsets, endingOffsets, tags"),
        ({"idleWait": "1"}, "option idleWait must be at least 10ms, got '1' (1 ms)"),
        (
            {"group": "g", "allowSharedGroup": "true", "commitOffsets": "true"},
            "commitOffsets and allowSharedGroup are mutually exclusive: push consumers",
        ),
    ],
)
def test_invalid_values_of_streams_are_reported(options: dict[str, str], told: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        stream(**options)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "assign, got none"),
        ({"topicPattern": "("}, "option topicPattern must be a regular expression, got '('"),
        ({"assign": "[]"}, "one broker, got '[]'"),
        ({"assign": "{}"}, "one broker, got '{}'"),
        ({"assign": '{"a": []}'}, "option assign must be JSON"),
        ({"assign": '{"a": {"b": []}}'}, "option assign must be JSON"),
        ({"assign": '{"a": {}}'}, "option assign must be JSON"),
        ({"assign": '{"a": {"b": 5}}'}, "option assign must be JSON"),
        ({"assign": '{"a": 5}'}, "option assign must be JSON"),
        ({"assign": '{"a": {"b": ["0"]}}'}, "option assign must be JSON"),
    ],
)
def test_invalid_topic_choices_are_reported(options: dict[str, str], told: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        instead_of_topic(**options)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    "start", ["2026-02-01", "group,2026-02-01", '{"t": {"0": 1, "1": "2026-02-01"}}']
)
def test_what_happens_without_a_message_after_the_start_time(start: str) -> None:
    given = {"group": "g", "startingOffsets": start}
    assert not stream(**given).starts_at_message
    for word, is_error in (("Error", True), ("latest", False)):
        given["startingOffsetsByTimestampStrategy"] = word
        assert stream(**given).starts_at_message is is_error
        assert batch(**given).starts_at_message is is_error


@pytest.mark.parametrize(("text", "prefers"), [("master", False), ("slave", True), ("SLAVE", True)])
def test_the_replica_to_read(text: str, *, prefers: bool) -> None:
    assert batch(readFrom=text).pulling.prefers_slave is prefers
    assert not batch().pulling.prefers_slave


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"readFrom": "slvae"},
            "option readFrom must be master or slave, got 'slvae' (did you mean slave?)",
        ),
        ({"readFrom": "replica"}, "option readFrom must be master or slave, got 'replica'"),
        ({"readfromm": "slave"}, "did you mean readFrom?"),
    ],
)
def test_a_misspelled_replica(options: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(words)):
        batch(**options)


def test_every_option_is_documented() -> None:
    guide = Path(__file__).parents[3] / "docs" / "guide" / "spark-source.md"
    table = guide.read_text(encoding="utf-8").partition("\n## Options\n")[2].partition("\n### ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \| .* \| .+ \|$", table, re.MULTILINE)) == sorted(
        OPTIONS
    )
