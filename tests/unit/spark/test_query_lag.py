"""Lag of streaming queries, from progress as Spark reports it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryTerminatedEvent,
    StreamingQueryProgress,
)

from turbopump.message import MessageQueue
from turbopump.spark import LagListener, PrometheusListener, SourceLag
from turbopump.spark.pipelines import archive_writer
from turbopump.spark.query_lag import Spread, lag, lag_of
from turbopump.spark.reading.offsets import NOTHING_BELOW, Marks, nested, reported

NOON_MS = 1_794_830_400_000
RUN_ID = "22222222-2222-2222-2222-222222222222"


def queue(number: int, topic: str = "orders") -> MessageQueue:
    return MessageQueue(topic, "broker-a", number)


def source(end: dict[MessageQueue, int], latest: object, marks: Marks | None = None) -> Any:
    return {
        "description": "PythonMicroBatchStream",
        "startOffset": None,
        "endOffset": nested(end, marks),
        "latestOffset": latest,
        "numInputRows": 70,
        "inputRowsPerSecond": 1.0,
        "processedRowsPerSecond": 1.0,
    }


def progress(
    *sources: Any, name: str | None = "stats", run_id: str = RUN_ID, **observed: Any
) -> StreamingQueryProgress:
    return StreamingQueryProgress.fromJson(
        {
            "id": "11111111-1111-1111-1111-111111111111",
            "runId": run_id,
            "name": name,
            "timestamp": "2026-11-16T12:00:00.000Z",
            "batchId": 3,
            "batchDuration": 1,
            "durationMs": {},
            "eventTime": {},
            "stateOperators": [],
            "sources": list(sources),
            "sink": {"description": "noop", "numOutputRows": 70},
            "observedMetrics": observed,
        }
    )


ORDERS = source(
    {queue(0): 35, queue(1): 40, queue(2): 7},
    reported({queue(0): 100, queue(1): 41, queue(2): 7}, "order-stats"),
    {queue(0): (NOON_MS - 6_000, 1), queue(1): (NOON_MS - 3_000, 2), queue(2): (NOON_MS - 9, 3)},
)


def test_offsets_and_seconds_behind_are_those_after_the_batch() -> None:
    assert lag_of(progress(ORDERS)) == (
        SourceLag(
            query="stats",
            run_id=RUN_ID,
            batch_id=3,
            topics=("orders",),
            group="order-stats",
            rows=70,
            queues=3,
            offsets=Spread(0, 22, 65),
            offsets_total=66,
            seconds=Spread(0, 3, 6),
        ),
    )


def test_a_lag_is_one_line_of_text() -> None:
    assert str(lag_of(progress(ORDERS))[0]) == (
        "orders (group order-stats), batch 3: 70 rows from 3 queues; min / avg / max behind: "
        "0 / 22 / 65 messages, 0 / 3 / 6 seconds"
    )


def test_a_query_without_name_and_group_and_with_nothing_read_yet() -> None:
    found = lag_of(progress(source({queue(0): 0}, reported({queue(0): 10}, None)), name=None))[0]
    assert (found.query, found.group) == ("11111111-1111-1111-1111-111111111111", None)
    assert (found.offsets, found.seconds) == (Spread(10, 10, 10), None)
    assert "10 / 10 / 10 messages, unknown seconds" in str(found)


def test_a_message_stored_after_the_trigger_has_no_negative_lag() -> None:
    late = {queue(0): (NOON_MS + 5_000, 1)}
    found = lag_of(progress(source({queue(0): 1}, reported({queue(0): 2}, "g"), late)))[0]
    assert found.seconds == Spread(0, 0, 0)


def test_a_queue_without_a_message_before_its_offset_has_unknown_seconds() -> None:
    end, latest = {queue(0): 50, queue(1): 4}, reported({queue(0): 60, queue(1): 5}, "g")
    marks = {queue(0): NOTHING_BELOW, queue(1): (NOON_MS - 2_000, 1)}
    (found,) = lag_of(progress(source(end, latest, marks)))
    assert (found.offsets, found.seconds) == (Spread(1, 5.5, 10), Spread(2, 2, 2))


@pytest.mark.parametrize(
    "latest",
    [
        None,
        "text",
        17,
        {"orders": {"0": 17}},
        {"": {}, "orders": {"broker-a": {"0": 17}}},
        reported({}, "before the first queue"),
    ],
)
def test_other_sources_and_unknown_ends_have_no_lag(latest: object) -> None:
    end = {queue(0): 1}
    assert lag_of(progress(source(end, latest), ORDERS)) == lag_of(progress(ORDERS))


def test_a_batch_that_spark_repeats_after_a_restart_has_rows_but_no_lag() -> None:
    repeated = source({queue(0): 7, queue(1): 9}, None, {queue(0): (NOON_MS, 1)})
    (found,) = lag_of(progress(repeated))
    assert (found.topics, found.queues, found.rows, found.batch_id) == (("orders",), 2, 70, 3)
    assert (found.group, found.offsets, found.offsets_total, found.seconds) == (None,) * 4
    assert str(found) == (
        "orders, batch 3: 70 rows from 2 queues; lag unknown: the batch is repeated"
    )


def test_an_archive_shows_no_total_while_the_lag_is_unknown() -> None:
    def shown(last: StreamingQueryProgress | None) -> tuple[int | None, int | None]:
        query, writer = SimpleNamespace(lastProgress=last), SimpleNamespace(rows=70)
        step = archive_writer._step(cast(Any, query), cast(Any, writer))
        return step.done, step.total

    repeated = source({queue(0): 7}, None, {queue(0): (NOON_MS, 1)})
    assert shown(None) == (70, None)
    assert shown(progress(repeated)) == (70, None)
    assert shown(progress(ORDERS)) == (70, 136)


def test_each_source_of_a_query_has_its_own_lag() -> None:
    found = lag_of(progress(ORDERS, PAYMENTS))
    assert [each.name for each in found] == [
        "orders (group order-stats)",
        "payments (group billing)",
    ]


PAYMENTS = source({queue(0, "payments"): 5}, reported({queue(0, "payments"): 6}, "billing"))
APART = {"values": [70, 2], "schema": {"fields": [{"name": "rows"}, {"name": "bad"}]}}


@pytest.mark.parametrize(
    ("metrics", "bad"),
    [
        ({"turbopump": {"rows": 70, "bad": 2}}, 2),
        ({"turbopump": APART}, 2),
        ({"turbopump": {"rows": 0, "bad": None}}, 0),
        ({"turbopump": {"rows": 70}}, None),
        ({"others": {"bad": 2}}, None),
    ],
)
def test_bad_records_are_those_that_the_query_counts(
    metrics: dict[str, Any], bad: int | None
) -> None:
    assert lag_of(progress(ORDERS, **metrics))[0].bad == bad
    assert [each.bad for each in lag_of(progress(ORDERS, PAYMENTS, **metrics))] == [None, None]
    text = str(lag_of(progress(ORDERS, **metrics))[0])
    assert ("70 rows, 2 of them bad, from 3 queues" in text) == (bad == 2)


def test_a_query_before_its_first_batch_has_no_lag() -> None:
    assert lag(cast(Any, SimpleNamespace(lastProgress=None))) == ()


# --- listeners ------------------------------------------------------------------------------------


def heard(of: StreamingQueryProgress) -> QueryProgressEvent:
    return cast(QueryProgressEvent, SimpleNamespace(progress=of))


def test_a_listener_logs_or_calls_a_function(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[SourceLag] = []
    with caplog.at_level(logging.INFO, "turbopump.spark"):
        LagListener().onQueryProgress(heard(progress(ORDERS)))
    LagListener(calls.append).onQueryProgress(heard(progress(ORDERS)))
    assert caplog.messages == [str(calls[0])]


@pytest.fixture
def registry() -> Any:
    return pytest.importorskip("prometheus_client").CollectorRegistry()


def ended(run_id: str = RUN_ID) -> QueryTerminatedEvent:
    return cast(QueryTerminatedEvent, SimpleNamespace(runId=run_id))


def exported(registry: Any) -> dict[str, set[str]]:
    """Return for which topics each metric has values."""
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    return {
        each.name: {other.labels["topics"] for other in samples if other.name == each.name}
        for each in samples
        if not each.name.endswith("_created")
    }


def test_prometheus_has_the_figures_of_running_queries_only(registry: Any) -> None:
    listener = PrometheusListener(registry)
    source_labels = {"query": "stats", "topics": "orders", "group": "order-stats"}

    def value(name: str, **labels: str) -> float | None:
        found = registry.get_sample_value(f"turbopump_spark_{name}", source_labels | labels)
        return cast("float | None", found)

    for _ in range(2):
        listener.onQueryProgress(heard(progress(ORDERS, turbopump={"bad": 3})))
    assert [value("lag_offsets", stat=stat) for stat in ("min", "avg", "max")] == [0, 22, 65]
    assert [value("lag_seconds", stat=stat) for stat in ("min", "avg", "max")] == [0, 3, 6]
    assert (value("rows_total"), value("unread"), value("batch")) == (140, 66, 3)
    assert value("bad_records_total") == 6
    listener.onQueryTerminated(ended())
    assert exported(registry) == {}


def test_prometheus_has_the_topics_of_the_last_batch_only(registry: Any) -> None:
    listener = PrometheusListener(registry)
    both = {queue(0): 1, queue(0, "new"): 1}
    for latest in ({queue(0): 1}, both):
        found = progress(source(latest, reported(latest, "g")), turbopump={"bad": 0})
        listener.onQueryProgress(heard(found))
    assert set.union(*exported(registry).values()) == {"new,orders"}
    listener.onQueryProgress(heard(progress(source({queue(0): 1}, None))))
    assert exported(registry), "a batch without figures keeps the previous ones"
    listener.onQueryTerminated(ended())
    assert exported(registry) == {}


def test_prometheus_keeps_what_a_later_run_of_the_query_has(registry: Any) -> None:
    listener = PrometheusListener(registry)
    later = RUN_ID.replace("2", "3")
    listener.onQueryProgress(heard(progress(ORDERS)))
    listener.onQueryProgress(heard(progress(ORDERS, run_id=later)))
    listener.onQueryTerminated(ended())
    assert set.union(*exported(registry).values()) == {"orders"}
    listener.onQueryTerminated(ended(later))
    assert exported(registry) == {}
