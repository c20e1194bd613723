"""Duplicates have causes, and there are no more of them than the causes permit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from turbopump.message import MessageQueue
from turbopump.testing.simulate.events import (
    BrokerDown,
    BrokerUp,
    ClockJumped,
    ConsumeBegan,
    ConsumeEnded,
    Event,
    FaultBegan,
    Joined,
    Left,
    Readable,
    Result,
    SendTried,
    Stored,
)
from turbopump.testing.simulate.history import on
from turbopump.testing.simulate.ledger import Check, Ledger
from turbopump.wire.names import RETRY_PREFIX


class BoundedDuplicates(Check):
    """A message is stored at most once for each request, and consumed again only for a cause.

    Each crash and start, network or disk fault, and each member that joins or leaves, may repeat
    what a group had in flight or had not committed, so each copy of a message is consumed at most
    once more for each of them that followed the sending of the message. Copies for retries count:
    two members that own a queue for a while both send back failures, and each copy fails again.
    Each call of a listener creates one copy at most, and one more for each cause, whose response is
    lost, or says that no slave has it. Without any cause, all of that happens exactly once.
    """

    name = "duplicates are bounded"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._tries: Counter[str] = Counter()
        self._copies: Counter[str] = Counter()
        """By key: what is stored now in topics of producers."""
        self._ever: Counter[str] = Counter()
        """By key: what was ever stored there, and may have been consumed."""
        self._retries: defaultdict[tuple[str, str], Counter[int]] = defaultdict(Counter)
        """By group and key: what was ever stored for a group, by number of retries."""
        self._known: set[tuple[MessageQueue, int, tuple[int, int]]] = set()
        """Records that are counted as retries."""
        self._calls: Counter[tuple[str, str]] = Counter()
        self._failures: Counter[tuple[str, str, int]] = Counter()
        self._successes_at: Counter[tuple[str, str, int]] = Counter()
        """By group, key and number of earlier retries."""
        self._successes: Counter[tuple[str, str]] = Counter()
        self._causes: list[int] = []

    @property
    def stored_twice(self) -> int:
        """How many extra copies of messages producers have created."""
        return sum(max(count - 1, 0) for count in self._copies.values())

    @property
    def consumed_twice(self) -> int:
        """How many extra times groups have consumed messages."""
        return sum(count - 1 for count in self._successes.values())

    @on(SendTried)
    def _tried(self, event: SendTried) -> None:
        self._tries[event.key] += 1

    @on(Readable)
    def _stored(self, event: Readable) -> Iterator[str]:
        key = event.message.key
        if key is None:
            return
        if event.queue.topic.startswith(RETRY_PREFIX):
            group = event.queue.topic.removeprefix(RETRY_PREFIX)
            self._note_retry(event.queue, event.offset, event.message)
            count, calls = self._retries[group, key].total(), self._calls[group, key]
            if count > calls * (1 + self._causes_since(key)):
                yield f"{key} is stored {count} times for {group}, which had it {calls} times"
        if not self._ledger.is_own(event.queue.topic):
            return
        self._ever[key] += 1
        self._copies[key] += 1
        if self._copies[key] > self._tries[key]:
            copies, tries = self._copies[key], self._tries[key]
            yield f"{key} is stored {copies} times, but was sent {tries} times"

    def _note_retry(self, queue: MessageQueue, offset: int, message: Stored) -> None:
        group, record = queue.topic.removeprefix(RETRY_PREFIX), (queue, offset, message.record)
        if message.key is not None and record not in self._known:
            self._known.add(record)
            self._retries[group, message.key][message.times] += 1

    @on(ConsumeBegan)
    def _called(self, event: ConsumeBegan) -> None:
        self._calls[event.group, event.key] += 1

    @on(ConsumeEnded)
    def _consumed(self, event: ConsumeEnded) -> Iterator[str]:
        group, key, times = place = event.group, event.key, event.times
        if event.result is Result.SUCCESS:
            self._successes[group, key] += 1
            self._successes_at[place] += 1
        elif event.result is Result.FAILURE:
            self._failures[place] += 1
        causes, retries = self._causes_since(key), self._retries[group, key]
        count = self._successes_at[place]
        copies = retries[times] if times else self._ever[key]
        if causes:
            # A message that could not be sent back was retried from an earlier copy.
            copies = self._ever[key] + sum(retries[before] for before in range(1, times + 1))
        else:
            # With a cause, a broker may reject failed messages for as long as that lasts.
            count += self._failures[place]
        bound = max(1, copies) * (1 + causes)
        if count > bound and key in self._ledger.sends:
            yield (
                f"{group} has consumed {key} {count} times with {times} retries, "
                f"{bound} are explained by {copies} copies and {causes} faults"
            )

    def _causes_since(self, key: str) -> int:
        send = self._ledger.sends.get(key)
        # A queue's previous owner may not have seen the change yet when the message is sent.
        since_us = 0 if send is None else send.at_us - _NOTICED_US
        return sum(at_us >= since_us for at_us in self._causes)

    @on(BrokerUp)
    def _up(self, event: BrokerUp) -> None:
        self._cause(event)
        # Messages lost in a power loss, or only on the old master, are delivered or sent again.
        self._copies = Counter(
            message.key
            for queue, messages in self._ledger.stored.items()
            if self._ledger.is_own(queue.topic)
            for message in messages.values()
            if message.key is not None
        )
        for queue, (begin, found) in event.contents.items():
            if queue.topic.startswith(RETRY_PREFIX):
                for offset, message in enumerate(found, begin):
                    self._note_retry(queue, offset, message)

    # While a broker starts on a slow disk, all others wait: they share its loop.
    @on(BrokerDown, FaultBegan, Joined, Left, ClockJumped)
    def _cause(self, event: Event) -> None:
        self._causes.append(event.at_us)


_NOTICED_US = 60_000_000
