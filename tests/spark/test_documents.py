"""The Spark programs of the documentation, in the shared session.

The programs of a page run one after the other in one directory, each with its own names: it can
be copied alone, but may read topics and files that an earlier one has created.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import StreamingQueryListener
from pyspark.sql.streaming.query import StreamingQueryManager

from documents import NAMESERVER, programs
from servers import Standalone
from shells import wait_for
from turbopump import ConsumeResult, Message, Producer, PushConsumer
from turbopump.admin import Admin

PROGRAMS = programs(lambda block: block.is_for_spark)
PAGES = sorted({block.page for block in PROGRAMS})


@pytest.fixture(scope="module", autouse=True)
def orders(broker: Standalone) -> None:
    """What exists before users start with Spark: orders, and a group with dead letters."""
    with (
        Producer("orders-producer", nameserver=broker.nameserver) as producer,
        PushConsumer(
            "billing",
            lambda messages, context: ConsumeResult.RETRY_LATER,
            nameserver=broker.nameserver,
            subscriptions={"orders": "created"},
            start_from="first",
            max_attempts=0,
        ),
        Admin(broker.nameserver) as admin,
    ):
        for number in range(10):
            producer.send(Message("orders", b'{"order": %d}' % number, tags="created"))
        wait_for(lambda: len(list(admin.dead_letters.list("billing"))) == 10)


@pytest.mark.parametrize("page", PAGES)
def test_programs_run(
    page: str,
    spark: SparkSession,
    broker: Standalone,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    # A program may stop its session; here all programs share it.
    monkeypatch.setattr(SparkSession, "stop", lambda _: None)
    with listeners_removed(spark, monkeypatch):
        for block in PROGRAMS:
            if block.page == page:
                text = block.text.replace(NAMESERVER, broker.nameserver)
                exec(compile(text, str(block), "exec"), {"__name__": "__main__"})
                running = [query.name for query in spark.streams.active]
                assert not running, f"{block} left a query running"


@contextmanager
def listeners_removed(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the listeners that programs add: they would print in later tests."""
    add, added = StreamingQueryManager.addListener, []

    def note(self: StreamingQueryManager, listener: StreamingQueryListener) -> None:
        added.append(listener)
        add(self, listener)

    monkeypatch.setattr(StreamingQueryManager, "addListener", note)
    yield
    for listener in added:
        spark.streams.removeListener(listener)
