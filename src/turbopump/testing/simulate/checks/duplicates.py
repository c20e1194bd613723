"""Duplicates have causes, and no more of them than those allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from turbopump.testing.simulate.events import (
    BrokerDown,
    BrokerUp,
    ClockJumped,
    ConsumeEnded,
    Event,
    FaultBegan,
    Joined,
    Left,
    Readable,
    Result,
    SendTried,
)
from turbopump.testing.simulate.history import Handler
from turbopump.testing.simulate.ledger import Ledger


class BoundedDuplicates:
    """A message is stored at most once for each request, and consumed again only for a cause.

    Each crash and start, network or disk fault, and each member that joins or leaves, may repeat
    what a group had in flight or had not committed, so each copy of a message is consumed at most
    once more for each of them that came after the message was sent. Without any, exactly once.
    """

    name = "duplicates are bounded"

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._tries: Counter[str] = Counter()
        self._copies: Counter[str] = Counter()
        self._successes: Counter[tuple[str, str]] = Counter()
        self._causes: list[int] = []

    def handlers(self) -> Mapping[type[Event], Handler]:
        return {
            SendTried: self._tried,
            Readable: self._stored,
            ConsumeEnded: self._consumed,
            # While a broker starts on a slow disk, all others wait: they share its loop.
            **dict.fromkeys((BrokerDown, FaultBegan, Joined, Left, ClockJumped), self._cause),
            BrokerUp: self._up,
        }

    @property
    def stored_twice(self) -> int:
        """How many further copies of messages producers have made."""
        return sum(max(count - 1, 0) for count in self._copies.values())

    @property
    def consumed_twice(self) -> int:
        """How many further times groups have consumed messages."""
        return sum(count - 1 for count in self._successes.values())

    def _tried(self, event: SendTried) -> None:
        self._tries[event.key] += 1

    def _stored(self, event: Readable) -> Iterator[str]:
        key = event.message.key
        if key is None or not self._ledger.is_own(event.queue.topic):
            return
        self._copies[key] += 1
        if self._copies[key] > self._tries[key]:
            copies, tries = self._copies[key], self._tries[key]
            yield f"{key} is stored {copies} times, but was sent {tries} times"

    def _consumed(self, event: ConsumeEnded) -> Iterator[str]:
        if event.result is not Result.SUCCESS:
            return
        self._successes[event.group, event.key] += 1
        count = self._successes[event.group, event.key]
        send = self._ledger.sends.get(event.key)
        if count == 1 or send is None:
            return
        # A queue's owner of before may not have seen the change yet when the message is sent.
        causes = sum(at_us >= send.at_us - _NOTICED_US for at_us in self._causes)
        bound = max(1, self._copies[event.key]) * (1 + causes)
        if count > bound:
            yield (
                f"{event.group} has consumed {event.key} {count} times, "
                f"{bound} are explained by {causes} faults"
            )

    def _up(self, event: BrokerUp) -> None:
        self._cause(event)
        transactions = self._ledger.plan.transactions.keys
        # What only the master before had is delivered or sent again, and what is lost of a
        # transaction is committed again.
        for queue, message in self._ledger.removed:
            key = message.key or ""
            if self._ledger.is_own(queue.topic) and (event.promoted or key in transactions):
                self._copies[key] -= 1

    def _cause(self, event: Event) -> None:
        self._causes.append(event.at_us)


_NOTICED_US = 60_000_000
