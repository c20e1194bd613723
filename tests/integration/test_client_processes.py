"""The blocking clients over sockets: threads, callbacks, iteration, fork."""

from __future__ import annotations

import inspect
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

import turbopump
import turbopump.aio
from servers import Standalone, standalone
from turbopump import (
    Found,
    LitePullConsumer,
    Message,
    NothingNew,
    Producer,
    ProducerConfig,
    PullConsumer,
    SendStatus,
    TurbopumpError,
    by_hash,
    split_batch,
)
from turbopump.client.members import ConsumerMember, ProducerMember
from turbopump.errors import ClientError, ForkedClient, InvalidArgument, NetworkError, NotRunning

pytestmark = pytest.mark.slow

THREAD_NAME = "turbopump-client"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("client")) as running:
        yield running


def client_threads() -> int:
    return sum(thread.name == THREAD_NAME for thread in threading.enumerate())


def attempts() -> Iterator[int]:
    """Count attempts until the caller stops iterating; fail after 30 s."""
    end = time.monotonic() + 30
    yield from itertools.takewhile(lambda _: time.monotonic() < end, itertools.count())
    pytest.fail("condition not met after 30 s")


def in_child(action: Callable[[], None]) -> None:
    """Run an action in a forked child; fail if it fails there."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:  # noqa: BLE001 - the parent must learn of any error
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_sending_polling_and_pulling(server: Standalone) -> None:
    with Producer("pg", nameserver=server.nameserver) as producer:
        receipts = [
            producer.send(Message("plain", b"%d" % number), to=by_hash("k")) for number in range(50)
        ]
        queue = receipts[0].queue
        assert [receipt.queue_offset for receipt in receipts] == list(range(50))
        assert queue in producer.queues("plain")
    with LitePullConsumer("lite", nameserver=server.nameserver, start_from="first") as consumer:
        consumer.assign([queue])
        assert consumer.assignment() == {queue}
        bodies = []
        for message in consumer:
            bodies.append(int(message.body))
            if len(bodies) == 50:
                break
        assert bodies == list(range(50))
        consumer.seek(queue, 45)
        consumer.pause(queue)
        assert consumer.poll(timeout=0.05) == []
        consumer.resume(queue)
        assert [int(message.body) for message in consumer.poll()] == list(range(45, 50))
        consumer.commit()
    with PullConsumer("lite", nameserver=server.nameserver) as by_hand:
        assert by_hand.committed(queue) == 50
        found = by_hand.pull(queue, 48)
        assert isinstance(found, Found)
        assert len(found.messages) == 2
        assert isinstance(by_hand.pull(queue, 50), NothingNew)
        assert (by_hand.min_offset(queue), by_hand.max_offset(queue)) == (0, 50)


def test_threads_share_a_producer(server: Standalone) -> None:
    with Producer("pg", nameserver=server.nameserver) as producer, ThreadPoolExecutor(8) as pool:
        messages = [Message("threads", b"%d" % number) for number in range(400)]
        receipts = list(pool.map(producer.send, messages))
        assert len({receipt.message_id for receipt in receipts}) == 400
        assert len({(receipt.queue, receipt.queue_offset) for receipt in receipts}) == 400


def test_promises_callbacks_batches_and_oneway(server: Standalone) -> None:
    heard: list[Exception | None] = []
    config = ProducerConfig(in_flight_max=16)
    with Producer("pg", nameserver=server.nameserver, config=config) as producer:
        promises = [
            producer.submit(Message("many", b"x"), on_sent=lambda _, error: heard.append(error))
            for _ in range(200)
        ]
        assert len({promise.result(5).message_id for promise in promises}) == 200
        for batch in split_batch((Message("many", b"x" * 100) for _ in range(50)), 2000):
            producer.send_batch(batch)
        producer.send_oneway(Message("many", b"x"))
        refused = producer.submit(Message("many", b""))
        with pytest.raises(InvalidArgument):
            refused.result(5)
    assert heard == [None] * 200


def test_clients_share_one_thread_that_ends_with_them(server: Standalone) -> None:
    assert client_threads() == 0
    with Producer("one", nameserver=server.nameserver):
        with Producer("two", nameserver=server.nameserver) as producer:
            producer.send(Message("T", b"x"))
            assert client_threads() == 1
        assert client_threads() == 1
        with pytest.raises(NotRunning, match="with"):
            producer.send(Message("T", b"x"))
    assert client_threads() == 0


def test_a_waiter_gets_an_error_when_another_thread_closes(server: Standalone) -> None:
    consumer = LitePullConsumer("waiting", nameserver=server.nameserver)
    consumer.start()
    consumer.assign([])
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(consumer.poll, timeout=60) for _ in range(4)]
        consumer.assignment()
        consumer.close()
        for each in waiting:
            with pytest.raises(NotRunning):
                each.result(10)
    assert client_threads() == 0


def test_a_failed_start_leaves_nothing_behind() -> None:
    with pytest.raises(InvalidArgument, match=r"group must .* got ''"):
        Producer("", nameserver="127.0.0.1:9876")
    assert client_threads() == 0


def test_a_callback_that_calls_the_client_gets_an_error(server: Standalone) -> None:
    heard: list[Exception] = []
    with Producer("pg", nameserver=server.nameserver) as producer:

        def call_again(*_: object) -> None:
            try:
                producer.send(Message("T", b"x"))
            except ClientError as error:
                heard.append(error)

        producer.submit(Message("T", b"x"), on_sent=call_again).result(5)
    assert "own event loop" in str(heard[0])


def test_fork(server: Standalone) -> None:
    with Producer("pg", nameserver=server.nameserver) as producer:
        producer.send(Message("forked", b"x"))

        def use_the_parents() -> None:
            with pytest.raises(ForkedClient, match="after the fork"):
                producer.send(Message("forked", b"x"))
            with pytest.raises(ForkedClient, match="after the fork"):
                producer.close()

        def make_another() -> None:
            with Producer("pg", nameserver=server.nameserver) as own:
                own.send(Message("forked", b"child"))

        def leave_the_parents_block() -> None:
            producer.__exit__(None, None, None)

        for action in (use_the_parents, make_another, leave_the_parents_block):
            in_child(action)
            producer.send(Message("forked", b"parent"), timeout=3)


def test_a_forked_child_that_ends_like_any_program_leaves_its_parent_alone(
    server: Standalone,
) -> None:
    script = f"""
import os, sys
from turbopump import Message, Producer
with Producer("pg", nameserver={server.nameserver!r}) as producer:
    producer.send(Message("forked", b"x"))
    pid = os.fork()
    if not pid:
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    producer.send(Message("forked", b"parent"), timeout=3)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)


def test_a_producer_outlives_its_server(tmp_path: Path) -> None:
    with standalone(tmp_path) as first:
        producer = Producer("pg", nameserver=first.nameserver)
        producer.start()
        for number in range(50):
            producer.send(Message("outlived", b"%d" % number))
        first.kill()
    start_s = time.monotonic()
    with pytest.raises(NetworkError) as caught:
        producer.send(Message("outlived", b"lost"), timeout=1.5)
    assert caught.value.retriable
    assert time.monotonic() - start_s > 0.9, "it waited for the server"
    # Long before there is a server to connect to.
    waiting = producer.submit(Message("outlived", b"after"), timeout=60)
    with standalone(tmp_path, ports=first.ports) as second:
        assert waiting.result(60).status is SendStatus.OK
        producer.close()
        subscriptions = {"outlived": "*"}
        with LitePullConsumer(
            "reader", nameserver=second.nameserver, subscriptions=subscriptions, start_from="first"
        ) as consumer:
            bodies: list[bytes] = []
            for _ in attempts():
                bodies += [message.body for message in consumer.poll(timeout=0.2)]
                if len(bodies) >= 51:
                    break
    assert sorted(bodies) == sorted([b"after", *(b"%d" % number for number in range(50))])


def test_the_queues_of_a_member_that_is_killed_go_to_the_others(server: Standalone) -> None:
    arguments = f'"killed", nameserver={server.nameserver!r}, subscriptions={{"shared": "*"}}'
    script = f"""
from turbopump import LitePullConsumer
with LitePullConsumer({arguments}, start_from="first") as consumer:
    for message in consumer:
        print(message.message_id, flush=True)
"""
    with Producer("pg", nameserver=server.nameserver) as producer:
        wanted = {producer.send(Message("shared", b"%d" % n)).message_id for n in range(200)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        seen = [other.stdout.readline().strip() for _ in range(20)]
        other.kill()
        seen += other.stdout.read().split()
    with LitePullConsumer(
        "killed", nameserver=server.nameserver, subscriptions={"shared": "*"}, start_from="first"
    ) as consumer:
        for _ in attempts():
            seen += [message.message_id for message in consumer.poll(timeout=0.2)]
            if set(seen) == wanted:
                break
    assert set(seen) == wanted, "nothing is lost"
    assert len(seen) <= 2 * len(wanted), "uncommitted messages are delivered at most twice"


def test_a_program_that_forgets_to_close_can_end(server: Standalone, tmp_path: Path) -> None:
    script = f"""
from turbopump import Message, Producer
producer = Producer("pg", nameserver={server.nameserver!r})
producer.start()
producer.send(Message("T", b"x"))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)


@pytest.mark.parametrize("module", [turbopump, turbopump.aio], ids=lambda module: module.__name__)
def test_every_public_name_has_a_text_with_an_example(module: ModuleType) -> None:
    for name in set(module.__all__) - {"__version__"}:
        value = getattr(module, name)
        text = value.__doc__ or ""
        # All errors are caught as the first one shows.
        is_shown = issubclass(value, TurbopumpError) if isinstance(value, type) else False
        assert "::" in text or (is_shown and text), f"{name} has no example"
        for member in vars(value) if isinstance(value, type) else ():
            if not member.startswith("_") and inspect.isroutine(getattr(value, member)):
                assert inspect.getdoc(getattr(value, member)), f"{name}.{member}"


def test_blocking_clients_have_every_method_of_the_asynchronous_ones() -> None:
    for name in ("Producer", "PullConsumer", "LitePullConsumer"):
        kind, wrapped = getattr(turbopump, name), getattr(turbopump.aio, name)
        inner = {*vars(ConsumerMember), *vars(ProducerMember)}
        methods = {
            member
            for member, value in vars(wrapped).items()
            if not member.startswith("_") and callable(value)
        }
        assert methods - inner <= set(dir(kind)), name


def in_process(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program to completion."""
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


SUBMITTING = """
import sys
from turbopump import Message, Producer, ProducerConfig
nameserver, topic, count = sys.argv[1:]
def heard(receipt, error):
    if error is not None:
        print(error)
producer = Producer("pg", nameserver=nameserver)
producer.start()
for number in range(int(count)):
    producer.submit(Message(topic, b"%d" % number), on_sent=heard)
"""


def stored_count(nameserver: str, topic: str) -> int:
    with PullConsumer("counting", nameserver=nameserver) as consumer:
        return sum(consumer.max_offset(queue) for queue in consumer.queues(topic))


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "del producer", "producer.send_oneway(late)"])
def test_a_process_that_exits_without_close_sends_its_pending_messages(
    server: Standalone, end: str
) -> None:
    topic = f"unclosed{len(end)}"
    script = SUBMITTING + f"late = Message(topic, b'late')\n{end}\n"
    done = in_process(script, server.nameserver, topic, "3000")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for _ in attempts():
        if stored_count(server.nameserver, topic) == 3000 + ("oneway" in end):
            break


def test_messages_a_process_cannot_send_before_it_exits_are_counted(tmp_path: Path) -> None:
    script = SUBMITTING.replace(
        'Producer("pg", nameserver=nameserver)',
        'Producer("pg", nameserver=nameserver, config=ProducerConfig(send_timeout=60))',
    )
    script = script.replace(
        "for number", 'producer.send(Message(topic, b"first")); input("ready"); print()\nfor number'
    )
    with standalone(tmp_path) as server:
        command = [sys.executable, "-c", script, server.nameserver, "lost", "30"]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.read(5) == "ready"
            server.process.send_signal(signal.SIGSTOP)
            start_s = time.monotonic()
            out, err = process.communicate("go\n", timeout=60)
            server.process.send_signal(signal.SIGCONT)
    assert process.returncode == 0
    assert time.monotonic() - start_s < 20
    assert "30 submitted messages were not sent within 5 s" in err, out + err


def test_a_forked_child_that_ends_leaves_its_parents_messages_alone(server: Standalone) -> None:
    script = (
        SUBMITTING
        + """
import os, warnings
# Since Python 3.12, forking with threads warns.
warnings.simplefilter("ignore", DeprecationWarning)
child = os.fork()
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    )
    done = in_process(script, server.nameserver, "forkedunclosed", "500")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert stored_count(server.nameserver, "forkedunclosed") == 500


ASYNC = """
import asyncio, sys
from turbopump import Message, ProducerConfig
from turbopump.aio import Producer
nameserver, mode = sys.argv[1:]
producer = None
async def main():
    global producer
    producer = Producer("pg", nameserver=nameserver)
    await producer.start()
    await producer.send(Message(mode, b"first"))
    return [await producer.submit(Message(mode, b"x")) for _ in range(100)]
if mode == "run":
    asyncio.run(main())
elif mode == "uvloop":
    import uvloop
    uvloop.run(main())
else:
    loop = asyncio.new_event_loop()
    kept = loop.run_until_complete(main())
"""


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("run", "submitted messages were cancelled before they were stored"),
        ("uvloop", "submitted messages were cancelled before they were stored"),
        ("loop", "submitted messages were not sent: their event loop ended"),
    ],
)
def test_messages_of_a_loop_that_ends_are_counted(server: Standalone, mode: str, text: str) -> None:
    done = in_process(ASYNC, server.nameserver, mode)
    assert done.returncode == 0
    reports = re.findall(rf"(\d+) {text}", done.stderr)
    assert len(reports) == 1, done.stderr
    assert 1 + 100 - int(reports[0]) <= stored_count(server.nameserver, mode) <= 101


def test_a_process_that_exits_while_handling_messages_does_not_commit_them(
    server: Standalone,
) -> None:
    with Producer("pg", nameserver=server.nameserver) as producer:
        queue = producer.send(Message("amid", b"1")).queue
    script = """
import sys
from turbopump import LitePullConsumer
consumer = LitePullConsumer(
    "amid", nameserver=sys.argv[1], subscriptions={"amid": "*"}, start_from="first"
)
consumer.start()
while not consumer.poll():
    pass
sys.exit("failed")
"""
    done = in_process(script, server.nameserver)
    assert (done.returncode, done.stderr) == (1, "failed\n")
    with PullConsumer("amid", nameserver=server.nameserver) as consumer:
        assert not consumer.committed(queue)


CALLBACKS = """
import sys, threading
from turbopump import ConsumeResult, Message, Producer, PushConsumer
nameserver = sys.argv[1]
class Closing:
    def before_send(self, *_): pass
    def after_send(self, *_): hooked.close()
with Producer("sent", nameserver=nameserver) as producer:
    producer.submit(Message("callbacks", b"1"), on_sent=lambda *_: producer.close())
hooked = Producer("hooked", nameserver=nameserver, hooks=[Closing()])
with hooked:
    hooked.send(Message("callbacks", b"2"))
async def ahandle(messages, context):
    consumer.close()
    seen.append(len(messages))
    return ConsumeResult.SUCCESS
def handle(messages, context):
    consumer.close()
    seen.append(len(messages))
    return ConsumeResult.SUCCESS
for each in (handle, ahandle):
    seen = []
    consumer = PushConsumer(each.__name__, each, nameserver=nameserver,
                            subscriptions={"callbacks": "*"}, start_from="first")
    with consumer:
        consumer.wait()
    assert seen, each
class Wrapped:
    def __init__(self, kept): self.kept = kept
    def __del__(self): self.kept.close()
last = Producer("last", nameserver=nameserver)
last.start()
last.submit(Message("callbacks", b"3"))
wrapped = Wrapped(last)
import atexit
atexit.register(last.close)
print(threading.active_count())
"""


def test_clients_may_be_closed_in_callbacks_hooks_listeners_and_at_the_end(
    server: Standalone,
) -> None:
    done = in_process(CALLBACKS, server.nameserver)
    assert (done.returncode, done.stderr) == (0, "")
    assert stored_count(server.nameserver, "callbacks") == 3
