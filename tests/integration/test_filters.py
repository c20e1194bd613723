"""Each kind of filter over real sockets: long polls, retries, and a change while running."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from servers import Standalone, standalone
from shells import wait_for
from turbopump import (
    ConsumeResult,
    LitePullConsumer,
    Message,
    MessageView,
    Producer,
    PushConsumer,
    Sql,
)
from turbopump.admin import Admin
from turbopump.client.config import ClientConfig

pytestmark = pytest.mark.slow

Expression = str | Sql
BY_TAGS: tuple[Expression, Expression] = ("red || blue", "green")
BY_SQL: tuple[Expression, Expression] = (
    Sql("colour IN ('red', 'blue') AND n >= 0"),
    Sql("colour = 'green' OR colour IS NULL"),
)
COLOURS = ["red", "green", "blue", "red"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    settings = {"messageDelayLevel": " ".join(["1s"] * 18)}
    with standalone(tmp_path_factory.mktemp("filters"), settings) as running:
        yield running


class Listener:
    """Records bodies, and fails each message with ``fail`` in its body once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.bodies: list[str] = []

    def __call__(self, messages: Sequence[MessageView], context: object) -> ConsumeResult:
        body = messages[0].body.decode()
        with self.lock:
            is_first = body not in self.bodies
            self.bodies.append(body)
        return ConsumeResult.RETRY_LATER if is_first and "fail" in body else ConsumeResult.SUCCESS

    def has(self, *bodies: str) -> bool:
        with self.lock:
            return sorted(self.bodies) == sorted(bodies)


def send(producer: Producer, topic: str, *bodies: str) -> None:
    for number, body in enumerate(bodies):
        colour = body.split()[0]
        properties = {"colour": colour, "n": str(number)}
        producer.send(Message(topic, body.encode(), tags=colour, properties=properties))


@pytest.mark.parametrize("kind", ["tags", "sql"])
def test_push_consumer_gets_matches_retries_and_a_changed_subscription(
    server: Standalone, kind: str
) -> None:
    before, after = BY_TAGS if kind == "tags" else BY_SQL
    topic, listener = f"push-{kind}", Listener()
    with Admin(server.nameserver) as admin:
        admin.topics.create(topic, queues=2)
    with (
        Producer("shop", nameserver=server.nameserver) as producer,
        PushConsumer(
            f"push-{kind}",
            listener,
            client=ClientConfig(server.nameserver),
            subscriptions={topic: before},
            start_from="first",
        ) as consumer,
    ):
        send(producer, topic, "red 0", "green 0", "blue fail", "green fail")
        # Failed messages are redelivered through the retry topic.
        wait_for(lambda: listener.has("red 0", "blue fail", "blue fail"))
        # Long polls are waiting now, and only a match wakes them.
        send(producer, topic, "green 1", "red 1")
        wait_for(lambda: listener.has("red 0", "blue fail", "blue fail", "red 1"))
        consumer.subscribe(topic, after)
        send(producer, topic, "red 2", "green 2 fail")
        wait_for(lambda: listener.bodies.count("green 2 fail") == 2)
    # Waiting long polls had not yet skipped the messages that did not match the old filter.
    assert set(listener.bodies) - {"green 0", "green 1", "green fail"} == {
        *("red 0", "blue fail", "red 1", "green 2 fail"),
    }


@pytest.mark.parametrize("kind", ["tags", "sql"])
def test_lite_pull_consumer_gets_matches_only(server: Standalone, kind: str) -> None:
    wanted, _ = BY_TAGS if kind == "tags" else BY_SQL
    topic = f"lite-{kind}"
    with Admin(server.nameserver) as admin:
        admin.topics.create(topic, queues=2)
    with (
        Producer("shop", nameserver=server.nameserver) as producer,
        LitePullConsumer(
            f"lite-{kind}",
            nameserver=server.nameserver,
            subscriptions={topic: wanted},
            start_from="first",
        ) as consumer,
    ):
        send(producer, topic, *COLOURS)
        found: list[bytes] = []
        while len(found) < 3:
            found += [message.body for message in consumer.poll(timeout=5)]
    assert sorted(found) == [b"blue", b"red", b"red"]
