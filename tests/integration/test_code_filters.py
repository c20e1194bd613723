"""Code filters end to end: a broker, its filter servers and their filters as real processes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from filter_processes import (
    descendants,
    filter_servers,
    is_alive,
    require_sandbox,
    sandboxes,
    wait_for,
)
from servers import standalone
from turbopump import (
    ClientConfig,
    CodeFilter,
    ConsumeContext,
    ConsumeResult,
    Found,
    LitePullConsumer,
    Message,
    MessageView,
    Producer,
    PullConsumer,
    PushConsumer,
)
from turbopump.errors import RemoteError
from turbopump.testing import running_server
from turbopump.testing.server import RunningServer

pytestmark = pytest.mark.slow

SETTINGS = {"filterServerNums": "1"}
START_S = 30
"""How long consumers wait for a filter server to start."""


def large(message: MessageView) -> bool:
    import json

    return bool(json.loads(message.body)["amount"] > 100)


class Listener:
    """Records the amounts that it receives."""

    def __init__(self) -> None:
        self.amounts: list[int] = []

    def __call__(self, messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        for message in messages:
            self.amounts.append(int(message.body[11:-1]))
        return ConsumeResult.SUCCESS


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    require_sandbox()
    with running_server(tmp_path, SETTINGS) as running:
        yield running
    # Filter servers and filters exit with their broker.
    wait_for(lambda: not filter_servers(os.getpid()) and not sandboxes(os.getpid()))


def send(nameserver: str, *amounts: int, topic: str = "orders") -> None:
    with Producer("shop", nameserver=nameserver) as producer:
        for amount in amounts:
            producer.send(Message(topic, b'{"amount": %d}' % amount))


@contextlib.contextmanager
def consuming(
    nameserver: str, group: str, chosen: CodeFilter
) -> Iterator[tuple[PushConsumer, list[int]]]:
    listener = Listener()
    with PushConsumer(
        group,
        listener,
        client=ClientConfig(nameserver, request_timeout=START_S),
        subscriptions={"orders": chosen},
        start_from="first",
    ) as consumer:
        yield consumer, listener.amounts


def test_every_kind_of_consumer(server: RunningServer) -> None:
    send(server.nameserver, *range(0, 200, 10))
    wanted = list(range(110, 200, 10))
    chosen = CodeFilter(large)
    with consuming(server.nameserver, "push", chosen) as (consumer, amounts):
        server.until(lambda: sorted(amounts) == wanted)
        # Waiting long polls get only matching messages.
        send(server.nameserver, 5, 500)
        server.until(lambda: sorted(amounts) == [*wanted, 500])
        # Change the filter while it runs.
        consumer.subscribe("orders", CodeFilter("def matches(m): return b'7' in m.body"))
        send(server.nameserver, 600, 7)
        server.until(lambda: sorted(amounts) == [7, *wanted, 500])
    with LitePullConsumer(
        "lite",
        nameserver=server.nameserver,
        subscriptions={"orders": chosen},
        start_from="first",
    ) as lite:
        found: list[int] = []
        while len(found) < len(wanted) + 2:
            found += [int(message.body[11:-1]) for message in lite.poll(timeout=1)]
    assert sorted(found) == [*wanted, 500, 600]
    with PullConsumer("pull", nameserver=server.nameserver) as puller:
        pulled: list[int] = []
        for queue in puller.queues("orders"):
            outcome = puller.pull(queue, 0, tags=chosen)
            if isinstance(outcome, Found):
                pulled += [int(message.body[11:-1]) for message in outcome.messages]
    assert sorted(pulled) == [*wanted, 500, 600]


def test_a_message_that_is_retried_is_not_matched_again(server: RunningServer) -> None:
    first_delivery = CodeFilter(
        "def matches(message):\n    return b'5' in message.body and message.reconsume_times == 0"
    )
    delivered: list[tuple[str, bytes, int]] = []

    def later_once(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        (message,) = messages
        delivered.append((message.topic, message.body, message.reconsume_times))
        context.delay_level = 1
        is_first = message.reconsume_times == 0
        return ConsumeResult.RETRY_LATER if is_first else ConsumeResult.SUCCESS

    send(server.nameserver, 60, 150)
    with PushConsumer(
        "retrying",
        later_once,
        client=ClientConfig(server.nameserver, request_timeout=START_S),
        subscriptions={"orders": first_delivery},
        start_from="first",
    ):
        server.until(lambda: len(delivered) == 2)
        # New messages are still matched.
        send(server.nameserver, 70)
        server.until(lambda: server.lag("retrying") == 0)
    body = b'{"amount": 150}'
    assert delivered == [("orders", body, 0), ("orders", body, 1)]


def test_a_filter_server_that_is_killed(server: RunningServer) -> None:
    send(server.nameserver, 50, 150)
    with consuming(server.nameserver, "g", CodeFilter(large)) as (_, amounts):
        server.until(lambda: amounts == [150])
        (before,) = filter_servers(os.getpid())
        filters = sandboxes(os.getpid())
        assert filters
        os.kill(before, signal.SIGKILL)
        wait_for(lambda: not any(map(is_alive, filters)))
        send(server.nameserver, 60, 160)
        server.until(lambda: amounts == [150, 160])
        (after,) = filter_servers(os.getpid())
        assert after != before


def test_a_filter_process_that_is_killed(server: RunningServer) -> None:
    """A filter that was killed between two batches is restarted."""
    send(server.nameserver, 50, 150)
    other = CodeFilter("def matches(message): return b'5' in message.body")
    with (
        consuming(server.nameserver, "g", CodeFilter(large)) as (_, amounts),
        consuming(server.nameserver, "other", other) as (_, others),
    ):
        server.until(lambda: amounts == [150] and sorted(others) == [50, 150])
        for pid in sandboxes(os.getpid()):
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda pid=pid: not is_alive(pid))  # type: ignore[misc]
        send(server.nameserver, 250)
        server.until(lambda: amounts == [150, 250] and sorted(others) == [50, 150, 250])


def test_a_broker_that_restarts(server: RunningServer) -> None:
    send(server.nameserver, 50, 150)
    nameserver = server.nameserver
    with consuming(nameserver, "g", CodeFilter(large)) as (_, amounts):
        server.until(lambda: amounts == [150])
        server.stop()
        server.start()
        send(nameserver, 60, 160)
        server.until(lambda: amounts == [150, 160], 60)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("while True: pass", "ms of processor time for one message"),
        ("return bool(bytes(10 * 1024 ** 3))", "more than 134217728 bytes of memory"),
        ("import os; os._exit(3)", "its process ended with exit code 3"),
        ("return bool(open('/etc/passwd').read())", "filters have no access to files"),
    ],
)
def test_a_hostile_filter(
    server: RunningServer, caplog: pytest.LogCaptureFixture, line: str, reason: str
) -> None:
    caplog.set_level(logging.WARNING)
    send(server.nameserver, 50, 150)
    hostile = CodeFilter(f"def matches(message):\n    {line}")
    with (
        consuming(server.nameserver, "bad", hostile) as (_, nothing),
        consuming(server.nameserver, "good", CodeFilter(large)) as (_, amounts),
    ):
        server.until(lambda: amounts == [150])
        server.until(lambda: any(reason in record.getMessage() for record in caplog.records))
        send(server.nameserver, 160)
        server.until(lambda: amounts == [150, 160])
        assert nothing == []


def test_a_source_that_is_rejected(server: RunningServer) -> None:
    send(server.nameserver, 50)
    wrong = CodeFilter("import requests\ndef matches(message): return True")
    with (
        pytest.raises(RemoteError, match="No module named 'requests'"),
        consuming(server.nameserver, "g", wrong),
    ):
        pass


def test_everything_ends_with_a_broker_that_is_killed(tmp_path: Path) -> None:
    require_sandbox()
    with standalone(tmp_path, SETTINGS) as process:
        send(process.nameserver, 50, 150)
        with consuming(process.nameserver, "g", CodeFilter(large)) as (_, amounts):
            wait_for(lambda: amounts == [150])
            pid = process.process.pid
            below = descendants(pid)
            assert filter_servers(pid)
            assert sandboxes(pid)
            process.kill()
            wait_for(lambda: not any(map(is_alive, below)))


def test_everything_ends_with_a_broker_that_stops(tmp_path: Path) -> None:
    require_sandbox()
    with standalone(tmp_path, {"filterServerNums": "2"}) as process:
        pid = process.process.pid
        wait_for(lambda: process.log.read_text().count("registered\n") == 2)
        below = descendants(pid)
        assert len(filter_servers(pid)) == 2
        process.process.terminate()
        process.process.wait()
        assert not any(map(is_alive, below))
        assert "Traceback" not in process.log.read_text()
