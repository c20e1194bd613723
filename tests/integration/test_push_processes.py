"""A group of several processes over sockets, one of them killed: nothing is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from servers import Standalone, standalone
from turbopump import (
    ConsumeContext,
    ConsumeResult,
    Message,
    Producer,
    PullConsumer,
    PushConsumer,
)
from turbopump.wire.record import MessageView

pytestmark = pytest.mark.slow

MEMBER = Path(__file__).parent.parent / "push_member.py"
STOPPED = Path(__file__).parent.parent / "stopped_member.py"
STUCK = Path(__file__).parent.parent / "stuck_listener.py"
WAIT_S = 60.0


def wait_for(fact: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not fact():
        assert time.monotonic() < end, f"not met within {WAIT_S} s: {what}"
        threading.Event().wait(0.02)


@contextmanager
def member(nameserver: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(MEMBER), nameserver, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def lines(paths: Sequence[Path]) -> Counter[str]:
    found: Counter[str] = Counter()
    for path in paths:
        if path.exists():
            found.update(path.read_text().split())
    return found


def test_a_killed_member_loses_nothing(tmp_path: Path) -> None:
    paths = [tmp_path / f"member-{number}" for number in range(3)]
    sent: list[str] = []
    with standalone(tmp_path / "server") as server, ExitStack() as stack:
        producer = stack.enter_context(Producer("pg", nameserver=server.nameserver))

        def send(count: int) -> None:
            for _ in range(count):
                body = str(len(sent))
                producer.send(Message("orders", body.encode()))
                sent.append(body)

        send(100)
        members = [stack.enter_context(member(server.nameserver, path)) for path in paths]
        wait_for(lambda: len(lines(paths)) == 100, "the first messages came")
        send(200)
        wait_for(lambda: bool(lines(paths[:1])), "the first member has some")
        members[0].send_signal(signal.SIGKILL)
        send(200)
        wait_for(lambda: len(lines(paths)) == 500, "every message came")
        seen = lines(paths)
        assert set(seen) == set(sent)
        # Its queues resume from the committed offsets, which are a few seconds old at most.
        assert seen.total() - len(sent) <= 300


def test_blocking_listeners_run_side_by_side(tmp_path: Path) -> None:
    """More threads start when all are blocked, although one would do for quick listeners."""
    meeting = threading.Barrier(8, timeout=WAIT_S)
    met = []

    def handle(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        met.append(meeting.wait())
        return ConsumeResult.SUCCESS

    with standalone(tmp_path) as server:
        with Producer("pg", nameserver=server.nameserver) as producer:
            for number in range(8):
                producer.send(Message("orders", b"%d" % number))
        with PushConsumer(
            "g",
            handle,
            nameserver=server.nameserver,
            subscriptions={"orders": "*"},
            start_from="first",
            concurrency=8,
        ) as consumer:
            wait_for(lambda: len(met) == 8, "eight listeners met")
            assert {queue.topic for queue in consumer.assignment()} >= {"orders"}
            consumer.resize(2)
            consumer.suspend()
            consumer.resume()
            consumer.commit()


@pytest.mark.parametrize("orderly", [False, True])
def test_a_backlog_is_consumed_by_threads(tmp_path: Path, orderly: bool) -> None:
    lock = threading.Lock()
    seen: Counter[bytes] = Counter()
    orders: dict[int, list[int]] = {}

    def handle(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        with lock:
            seen.update(message.body for message in messages)
            offsets = orders.setdefault(context.queue.queue_id, [])
            offsets.extend(message.queue_offset for message in messages)
        return ConsumeResult.SUCCESS

    with standalone(tmp_path) as server:
        with Producer("pg", nameserver=server.nameserver) as producer:
            for start in range(0, 4000, 100):
                batch = [Message("orders", b"%d" % (start + number)) for number in range(100)]
                producer.send_batch(batch)
        with PushConsumer(
            "g",
            handle,
            nameserver=server.nameserver,
            subscriptions={"orders": "*"},
            start_from="first",
            orderly=orderly,
        ):
            wait_for(lambda: len(seen) == 4000, "all of the backlog")
            names = [each.name for each in threading.enumerate()]
            assert sum(name.startswith("turbopump-listener") for name in names) <= 20
    assert seen.total() == 4000
    if orderly:
        assert all(offsets == sorted(offsets) for offsets in orders.values())


@pytest.mark.parametrize("mode", ["close", "aclose", "wait"])
def test_a_listener_that_never_returns_does_not_keep_the_process_alive(
    tmp_path: Path, mode: str
) -> None:
    with standalone(tmp_path) as server:
        with Producer("pg", nameserver=server.nameserver) as producer:
            producer.send(Message("orders", b"1"))
        command = [sys.executable, str(STUCK), server.nameserver, mode]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            try:
                assert process.stdout.readline() == b"begun\n"
                if mode == "wait":
                    process.send_signal(signal.SIGINT)
                process.wait(WAIT_S)
            finally:
                process.kill()
    assert process.returncode == 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("stopped")) as running:
        yield running


@contextmanager
def stopped(nameserver: str, mode: str, listener: str) -> Iterator[subprocess.Popen[str]]:
    """Run a consumer whose listener has started on the only message of its topic."""
    topic = f"{mode}-{listener}-{time.monotonic_ns()}"
    with Producer("pg", nameserver=nameserver) as producer:
        queue = producer.send(Message(topic, b"1")).queue
    command = [sys.executable, str(STOPPED), nameserver, topic, mode, listener]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "begun\n"
            yield process
        finally:
            process.kill()
    if process.returncode == 0:
        with PullConsumer(topic, nameserver=nameserver) as consumer:
            assert consumer.committed(queue) == 1


@pytest.mark.parametrize("mode", ["blocking", "aio", "uvloop"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_waiting_consumer_gracefully(
    server: Standalone, mode: str, number: signal.Signals
) -> None:
    with stopped(server.nameserver, mode, "slow") as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=WAIT_S)
    # It has waited for its listener and committed: the message is not redelivered.
    assert (process.returncode, out, err) == (0, "done\nclosed\n", "")


@pytest.mark.parametrize(
    ("mode", "number"), [("blocking", signal.SIGINT), ("aio", signal.SIGTERM), ("uvloop", 2)]
)
def test_a_second_signal_ends_a_consumer_that_does_not_stop(
    server: Standalone, mode: str, number: int
) -> None:
    with stopped(server.nameserver, mode, "stuck") as process:
        process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(number)
        process.communicate(timeout=WAIT_S)
    assert process.returncode == -number


def test_the_programs_own_signal_handler_stays_and_may_close(server: Standalone) -> None:
    with stopped(server.nameserver, "own", "slow") as process:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out, err) == (0, "own\ndone\nclosed\n", "")


def test_a_wait_outside_of_the_main_thread_leaves_signals_alone(server: Standalone) -> None:
    with stopped(server.nameserver, "thread", "stuck") as process:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT_S)
    assert process.returncode == -signal.SIGTERM
