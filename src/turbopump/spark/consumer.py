"""Consuming topics on a Spark cluster: a function over messages, run on the executors."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC
from os import PathLike, fspath
from typing import TYPE_CHECKING, Self

import pyarrow as pa
from pyspark.errors import PySparkAttributeError
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.streaming.query import StreamingQuery

from turbopump.client.arguments import joined_addresses
from turbopump.client.names import check_group, check_topic, with_namespace
from turbopump.client.start_position import StartFrom, consume_from
from turbopump.durations import Duration, milliseconds, seconds
from turbopump.errors import InvalidArgument
from turbopump.filters.sql92 import Sql
from turbopump.filters.tags import wanted_tags
from turbopump.spark.consuming.group_limit import GroupLimit
from turbopump.spark.consuming.handler_runner import (
    COUNTS_SCHEMA,
    ROWS_MAX,
    Exhausted,
    Handler,
    HandlerConfig,
    HandlerRunner,
    Mode,
    SendBack,
    counts_batch,
    require_within,
)
from turbopump.spark.consuming.progress import ConsumerReport, Reached, RunWatcher, start_watched
from turbopump.spark.query_lag import source_name
from turbopump.spark.reading.options import SourceOptions, on_bad_record_of
from turbopump.spark.records.bad_records import OnBadRecord
from turbopump.spark.stream_counts import METRICS, counted_options
from turbopump.spark.worker_process import begins_call
from turbopump.wire.names import retry_topic

if TYPE_CHECKING:
    from pyspark.sql.pandas._typing import ArrowMapIterFunction

_OWN_OPTIONS = {
    "nameserver": "nameserver",
    "namespace": "namespace",
    **dict.fromkeys(("topic", "topics", "topicpattern", "assign", "tags", "sql"), "subscriptions"),
    "group": "group",
    "startingoffsets": "start_from",
    "minpartitions": "tasks_min",
    "columns": None,
    "includeproperties": None,
}
"""Options of the source that the consumer sets itself, and what to use instead."""

_DIVISIONS = frozenset({"partitionperqueue", "maxrecordsperpartition"})
"""Options that control how a batch is divided into tasks."""


class SparkConsumer:
    """Delivers every message of its topics to a function on the executors, at least once.

    ::

        def handle(message):
            return charge(message.body)      # True: done, False or an exception: is redelivered

        consumer = SparkConsumer("billing", handle, spark=spark, nameserver="127.0.0.1:9876",
                                 subscriptions={"orders": "created || paid"},
                                 checkpoint="/data/billing")
        with consumer.start() as run:
            run.await_termination()

    Failed messages are sent back to their broker and redelivered after a delay, through the group's
    retry topic, until they succeed or are dead-lettered: as with a `PushConsumer`.
    """

    def __init__(
        self,
        group: str,
        handler: Handler,
        *,
        spark: SparkSession,
        subscriptions: Mapping[str, str | Sql],
        checkpoint: str | PathLike[str],
        nameserver: str | Sequence[str] = "",
        namespace: str = "",
        mode: Mode = "row",
        orderly: bool = False,
        start_from: StartFrom = "last",
        max_attempts: int | None = None,
        batch_size: int | None = None,
        suspend: Duration = 1,
        exhausted: Exhausted = "dead letter",
        tasks_min: int | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        check_group(group)
        _require_handler(handler)
        if tasks_min is not None:
            require_within("tasks_min", tasks_min, 1, ROWS_MAX)
            if orderly:
                raise InvalidArgument(
                    "tasks_min splits queues, so it cannot be combined with orderly=True"
                )
        self.group = group
        self._handler = handler
        self._spark = spark
        self._checkpoint = _checkpoint(checkpoint)
        self._tasks_min = tasks_min
        given = {
            **_checked_options(options or {}),
            **_source_options(group, subscriptions, start_from, orderly=orderly),
            "namespace": namespace,
            "nameserver": joined_addresses(nameserver),
        }
        _require_rows_for_null(mode, given)
        self._topics = tuple(subscriptions)
        self._options, leaves_out_bad = counted_options(given)
        self._plan = HandlerConfig(
            group=with_namespace(namespace, group),
            namespace=namespace,
            mode=mode,
            orderly=orderly,
            batch_size=batch_size,
            max_attempts=max_attempts,
            suspend_ms=milliseconds("suspend", suspend, 10, 30_000),
            exhausted=exhausted,
            leaves_out_bad=leaves_out_bad,
        )
        # Checked here, on the driver, and not in the middle of a query.
        client = SourceOptions.for_stream(self._options).client
        # An executor's environment may name no name server, or another one.
        self._options["nameserver"] = ";".join(client.nameserver_addresses)

    def start(
        self, *, available_now: bool = False, interval: Duration | None = None
    ) -> ConsumerRun:
        """Start consuming; leaving it as a context manager stops it.

        ``available_now`` ends after everything present at the start is handled. ``interval`` is the
        time between batch starts; by default they start immediately.
        """
        if available_now and interval is not None:
            raise InvalidArgument(
                "available_now and interval are mutually exclusive; pass one of them"
            )
        return ConsumerRun(
            *start_watched(self._spark, lambda: self._query(available_now, interval))
        )

    def run(
        self, *, available_now: bool = False, interval: Duration | None = None
    ) -> ConsumerReport:
        """Consume until stopped elsewhere, or until everything available is handled."""
        with self.start(available_now=available_now, interval=interval) as run:
            run.await_termination()
        return run.report()

    def _query(self, available_now: bool, interval: Duration | None) -> StreamingQuery:
        options = dict(self._options)
        if _DIVISIONS.isdisjoint(name.lower() for name in options):
            options["minPartitions"] = str(self._tasks_min or _cores(self._spark))
        client = SourceOptions.for_stream(options).client
        group = self._plan.group
        send_back = SendBack(client, group, self._plan.max_attempts)
        messages = self._spark.readStream.format("rocketmq").options(**options).load()
        counted = messages.mapInArrow(
            _work(self._handler, self._plan, send_back, GroupLimit(client, group)), COUNTS_SCHEMA
        ).observe(
            METRICS,
            *(sql.sum(name).alias(name) for name in ("handled", "retried", "dead", "bad")),
            sql.max("error").alias("error"),
        )
        writer = (
            # The tasks do all the work: nothing is left to write.
            counted.writeStream.format("noop")
            .queryName(source_name(self._topics, self.group))
            .option("checkpointLocation", self._checkpoint)
        )
        if available_now:
            writer = writer.trigger(availableNow=True)
        elif interval is not None:
            writer = writer.trigger(
                processingTime=f"{milliseconds('interval', interval)} milliseconds"
            )
        return writer.start()


class ConsumerRun:
    """A running consumer."""

    def __init__(self, query: StreamingQuery, watching: RunWatcher) -> None:
        self.query = query
        """Spark's query handle, with its progress and errors."""
        self._watching = watching

    def await_termination(self, timeout: Duration | None = None) -> bool:
        """Wait until the query ends; return whether it has.

        Raises Spark's StreamingQueryException if a task failed despite Spark's retries.
        """
        if timeout is None:
            self.query.awaitTermination()
            return True
        # Spark waits for at least 1 ms.
        wait_s = max(seconds(timeout), 0.001)
        return bool(self.query.awaitTermination(wait_s))  # type: ignore[arg-type]

    def wait_until(self, is_reached: Reached, timeout: Duration | None = None) -> bool:
        """Wait until the report fulfils a condition; return whether it does.

        Also returns when the query ends for any reason.

        ::

            run.wait_until(lambda report: report.handled >= 1000, timeout=60)
        """
        return self._watching.wait(is_reached, None if timeout is None else seconds(timeout))

    def report(self) -> ConsumerReport:
        """Return the outcomes of messages so far, counting complete batches only."""
        if not self.query.isActive:
            self._watching.finish()
        return self._watching.report()

    def stop(self) -> ConsumerReport:
        """Stop; messages of an incomplete batch are redelivered at the next start."""
        self.query.stop()
        return self.report()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _work(
    handler: Handler, plan: HandlerConfig, send_back: SendBack, group_limit: GroupLimit
) -> ArrowMapIterFunction:
    """Return the function that each task applies to its rows."""

    @begins_call
    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        handling = HandlerRunner(handler, plan, send_back, time.sleep, group_limit)
        return map(counts_batch, handling.all(batches))

    return work


def _cores(spark: SparkSession) -> int:
    try:
        return spark.sparkContext.defaultParallelism
    except PySparkAttributeError:
        # Spark Connect: its client does not know the cluster.
        return 1


# --- arguments ------------------------------------------------------------------------------------


def _source_options(
    group: str, topics: Mapping[str, str | Sql], start_from: StartFrom, *, orderly: bool
) -> dict[str, str]:
    tags = _tags(topics)
    found = {
        "topics": ",".join([*topics, retry_topic(group)]),
        "group": group,
        "startingOffsets": _starting_offsets(start_from),
    }
    sql = {topic: each.expression for topic, each in topics.items() if isinstance(each, Sql)}
    found |= {name: json.dumps(each) for name, each in (("tags", tags), ("sql", sql)) if each}
    if orderly:
        found["partitionPerQueue"] = "true"
    return found


def _tags(topics: Mapping[str, str | Sql]) -> dict[str, str]:
    """Return the tags of topics that are filtered by tag."""
    given: object = topics
    if not isinstance(given, Mapping) or not given:
        raise InvalidArgument(
            "subscriptions must map topics to tag expressions, as "
            '{"orders": "created || paid"}, {"orders": Sql("amount > 100")} or {"orders": "*"}, '
            f"got {topics!r}"
        )
    found = {}
    for topic, expression in topics.items():
        check_topic(topic)
        if isinstance(expression, Sql):
            continue
        wanted = wanted_tags(expression, f"subscriptions: the tag expression of topic {topic!r}")
        if not wanted.everything:
            found[topic] = expression
    return found


def _starting_offsets(start_from: StartFrom) -> str:
    consume_from(start_from)
    if start_from == "first":
        return "group,earliest"
    if start_from == "last":
        return "group,latest"
    # Without a time zone it is local time, as everywhere in Python; the source would assume UTC.
    return f"group,{start_from.astimezone(UTC).isoformat()}"


def _checked_options(options: Mapping[str, str]) -> dict[str, str]:
    for name in options:
        if name.lower() in _OWN_OPTIONS:
            instead = _OWN_OPTIONS[name.lower()]
            why = (
                f"use the argument {instead}" if instead else "the handler always gets all columns"
            )
            raise InvalidArgument(f"option {name!r} is set by the consumer: {why}")
    return {name: str(value) for name, value in options.items()}


def _require_rows_for_null(mode: Mode, options: Mapping[str, str]) -> None:
    if on_bad_record_of(options) is OnBadRecord.NULL and mode in ("row", "batch"):
        raise InvalidArgument(
            f"option onBadRecord=null needs mode pandas or arrow, got {mode!r}, whose messages "
            "have no null: use skip or deadLetter"
        )


def _checkpoint(path: str | PathLike[str]) -> str:
    if not path or not fspath(path):
        raise InvalidArgument(
            f"checkpoint must be a directory that survives restarts, got {path!r}; without it "
            "messages would be lost"
        )
    return fspath(path)


def _require_handler(handler: object) -> None:
    if not callable(handler):
        raise InvalidArgument(f"handler must be a function, got {handler!r}")
    call: Callable[..., object] = getattr(handler, "__call__", handler)  # noqa: B004 - what is called, not whether
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call):
        raise InvalidArgument(
            f"handler must not be an async function, got {handler!r}: each Spark task handles one "
            "message or batch at a time"
        )
