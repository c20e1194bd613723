"""A broker restarts repeatedly under two consumer groups, all of them real processes.

Every listener call is recorded with its time: the records show two owners of one queue, lost
messages, duplicate retries and needless redeliveries.
"""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from brokers import Client
from restart_member import ATTEMPTS, FIRST_LEVEL
from servers import Standalone, standalone
from turbopump import Message, Producer
from turbopump.client.selectors import by_hash
from turbopump.errors import TurbopumpError
from turbopump.net.loop import run
from turbopump.net.pool import ConnectionPool
from turbopump.net.sockets import SocketNetwork
from turbopump.wire.bodies import DelayOffsets
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import whole_body
from turbopump.wire.headers import QueueOfTopic
from turbopump.wire.names import SCHEDULE_TOPIC, dead_letter_topic, retry_topic

pytestmark = pytest.mark.slow

MEMBER = Path(__file__).parent.parent / "restart_member.py"
MEMBERS = 3
QUEUES = 4
BAD_PER_RESTART = 3
SETTLE_NS = 1_000_000_000
WAIT_S = 240.0
"""Longer than the expiry of an unreleased lock plus the rebalances after it."""
PAUSE_S = 0.002
RETRY = retry_topic("workers")
SETTINGS = {"defaultTopicQueueNums": str(QUEUES)}


@dataclass(frozen=True)
class Call:
    """One call of a listener, as recorded by its member."""

    member: int
    group: str
    topic: str
    queue_id: int
    offset: int
    body: str
    attempt: int
    begin_ns: int
    end_ns: int

    @property
    def queue(self) -> tuple[str, str, int]:
        return self.group, self.topic, self.queue_id


@dataclass
class Records:
    """What the members have recorded so far."""

    paths: Sequence[Path]

    def lines(self) -> Iterator[tuple[int, list[str]]]:
        for member, path in enumerate(self.paths):
            text = path.read_text() if path.exists() else ""
            for line in text.splitlines(keepends=True):
                if line.endswith("\n"):
                    yield member, line.split()

    def calls(self) -> list[Call]:
        """Return the completed calls, ordered by start time."""
        begun: dict[tuple[object, ...], int] = {}
        found: list[Call] = []
        for member, (what, *rest) in self.lines():
            if what == "unknown":
                continue
            time_ns, group, topic, queue_id, offset, body, attempt = rest
            key = (member, group, topic, queue_id, offset, attempt)
            if what == "begin":
                begun[key] = int(time_ns)
                continue
            place = (member, group, topic, int(queue_id), int(offset), body, int(attempt))
            found.append(Call(*place, begun.pop(key), int(time_ns)))
        return sorted(found, key=lambda call: call.begin_ns)

    @property
    def unknown_send_backs(self) -> int:
        return sum(words == ["unknown"] for _, words in self.lines())


# --- the load -------------------------------------------------------------------------------------


@dataclass
class Load:
    """Numbered messages, sent continuously whether the broker is up or not."""

    nameserver: str
    acknowledged: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    bad_wanted: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[Load]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            thread.join()

    def _run(self) -> None:
        with Producer("load", nameserver=self.nameserver) as producer:
            for number in itertools.count():
                if self._ended.wait(PAUSE_S):
                    return
                self._send(producer, "work", f"good-{number}")
                self._send(producer, "ordered", f"next-{number}")
                if self.bad_wanted > 0 and self._send(producer, "work", f"bad-{number}"):
                    self.bad_wanted -= 1

    def _send(self, producer: Producer, topic: str, body: str) -> bool:
        try:
            # Sent once: a retry after a lost answer would store it twice.
            producer.send(Message(topic, body.encode()), to=by_hash(body))
        except TurbopumpError:
            return False
        self.acknowledged[topic].add(body)
        return True


def make_topics(server: Standalone) -> None:
    """Create topics before their consumers start, so that these need not wait for routes."""
    with Producer("maker", nameserver=server.nameserver) as producer:
        for topic in ("work", "ordered"):
            producer.send(Message(topic, b"first"))


@contextmanager
def member(nameserver: str, path: Path) -> Iterator[None]:
    command = [sys.executable, str(MEMBER), nameserver, str(path)]
    log = path.with_suffix(".log").open("w")
    with (
        log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.kill()


def wait_for(fact: Callable[[], bool], what: str | Callable[[], str]) -> None:
    end = time.monotonic() + WAIT_S
    while not fact():
        if time.monotonic() >= end:
            pytest.fail(f"not met within {WAIT_S} s: {what if isinstance(what, str) else what()}")
        threading.Event().wait(0.1)


# --- what the broker has --------------------------------------------------------------------------


async def dead_letters(server: Standalone) -> list[str]:
    async with ConnectionPool(SocketNetwork()) as pool:
        messages = await Client(pool, server.broker).messages(dead_letter_topic("workers"))
        return [message.stored_body.decode() for message in messages]


async def queue_end(client: Client, topic: str, queue_id: int) -> int:
    header = QueueOfTopic(topic=topic, queue_id=queue_id)
    return await client.offset(RequestCode.GET_MAX_OFFSET, header)


async def retries_stored(server: Standalone) -> int | None:
    """Return how many retries were delivered to the group, or None while some are delayed."""
    async with ConnectionPool(SocketNetwork()) as pool:
        client = Client(pool, server.broker)
        answer = await client.ask(RequestCode.GET_ALL_DELAY_OFFSET)
        delivered = DelayOffsets.decode(whole_body(answer)).offset_table.get(FIRST_LEVEL, 0)
        if delivered < await queue_end(client, SCHEDULE_TOPIC, FIRST_LEVEL - 1):
            return None
        return await queue_end(client, RETRY, 0)


def left_over(server: Standalone, records: Records, load: Load) -> str:
    """Return which acknowledged messages are not consumed, or failed ones not dead-lettered."""
    calls = records.calls()
    for topic, group in (("ordered", "orderly"), ("work", "workers")):
        missing = load.acknowledged[topic] - {call.body for call in calls if call.group == group}
        if missing:
            return f"{group} has not consumed {sorted(missing)}"
    stored = run(retries_stored(server))
    # Only the first call of each counts: a member that cannot send a message back calls its
    # listener again with the next attempt, which is stored as another message afterwards.
    retried = {call.offset: call for call in reversed(calls) if call.topic == RETRY}
    if stored is None or len(retried) < stored:
        return f"{len(retried)} of {stored} retries are consumed"
    last = [call for call in retried.values() if call.attempt == ATTEMPTS]
    letters = run(dead_letters(server))
    return "" if len(letters) >= len(last) else f"{len(letters)} of {len(last)} dead letters"


# --- the test -------------------------------------------------------------------------------------


def is_settled(records: Records) -> bool:
    """Whether each member is consuming in both groups, and no queue has moved recently."""
    calls = records.calls()
    recent = [call for call in calls if call.begin_ns > time.monotonic_ns() - SETTLE_NS]
    queues = {(call.queue, call.member) for call in recent if call.topic != RETRY}
    members = {(call.member, call.group) for call in recent}
    return len(members) == 2 * MEMBERS and len(queues) == 2 * QUEUES


def check_owners(calls: Sequence[Call]) -> None:
    """Check that no queue has moved, and that order was preserved."""
    by_queue: dict[tuple[str, str, int], list[Call]] = defaultdict(list)
    for call in calls:
        by_queue[call.queue].append(call)
    owners = {queue: {call.member for call in found} for queue, found in by_queue.items()}
    assert {queue: members for queue, members in owners.items() if len(members) > 1} == {}
    for (group, _, _), found in by_queue.items():
        offsets = [call.offset for call in found]
        if group == "orderly":
            assert offsets == list(range(offsets[0], offsets[0] + len(offsets)))
            assert all(a.end_ns <= b.begin_ns for a, b in itertools.pairwise(found))


def check_redeliveries(calls: Sequence[Call], stops_ns: Sequence[tuple[int, int]]) -> None:
    """Check that only messages in flight while the broker stopped were redelivered."""
    first: dict[tuple[object, ...], Call] = {}
    for call in calls:
        earlier = first.setdefault((call.queue, call.offset), call)
        if earlier is not call:
            assert any(
                earlier.begin_ns <= end and begin <= call.begin_ns for begin, end in stops_ns
            ), f"no stop between {earlier} and {call}: {stops_ns}"
            assert earlier.body.startswith("bad"), "a successful message was redelivered"


def check_dead_letters(calls: Sequence[Call], letters: list[str], load: Load, unknown: int) -> None:
    """Check that each failed message was dead-lettered once.

    After a kill during a send-back, the member does not know whether the message was stored: sent
    again, it may be stored twice. Each of these cases is recorded.
    """
    failed = {call.body for call in calls if call.body.startswith("bad")}
    assert failed >= {body for body in load.acknowledged["work"] if body.startswith("bad")}
    assert set(letters) == failed
    assert len(letters) - len(failed) <= unknown


@pytest.mark.parametrize("restarts", [6, pytest.param(20, marks=pytest.mark.long)])
def test_restarts_under_load(
    tmp_path: Path, restarts: int, record_property: Callable[[str, object], None]
) -> None:
    chosen = random.Random(1)
    records = Records([tmp_path / f"member-{number}" for number in range(MEMBERS)])
    stops_ns: list[tuple[int, int]] = []
    with ExitStack() as stack, ExitStack() as load_ends:
        with standalone(tmp_path / "server", SETTINGS) as server:
            make_topics(server)
            for path in records.paths:
                stack.enter_context(member(server.nameserver, path))
            load = load_ends.enter_context(Load(server.nameserver).running())
            wait_for(lambda: is_settled(records), "each queue has one owner")
            settled_ns = time.monotonic_ns()
        stops_ns.append((settled_ns, time.monotonic_ns()))
        for number in range(restarts):
            with standalone(tmp_path / "server", SETTINGS, server.ports) as server:
                load.bad_wanted += BAD_PER_RESTART
                # Not waiting for a condition: restarts should interrupt whatever is going on.
                time.sleep(chosen.uniform(0.2, 1.2))
                begin_ns = time.monotonic_ns()
                if number % 2:
                    server.kill()
            # It serves until it has ended, which takes a while on a busy machine.
            stops_ns.append((begin_ns, time.monotonic_ns()))
        with standalone(tmp_path / "server", SETTINGS, server.ports) as server:
            wait_for(lambda: load.bad_wanted == 0, "all bad messages are sent")
            load_ends.close()
            wait_for(
                lambda: not left_over(server, records, load),
                lambda: f"everything is consumed: {left_over(server, records, load)}",
            )
            letters = run(dead_letters(server))
    calls = [call for call in records.calls() if call.begin_ns >= settled_ns]
    unknown = records.unknown_send_backs
    record_property("outcome", f"{len(calls)} calls, {len(letters)} letters, {unknown} in doubt")
    check_owners(calls)
    check_redeliveries(calls, stops_ns)
    check_dead_letters(calls, letters, load, unknown)
    assert len(set(letters)) == restarts * BAD_PER_RESTART
