"""What senders and consumers recorded, and the checks on it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from torture.journal import JournalReader
from torture.messages import (
    DELAYED,
    DELAYS_MS,
    FLOWS,
    ORDERED,
    Fate,
    delay_level_of,
    fate_of,
    flow_of,
)

_NS_PER_MS = 1_000_000
_RETURN_MS = 2000
_TICK_MS = 2
"""Times are truncated to milliseconds on both sides."""


@dataclass(slots=True)
class Call:
    """One call of a listener with one message."""

    member: str
    identity: str
    topic: str
    queue_id: int
    offset: int
    attempt: int
    begin_ns: int
    end_ns: int | None = None
    """None if its process was killed before."""

    @property
    def place(self) -> tuple[str, int, int]:
        return self.topic, self.queue_id, self.offset


@dataclass
class Accounts:
    """The journals of one scenario, read as they grow."""

    directory: Path
    tried: dict[str, int] = field(default_factory=dict)
    """When each message was first sent, in ns."""
    acknowledged: dict[str, int] = field(default_factory=dict)
    """When each was acknowledged, in ns."""
    errors: dict[str, str] = field(default_factory=dict)
    """The error that the sender got instead."""
    calls: list[Call] = field(default_factory=list)
    done: dict[str, set[str]] = field(default_factory=lambda: {flow: set() for flow in FLOWS})
    damaged: set[str] = field(default_factory=set)
    """Messages whose body a listener found altered."""

    def __post_init__(self) -> None:
        self._senders = JournalReader(self.directory, "sender-*.journal")
        self._members = JournalReader(self.directory, "member-*.journal")
        self._open: dict[tuple[str, ...], Call] = {}

    def read(self) -> None:
        """Read what was recorded since the last call."""
        for _, (event, time_ns, identity, *more) in self._senders.news():
            match event:
                case "try":
                    self.tried[identity] = int(time_ns)
                case "ack":
                    self.acknowledged[identity] = int(time_ns)
                case "error" | "unsure":
                    self.errors[identity] = " ".join([event, *more])
        for member, (event, time_ns, *call) in self._members.news():
            self._take_call(member, event, int(time_ns), call)

    def _take_call(self, member: str, event: str, time_ns: int, fields: list[str]) -> None:
        identity, topic, queue_id, offset, attempt = fields
        key = (member, *fields)
        if event == "begin":
            call = Call(member, identity, topic, int(queue_id), int(offset), int(attempt), time_ns)
            self.calls.append(call)
            self._open[key] = call
        elif event == "damaged":
            self.damaged.add(identity)
        else:
            begun = self._open.pop(key, None)
            if begun is not None:
                begun.end_ns = time_ns
            if event == "done":
                self.done[flow_of(identity)].add(identity)

    # --- questions --------------------------------------------------------------------------------

    def missing(self, dead: Counter[str]) -> list[str]:
        """Return acknowledged messages that no consumer finished and that are not dead letters."""
        return [
            identity
            for identity in self.acknowledged
            if identity not in self.done[flow_of(identity)] and identity not in dead
        ]

    def must_die(self) -> set[str]:
        """Return acknowledged messages that always fail."""
        return {each for each in self.acknowledged if fate_of(each) is Fate.FAILS_ALWAYS}

    def redelivered(self) -> int:
        """Return how many redeliveries of stored messages there were; a retry is a new message."""
        places = Counter(call.place for call in self.calls)
        return places.total() - len(places)

    def stored_twice(self) -> int:
        """Return how many surplus copies are in the messages' own topics, from repeated sends."""
        first = {call.place: call.identity for call in self.calls if call.topic in FLOWS}
        counts = Counter(first.values())
        return counts.total() - len(counts)

    def early(self) -> list[str]:
        """Return delayed messages that were delivered early."""
        found = []
        for call in self.calls:
            if call.topic == DELAYED and call.identity in self.tried:
                delay_ms = DELAYS_MS[delay_level_of(call.identity)]
                waited_ms = (call.begin_ns - self.tried[call.identity]) / _NS_PER_MS
                if waited_ms < delay_ms - _TICK_MS:
                    found.append(f"{call.identity}: {waited_ms:.0f} ms of {delay_ms} ms")
        return found

    def latest_ms(self) -> float:
        """Return the maximum lateness of a delayed message's first delivery."""
        latest = 0.0
        for call in self._first_calls(DELAYED):
            if call.identity in self.acknowledged:
                waited_ms = (call.begin_ns - self.acknowledged[call.identity]) / _NS_PER_MS
                latest = max(latest, waited_ms - DELAYS_MS[delay_level_of(call.identity)])
        return latest

    def overlaps(self) -> list[str]:
        """Return calls of the orderly group that ran at the same time on one queue."""
        found = []
        for calls in self._by_queue(ORDERED).values():
            busy: Call | None = None
            for call in calls:
                if busy is not None and busy.end_ns is not None and call.begin_ns < busy.end_ns:
                    found.append(
                        f"queue {call.queue_id}: {busy.member} at {busy.offset} and "
                        f"{call.member} at {call.offset}"
                    )
                if busy is None or (call.end_ns or 0) > (busy.end_ns or 0):
                    busy = call
        return found

    def returns(self) -> list[str]:
        """Return ordered queues that moved to another member and soon back: both owned them."""
        found = []
        for queue_id, calls in self._by_queue(ORDERED).items():
            switches = [(a, b) for a, b in pairwise(calls) if a.member != b.member]
            for (left, taken), (given, back) in pairwise(switches):
                gap_ms = (back.begin_ns - left.begin_ns) / _NS_PER_MS
                if left.member == back.member and gap_ms < _RETURN_MS:
                    found.append(
                        f"queue {queue_id}: {left.member} at {left.offset}, {taken.member} at "
                        f"{taken.offset} to {given.offset}, {back.member} at {back.offset}"
                    )
        return found

    def out_of_order(self) -> list[str]:
        """Return calls of the orderly group that skipped an earlier message."""
        found = []
        for calls in self._by_queue(ORDERED).values():
            expected = 0
            for call in calls:
                if call.offset > expected:
                    found.append(f"queue {call.queue_id}: {call.offset} before {expected}")
                expected = max(expected, call.offset + 1)
        return found

    def slowest_ack_ms(self) -> float:
        """Return how long the slowest acknowledged send took."""
        waits = [at - self.tried[each] for each, at in self.acknowledged.items()]
        return max(waits, default=0) / _NS_PER_MS

    def longest_silence_ms(self) -> float:
        """Return the longest interval without an acknowledgement."""
        times = sorted(self.acknowledged.values())
        return max((b - a for a, b in pairwise(times)), default=0) / _NS_PER_MS

    def _by_queue(self, topic: str) -> dict[int, list[Call]]:
        queues: dict[int, list[Call]] = defaultdict(list)
        for call in sorted(self.calls, key=lambda each: each.begin_ns):
            if call.topic == topic:
                queues[call.queue_id].append(call)
        return queues

    def _first_calls(self, topic: str) -> Iterator[Call]:
        seen: set[str] = set()
        for call in sorted(self.calls, key=lambda each: each.begin_ns):
            if call.topic == topic and call.identity not in seen:
                seen.add(call.identity)
                yield call
