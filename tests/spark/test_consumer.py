"""A function over messages on real executors: success, redelivery and dead letters."""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from servers import Standalone, standalone
from turbopump import Message, MessageView, Producer, Sql
from turbopump.admin import Admin, GroupSettings
from turbopump.client.config import ClientConfig
from turbopump.errors import SparkError
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.spark import ConsumerReport, ConsumerRun, GiveUp, RetryLater, SparkConsumer
from turbopump.spark.consuming.handler_runner import DEAD, Returned, SendBack
from turbopump.spark.consuming.message_rows import Delivered
from turbopump.wire import properties
from turbopump.wire.hosts import host
from turbopump.wire.record import Record, decode_record

TIMEOUT_S = 200.0
"""Far longer than it takes, even on a busy machine."""

DELAYS = {"messageDelayLevel": " ".join(["1s"] * 18)}
Handle = Callable[[Any], object]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """A broker with short delays."""
    with standalone(tmp_path_factory.mktemp("quick"), DELAYS) as found:
        yield found


@dataclass(frozen=True, slots=True)
class Place:
    """The resources of one test: a topic, a group, and a file that its function writes to."""

    spark: SparkSession
    nameserver: str
    directory: Path
    topic: str
    group: str

    @property
    def log(self) -> Path:
        return self.directory / "log"

    @property
    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.log.read_text().splitlines()]

    def send(self, bodies: Iterable[str], *, topic: str = "", tags: str | None = None) -> None:
        with Producer("shop", nameserver=self.nameserver) as producer:
            for body in bodies:
                producer.send(Message(topic or self.topic, body.encode(), tags=tags))

    def consumer(self, handle: Handle, **settings: Any) -> SparkConsumer:
        given: dict[str, Any] = {
            "spark": self.spark,
            "nameserver": self.nameserver,
            "subscriptions": {self.topic: "*"},
            "checkpoint": self.directory / "checkpoint",
            "start_from": "first",
        }
        return SparkConsumer(self.group, handle, **(given | settings))

    def consume(
        self, handle: Handle, until: Callable[[ConsumerReport], bool], **settings: Any
    ) -> ConsumerReport:
        with self.consumer(handle, **settings).start() as run:
            assert run.wait_until(until, TIMEOUT_S), run.report()
        return run.report()

    def dead_letters(self, group: str = "") -> list[MessageView]:
        with Admin(self.nameserver) as admin:
            return [letter.message for letter in admin.dead_letters.list(group or self.group)]


@pytest.fixture
def place(spark: SparkSession, quick: Standalone, tmp_path: Path) -> Place:
    name = uuid.uuid4().hex
    return Place(spark, quick.nameserver, tmp_path, f"orders-{name}", f"billing-{name}")


# --- row by row -----------------------------------------------------------------------------------


def test_the_limit_of_the_group_holds_without_one_of_the_consumer(place: Place) -> None:
    with Admin(place.nameserver) as admin:
        admin.groups.create(GroupSettings(place.group, retries_max=1))
        assert [each.retries_max for each in admin.groups.settings(place.group).values()] == [1]
    place.send(["bad"])
    log = place.log

    def handle(message: MessageView) -> bool:
        with log.open("a") as seen:
            seen.write(f"{message.reconsume_times}\n")
        return False

    report = place.consume(handle, lambda report: report.dead == 1)
    assert (report.retried, report.dead) == (1, 1)
    assert place.lines == [["0"], ["1"]]
    assert [letter.body for letter in place.dead_letters()] == [b"bad"]


def test_every_message_succeeds_is_redelivered_or_dead_lettered(place: Place) -> None:
    place.send(["good", "flaky", "hopeless", "never"], tags="wanted")
    place.send(["unwanted"], tags="other")
    log = place.log

    def handle(message: MessageView) -> object:
        body = message.body.decode()
        with log.open("a") as seen:
            seen.write(f"{body} {message.topic} {message.tags} {message.reconsume_times}\n")
        if body == "flaky":
            return message.reconsume_times == 2 or RetryLater(delay_level=1)
        if body == "hopeless":
            raise ValueError("no such order")
        return GiveUp() if body == "never" else True

    consumer = place.consumer(handle, subscriptions={place.topic: "wanted"}, max_attempts=3)
    with consumer.start(interval=0.17) as run:
        assert _trigger(run) == "ProcessingTimeTrigger(170)"
        assert run.wait_until(lambda report: report.handled + report.dead == 4, TIMEOUT_S)
        report = run.report()
        # A batch is committed when the next one is planned.
        with Admin(place.nameserver) as admin:
            while (progress := admin.groups.progress(place.group)).lag:
                assert run.query.isActive
    assert report == ConsumerReport(
        2, 2 + 3, 2, "ValueError: no such order", batches=report.batches
    )
    calls = Counter(body for body, *_ in place.lines)
    assert calls == {"good": 1, "flaky": 3, "hopeless": 4, "never": 1}
    # Functions see the topic a message was sent to, and how often it was redelivered.
    assert {tuple(line[1:3]) for line in place.lines} == {(place.topic, "wanted")}
    times = [int(line[3]) for line in place.lines if line[0] == "hopeless"]
    assert times == [0, 1, 2, 3]
    letters = {letter.body: letter for letter in place.dead_letters()}
    assert letters.keys() == {b"hopeless", b"never"}
    assert letters[b"hopeless"].properties[properties.RETRY_TOPIC] == place.topic
    assert letters[b"hopeless"].reconsume_times == 4
    # The group's progress is where operators look for it, including the retry topic.
    assert {each.queue.topic for each in progress.queues} == {
        place.topic,
        f"%RETRY%{place.group}",
    }
    assert sum(each.committed or 0 for each in progress.queues) == 5 + 5
    assert progress.is_running


def test_sql_selects_messages_and_failed_ones_are_redelivered(place: Place) -> None:
    with Producer("shop", nameserver=place.nameserver) as producer:
        for amount in ("50", "150", "many", "250"):
            producer.send(
                Message(place.topic, amount.encode(), properties={"amount": amount, "n": "1"})
            )
        producer.send(Message(place.topic, b"none"))
    log = place.log

    def handle(message: MessageView) -> object:
        with log.open("a") as seen:
            seen.write(f"{message.body.decode()} {message.reconsume_times}\n")
        return message.body != b"150" or message.reconsume_times > 0 or RetryLater(delay_level=1)

    place.consume(
        handle,
        lambda report: report.handled == 2,
        subscriptions={place.topic: Sql("amount > 100 AND n IS NOT NULL")},
    )
    assert sorted(place.lines) == [["150", "0"], ["150", "1"], ["250", "0"]]


def _trigger(run: ConsumerRun) -> str:
    """Return when batches of a query start; only Spark itself knows."""
    return str(run.query._jsq.streamingQuery().trigger().toString())


# --- in batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "topics_of", "answer"),
    [
        (
            "batch",
            lambda messages: [message.topic for message in messages],
            lambda messages: [m.body != b"bad" or m.reconsume_times == 1 for m in messages],
        ),
        (
            "pandas",
            lambda frame: frame["topic"],
            lambda frame: (frame["body"] != b"bad") | (frame["reconsumeTimes"] == 1),
        ),
        (
            "arrow",
            lambda batch: batch.column("topic").to_pylist(),
            lambda batch: [
                row["body"] != b"bad" or row["reconsumeTimes"] == 1 for row in batch.to_pylist()
            ],
        ),
    ],
)
def test_batches_are_answered_row_by_row(
    place: Place, mode: str, topics_of: Callable[[Any], Any], answer: Handle
) -> None:
    place.send([*(str(n) for n in range(20)), "bad"], topic=f"shop%{place.topic}")
    log, topic = place.log, place.topic

    def seen(given: Any) -> object:
        with log.open("a") as written:
            written.write(f"{len(given)} {set(topics_of(given)) == {topic}}\n")
        return answer(given)

    # Brokers see names with the namespace, functions do not.
    settings = {"mode": mode, "namespace": "shop", "batch_size": 8}
    report = place.consume(seen, lambda report: report.handled == 21, **settings)
    assert report == ConsumerReport(21, 1, 0, batches=report.batches)
    assert sum(int(count) for count, _ in place.lines) == 22
    assert max(int(count) for count, _ in place.lines) <= 8
    assert {is_right for _, is_right in place.lines} == {"True"}


def test_an_exception_in_a_batch_sends_all_of_it_back(place: Place) -> None:
    place.send(["a", "b", "c"])

    def handle(messages: Any) -> object:
        if any(message.reconsume_times == 0 for message in messages):
            raise ValueError("the database is away")
        return True

    report = place.consume(handle, lambda report: report.handled == 3, mode="batch", tasks_min=1)
    assert report == ConsumerReport(
        3, 3, 0, "ValueError: the database is away", batches=report.batches
    )


# --- in order -------------------------------------------------------------------------------------


def test_the_order_of_each_queue_is_preserved_across_failures(place: Place) -> None:
    bodies = [str(n) for n in range(30)]
    with Producer("shop", nameserver=place.nameserver) as producer:
        queues = producer.queues(place.topic)
        for n, body in enumerate(bodies):
            producer.send(Message(place.topic, body.encode()), to=queues[n % 2])
    log = place.log

    def handle(message: MessageView) -> bool:
        body, times = message.body.decode(), message.reconsume_times
        with log.open("a") as seen:
            seen.write(f"{message.queue_id} {body} {times}\n")
        return body not in ("6", "11") or (body == "6" and times == 1)

    settings = {"orderly": True, "max_attempts": 2, "suspend": 0.01}
    report = place.consumer(handle, **settings).run(available_now=True)
    assert report == ConsumerReport(29, 0, 1, batches=report.batches)
    seen: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for queue_id, body, times in place.lines:
        seen[queue_id].append((int(body), int(times)))
    even, odd = sorted(seen.values())
    assert even == sorted([(n, 0) for n in range(0, 30, 2)] + [(6, 1)])
    assert odd == sorted([(n, 0) for n in range(1, 30, 2)] + [(11, 1), (11, 2)])
    (letter,) = place.dead_letters()
    assert letter.body == b"11"


def test_the_query_can_fail_to_preserve_order(place: Place) -> None:
    place.send(["good", "bad", "later"])
    settings = {"orderly": True, "max_attempts": 0, "exhausted": "fail"}
    broken = place.consumer(lambda message: message.body != b"bad", **settings)
    with pytest.raises(StreamingQueryException, match=r"failed 1 times, and .* stops its queue"):
        broken.run(available_now=True)
    # Once the cause is fixed, the query resumes where it stopped.
    fixed = place.consumer(lambda _: True, **settings)
    report = fixed.run(available_now=True)
    assert report.handled == 3
    assert not place.dead_letters()


# --- sending back ---------------------------------------------------------------------------------


def test_a_message_that_no_broker_takes_back_is_an_error() -> None:
    nowhere = host("127.0.0.1", 1)
    record = Record(
        topic=b"t", queue_id=0, body=b"", born_timestamp_ms=0, born_host=nowhere, store_host=nowhere
    )
    message = decode_record(record.encode(QueueOffset(0), PhysicalOffset(0), 0))
    client = ClientConfig("127.0.0.1:1", request_timeout=0.5)
    returned = [Returned(Delivered(message, "gone"), level) for level in (0, 3, DEAD)]
    with pytest.raises(SparkError, match="3 of 3 failed messages could not be sent back"):
        SendBack(client, "billing", 3)(returned)
