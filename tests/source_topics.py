"""Topics with known messages, for tests that read them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from turbopump.admin import Admin
from turbopump.client.blocking import Producer
from turbopump.errors import RemoteError
from turbopump.message import Message, MessageQueue

BATCH = 50
PATIENCE_S = 120.0


def fresh_topic() -> str:
    return f"source-{uuid.uuid4().hex[:12]}"


def numbered(topic: str, number: int) -> Message:
    """Return a message with its number: every third has tag c, each key occurs about six times."""
    return Message(
        topic,
        b"%d" % number,
        tags="abc"[number % 3],
        keys=[f"k{number // 6}"],
        properties={"number": str(number)},
    )


def fill(
    nameserver: str,
    topic: str,
    numbers: range,
    make: Callable[[str, int], Message] = numbered,
    queues: int = 4,
) -> None:
    """Send numbered messages in batches to the queues in turn."""
    with Producer("tests", nameserver=nameserver) as producer:
        for turn, start in enumerate(range(numbers.start, numbers.stop, BATCH)):
            some = range(start, min(start + BATCH, numbers.stop))
            messages = [make(topic, number) for number in some]
            _until_taken(partial(producer.send_batch, messages, to=partial(_nth, turn % queues)))


def _until_taken(send: Callable[[], object]) -> None:
    """Resend what a busy broker rejected; it has stored none of it."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            send()
        except RemoteError as error:
            if not error.retriable or time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            return


def _nth(number: int, queues: Sequence[MessageQueue]) -> MessageQueue:
    return queues[number % len(queues)]


def wait_for(query: StreamingQuery | None, fact: Callable[[], bool]) -> None:
    """Wait until a condition holds; raise the query's error if it ends before."""
    until = time.monotonic() + PATIENCE_S
    while not fact():
        assert time.monotonic() < until, "condition not met in time"
        if query is None:
            time.sleep(0.05)
        else:
            assert not query.awaitTermination(1), "the query has ended"


def made_topic(nameserver: str, topic: str, queues: int = 4) -> str:
    """Create a topic without messages."""
    with Admin(nameserver) as admin:
        admin.topics.create(topic, queues=queues)
    return topic


def rows_read(rows: DataFrame) -> int:
    """Return how many rows the source passed to a query, before Spark applied its predicates."""
    executed: Any = rows._jdf.queryExecution().executedPlan()
    rows._jdf.queryExecution().toRdd().count()
    leaves = executed.collectLeaves()
    return int(leaves.apply(0).metrics().apply("numOutputRows").value())
