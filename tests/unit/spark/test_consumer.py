"""The settings of a consumer on Spark, and their effects; no Spark is started."""

from __future__ import annotations

import inspect
import json
import re
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any, cast

import pytest
from pyspark.errors import PySparkAttributeError, StreamingQueryException
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming.listener import QueryProgressEvent, QueryTerminatedEvent
from pyspark.sql.streaming.query import StreamingQuery

from turbopump.client.start_position import AtTime, start_in
from turbopump.errors import InvalidArgument
from turbopump.filters.sql92 import Sql
from turbopump.spark import SparkConsumer
from turbopump.spark.consumer import ConsumerRun
from turbopump.spark.consuming.handler_runner import Counts
from turbopump.spark.consuming.progress import ConsumerReport, ListeningWatcher, PollingWatcher
from turbopump.spark.reading import positions
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.stream_counts import METRICS

EAST, WEST = timezone(timedelta(hours=9)), timezone(timedelta(hours=-5))
NO_SPARK = cast("SparkSession", None)


def handle(_: object) -> bool:
    return True


def consumer(**changes: Any) -> SparkConsumer:
    given: dict[str, Any] = {
        "group": "billing",
        "handler": handle,
        "spark": NO_SPARK,
        "subscriptions": {"orders": "*"},
        "checkpoint": "/tmp/checkpoint",
        "nameserver": "127.0.0.1:9876",
    }
    return SparkConsumer(**(given | changes))


def test_retry_topic_is_read_along_with_the_topics() -> None:
    made = consumer(subscriptions={"orders": "created || paid", "refunds": "*"})
    options = made._options
    assert options["topics"] == "orders,refunds,%RETRY%billing"
    assert options["group"] == "billing"
    # Redeliveries are selected whatever their tags.
    assert json.loads(options["tags"]) == {"orders": "created || paid"}
    assert "tags" not in consumer()._options


def test_name_servers_may_be_a_list() -> None:
    made = consumer(nameserver=["a:1", "b:2"])
    assert made._options["nameserver"] == "a:1;b:2"


def test_expressions_and_tags_are_set_by_topic() -> None:
    made = consumer(subscriptions={"orders": Sql("amount > 100"), "refunds": "paid", "others": "*"})
    options = made._options
    assert json.loads(options["sql"]) == {"orders": "amount > 100"}
    assert json.loads(options["tags"]) == {"refunds": "paid"}
    with pytest.raises(
        InvalidArgument, match=r"option 'sql' is set .* use the argument subscriptions"
    ):
        consumer(options={"sql": "a = 1"})


@pytest.mark.parametrize(
    ("start_from", "offsets"),
    [
        ("first", "group,earliest"),
        ("last", "group,latest"),
        (datetime(2026, 1, 31, tzinfo=UTC), "group,2026-01-31T00:00:00+00:00"),
    ],
)
def test_a_group_resumes_from_its_offsets_or_the_given_start(
    start_from: object, offsets: str
) -> None:
    assert consumer(start_from=start_from)._options["startingOffsets"] == offsets


@pytest.fixture
def in_tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A driver whose local time is not UTC."""
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("in_tokyo")
@pytest.mark.parametrize(
    "moment",
    [
        datetime(2026, 1, 31, 10, 0, 0, 123_000),  # noqa: DTZ001 - local time is what is tested
        datetime(2026, 1, 31, 10, tzinfo=UTC),
        datetime(2026, 1, 31, 10, tzinfo=WEST),
    ],
)
def test_the_start_timestamp_is_that_of_push_consumers(moment: datetime) -> None:
    started = SourceOptions.for_stream(consumer(start_from=moment)._options).start
    assert isinstance(started, positions.OfGroup)
    assert isinstance(started.otherwise, positions.AtTime)
    assert start_in("orders", None, moment) == AtTime(started.otherwise.timestamp_ms)
    if moment.tzinfo is None:
        assert datetime.fromtimestamp(started.otherwise.timestamp_ms / 1000, UTC).hour == 1


def test_in_order_a_queue_is_never_divided() -> None:
    assert consumer(orderly=True)._options["partitionPerQueue"] == "true"
    assert "partitionPerQueue" not in consumer()._options


def test_options_of_the_source_are_passed_on() -> None:
    options = consumer(options={"maxOffsetsPerTrigger": 500})._options
    assert options["maxOffsetsPerTrigger"] == "500"


def test_executors_use_the_name_servers_of_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NAMESRV_ADDR", "10.0.0.1:9876;10.0.0.2:9876")
    options = consumer(nameserver="")._options
    assert options["nameserver"] == "10.0.0.1:9876;10.0.0.2:9876"


async def handle_async(_: object) -> bool:
    return True


class AsyncHandler:
    async def __call__(self, _: object) -> bool:
        return True


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"group": "no blanks"}, ", got 'no blanks'"),
        ({"handler": 7}, "handler must be a function, got 7"),
        ({"handler": handle_async}, "an async function"),
        ({"handler": AsyncHandler()}, "an async function"),
        ({"mode": "rows"}, "mode must be one of row, batch, pandas, arrow, got 'rows'"),
        ({"exhausted": "stop"}, "exhausted must be one of dead letter, fail, got 'stop'"),
        ({"max_attempts": -1}, "max_attempts must be a whole number, 0–2147483647, got -1"),
        ({"max_attempts": True}, "2147483647, got True"),
        (
            {"suspend": 0.001},
            "suspend must be 0.01–30 seconds, as a number or a timedelta, got 0.001",
        ),
        ({"batch_size": 0, "mode": "batch"}, "batch_size must be a whole number, 1–1000000, got 0"),
        ({"batch_size": 10}, 'batch_size must not be set with mode="row"'),
        ({"tasks_min": 0}, "tasks_min must be a whole number, 1–1000000, got 0"),
        ({"tasks_min": 4, "orderly": True}, "cannot be combined with orderly=True"),
        ({"subscriptions": {}}, "subscriptions must map topics"),
        ({"subscriptions": "orders"}, "got 'orders'"),
        ({"subscriptions": None}, "got None"),
        ({"subscriptions": {"no blanks": "*"}}, ", got 'no blanks'"),
        (
            {"subscriptions": {"orders": " "}},
            "the tag expression of topic 'orders' is ' ', which has no tag",
        ),
        (
            {"subscriptions": {"a": "*", "b": "|| ||"}},
            "the tag expression of topic 'b' is '|| ||', which has no tag",
        ),
        ({"subscriptions": {"orders": "a, b"}}, "asks for a tag named 'a, b': write 'a || b'"),
        ({"subscriptions": {"orders": " * "}}, "the tag expression of topic 'orders' is ' * '"),
        ({"subscriptions": {"orders": 7}}, "the tag expression of topic 'orders' is 7"),
        ({"checkpoint": ""}, "checkpoint must be a directory that survives restarts, got ''"),
        ({"start_from": "end"}, "a datetime, got 'end'"),
        ({"start_from": datetime.min.replace(tzinfo=EAST)}, "a time that UTC can express"),
        ({"start_from": datetime.max.replace(tzinfo=WEST)}, "a time that UTC can express"),
        ({"nameserver": "nowhere"}, "address 'nowhere'"),
        ({"options": {"startingOffsets": "earliest"}}, "use the argument start_from"),
        ({"options": {"minPartitions": "4"}}, "use the argument tasks_min"),
        ({"options": {"Columns": "body"}}, "the handler always gets all columns"),
        ({"options": {"maxOffsetPerTrigger": "1"}}, "did you mean maxOffsetsPerTrigger"),
        ({"options": {"onBadRecord": "none"}}, "onBadRecord must be fail or null or skip or dead"),
        ({"options": {"onBadRecord": "null"}}, "onBadRecord=null needs mode pandas or arrow"),
    ],
)
def test_invalid_arguments_are_reported(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        consumer(**changes)
    assert told in str(raised.value)


# --- into how many tasks a batch is split ---------------------------------------------------------


class AskedForTasksError(Exception):
    """The options that a query would be read with."""

    def __init__(self, options: dict[str, str]) -> None:
        self.options = options


class SparkOfCores:
    """The part of Spark used until a query is read; None is a client that knows no cores."""

    def __init__(self, cores: int | None) -> None:
        self._cores = cores
        # Spark's names, all of them; their content is not needed.
        self.streams = self.readStream = self
        self.addListener = self.removeListener = lambda _: None

    @property
    def sparkContext(self) -> SparkOfCores:  # noqa: N802 - Spark's name
        if self._cores is None:
            raise PySparkAttributeError("not there")
        return self

    @property
    def defaultParallelism(self) -> int:  # noqa: N802 - Spark's name
        assert self._cores is not None
        return self._cores

    def format(self, name: str) -> SparkOfCores:
        assert name == "rocketmq"
        return self

    def options(self, **options: str) -> SparkOfCores:
        raise AskedForTasksError(options)


@pytest.mark.parametrize(
    ("cores", "changes", "tasks_min"),
    [
        (5, {}, "5"),
        (5, {"tasks_min": 12}, "12"),
        (5, {"tasks_min": 1}, "1"),
        (None, {}, "1"),
        (None, {"tasks_min": 12}, "12"),
        (5, {"orderly": True}, None),
        (5, {"options": {"maxRecordsPerPartition": "100"}}, None),
        (5, {"options": {"MAXRECORDSPERPARTITION": "100"}}, None),
    ],
)
def test_a_batch_has_one_task_per_core_unless_configured(
    cores: int | None, changes: dict[str, Any], tasks_min: str | None
) -> None:
    made = consumer(spark=SparkOfCores(cores), **changes)
    with pytest.raises(AskedForTasksError) as asked:
        made.start()
    assert asked.value.options.get("minPartitions") == tasks_min
    assert asked.value.options.items() >= made._options.items()


def test_ways_to_trigger_exclude_each_other() -> None:
    with pytest.raises(InvalidArgument, match="are mutually exclusive"):
        consumer().start(available_now=True, interval=1)


def test_every_argument_is_documented() -> None:
    guide = Path(__file__).parents[3] / "docs" / "guide" / "spark-consumer.md"
    rows = set(re.findall(r"^\| `(\w+)` \|", guide.read_text(encoding="utf-8"), re.MULTILINE))
    arguments = set(inspect.signature(SparkConsumer).parameters)
    assert arguments
    assert arguments <= rows


# --- reports --------------------------------------------------------------------------------------


NAMES = ("handled", "retried", "dead", "error", "bad")


def padded(counts: Sequence[object]) -> list[object]:
    """Return counts, perhaps without that of bad records, with it."""
    return [*counts, 0][: len(NAMES)]


class Event:
    """The part of Spark's events that is read."""

    def __init__(self, run: str, counts: Sequence[object] | None = None) -> None:
        self.runId = run
        self.progress = self
        self.observedMetrics = {}
        if counts is not None:
            self.observedMetrics[METRICS] = Row(*NAMES)(*padded(counts))


class Streams:
    """The part of a session's streams that a watcher uses."""

    def __init__(self) -> None:
        self.streams = self
        self.removed: list[object] = []

    def removeListener(self, listener: object) -> None:  # noqa: N802 - Spark's name
        self.removed.append(listener)


def listening(streams: Streams) -> ListeningWatcher:
    watcher = ListeningWatcher(cast("SparkSession", streams))
    watcher.run = "a"
    return watcher


def report_progress(totals: ListeningWatcher, run: str, *counts: object) -> None:
    totals.onQueryProgress(cast("QueryProgressEvent", Event(run, counts or None)))


def test_waiting_ends_with_the_condition_or_with_the_run() -> None:
    totals = listening(Streams())
    assert not totals.wait(lambda report: report.handled == 3, 0)
    report_progress(totals, "a", 3, 0, 0, None)
    assert totals.wait(lambda report: report.handled == 3, None)
    totals.onQueryTerminated(cast("QueryTerminatedEvent", Event("a")))
    assert not totals.wait(lambda report: report.handled == 4, None)


def test_report_adds_up_the_batches_of_a_run() -> None:
    streams = Streams()
    totals = listening(streams)
    report_progress(totals, "a", 3, 1, 0, "ValueError: bad")
    report_progress(totals, "a", 2, 0, 1, None, 3)
    report_progress(totals, "b", 9, 9, 9, None)
    # Empty batches have no sums.
    report_progress(totals, "a", None, None, None, None)
    report_progress(totals, "a")
    totals.onQueryTerminated(cast("QueryTerminatedEvent", Event("a")))
    totals.finish()
    totals.finish()
    assert streams.removed == [totals]
    report = totals.report()
    assert report == ConsumerReport(5, 1, 1, "ValueError: bad", 3, batches=2)
    assert report.received == 7
    assert str(report) == (
        "7 messages in 2 batches: 5 handled, 1 sent back for redelivery, 1 dead letters, "
        "3 bad records; ValueError: bad"
    )
    totals.run = "c"
    assert totals.report() == ConsumerReport()
    assert ConsumerReport().plus(Counts(1, 0, 0)).error is None


class Progress:
    """A batch as Spark remembers it."""

    def __init__(self, batch_id: int, counts: Sequence[object]) -> None:
        self.batchId = batch_id
        schema = {"type": "struct", "fields": [{"name": name} for name in NAMES]}
        self.observedMetrics = {METRICS: Row("values", "schema")(padded(counts), schema)}


class Query:
    """A query with one more batch on each wait, which forgets all but the last."""

    def __init__(self, batches: list[Sequence[object]], *, fails: bool = False) -> None:
        self._batches = batches
        self._fails = fails
        self._done = 0
        self.waits: list[float] = []

    @property
    def recentProgress(self) -> list[Progress]:  # noqa: N802 - Spark's name
        last = self._done - 1
        return [Progress(last, self._batches[last])] if self._done else []

    def awaitTermination(self, timeout: float) -> bool:  # noqa: N802 - Spark's name
        self.waits.append(timeout)
        if self._done < len(self._batches):
            self._done += 1
            return False
        if self._fails:
            raise StreamingQueryException("no broker")
        return True


def looking(*batches: Sequence[object], fails: bool = False) -> tuple[Query, PollingWatcher]:
    query = Query(list(batches), fails=fails)
    return query, PollingWatcher(cast("StreamingQuery", query))


def test_the_report_retains_earlier_batches() -> None:
    query, watching = looking([1, 0, 0, None], [None] * 4, [2, 1, 0, "ValueError"])
    assert watching.wait(lambda report: report.handled == 3, None)
    assert watching.report() == ConsumerReport(3, 1, 0, "ValueError", batches=2)
    assert len(query.waits) == 3


def test_whether_a_query_has_ended_can_be_polled() -> None:
    query, watching = looking([1, 0, 0, None])
    run = ConsumerRun(cast("StreamingQuery", query), watching)
    assert [run.await_termination(timeout=0) for _ in range(2)] == [False, True]
    # Spark refuses 0.
    assert query.waits == [0.001] * 2


@pytest.mark.parametrize("fails", [False, True])
def test_watching_ends_with_the_query(fails: bool) -> None:
    _, watching = looking([1, 0, 0, None], fails=fails)
    assert not watching.wait(lambda report: report.handled == 2, None)
    assert watching.report().handled == 1


def test_watching_ends_with_the_timeout() -> None:
    query, watching = looking(*([[1, 0, 0, None]] * 20))
    assert not watching.wait(lambda report: report.handled == 20, 1.1)
    assert sum(query.waits) == pytest.approx(1.1)
