"""The orders in Spark: streamed into Parquet while they are sent, then aggregated by window."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)
from pyspark.sql.streaming.query import StreamingQuery

from demo.board import Board
from demo.orders import TOPIC
from turbopump.spark import session

GROUP = "analytics"
_ORDER = "number LONG, customer STRING, nth LONG, country STRING, cents LONG"


@dataclass(frozen=True, slots=True)
class Window:
    """The orders of a time window."""

    start: str
    orders: int
    cents: int


class Analytics:
    """A Spark session that reads from the cluster and writes to a directory."""

    def __init__(self, spark: SparkSession, nameserver: str, directory: Path) -> None:
        self._spark = spark
        self._nameserver = nameserver
        self._directory = directory

    def orders(self, group: str) -> DataFrame:
        """Return the stream of orders with the time each was sent."""
        messages = (
            self._spark.readStream.format("rocketmq")
            .option("nameserver", self._nameserver)
            .option("topic", TOPIC)
            .option("group", group)
            .option("startingOffsets", "earliest")
            .load()
        )
        order = f.from_json(f.col("body").cast("string"), _ORDER).alias("order")
        return messages.select("msgId", "bornTimestamp", order).select(
            "msgId", "bornTimestamp", "order.*"
        )

    @contextmanager
    def archiving(self, board: Board) -> Iterator[None]:
        """Stream the orders into Parquet, partitioned by country, until the block ends."""
        listener = _RowsCounted(board)
        self._spark.streams.addListener(listener)
        query = (
            self.orders(GROUP)
            .writeStream.format("parquet")
            .partitionBy("country")
            .option("path", str(self._directory / "orders"))
            .option("checkpointLocation", str(self._directory / "checkpoints" / "orders"))
            .trigger(processingTime="1 second")
            .start()
        )
        try:
            yield
        finally:
            _end(query)
            self._spark.streams.removeListener(listener)

    def archived(self) -> tuple[int, int, int]:
        """Return the number of orders in the Parquet files, of distinct ones, and their sum."""
        orders = self._spark.read.parquet(str(self._directory / "orders"))
        row = orders.agg(
            f.count("*"), f.countDistinct("number"), f.coalesce(f.sum("cents"), f.lit(0))
        ).first()
        return cast("tuple[int, int, int]", tuple(row or (0, 0, 0)))

    def windows(self, seconds: int) -> list[Window]:
        """Aggregate the orders by windows of this many seconds, in a streaming query."""
        by_window = (
            self.orders(f"{GROUP}-windows")
            .withWatermark("bornTimestamp", "10 seconds")
            .groupBy(f.window("bornTimestamp", f"{seconds} seconds").alias("window"))
            .agg(f.count("*").alias("orders"), f.sum("cents").alias("cents"))
        )
        query = (
            by_window.writeStream.format("memory")
            .queryName("windows")
            .outputMode("complete")
            .option("checkpointLocation", str(self._directory / "checkpoints" / "windows"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        rows = self._spark.table("windows").orderBy("window.start").collect()
        return [Window(f"{row.window.start:%H:%M:%S}", row.orders, row.cents) for row in rows]


@contextmanager
def analytics(nameserver: str, directory: Path) -> Iterator[Analytics]:
    """Start Spark, which logs to a file in the directory, and stop it afterwards."""
    with _errors_to(directory / "spark.log"):
        spark = session("turbopump demo", master="local[2]")
    try:
        yield Analytics(spark, nameserver, directory)
    finally:
        spark.stop()


@contextmanager
def _errors_to(log: Path) -> Iterator[None]:
    """Redirect stderr of processes started in the block to a file, for their lifetime."""
    own = os.dup(2)
    try:
        with log.open("w") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)


class _RowsCounted(StreamingQueryListener):
    """Counts the rows of each micro-batch on the board."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's names
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        self._board.add(GROUP, event.progress.numInputRows)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802 - Spark's name
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        pass


def _end(query: StreamingQuery) -> None:
    query.stop()
    query.awaitTermination()
