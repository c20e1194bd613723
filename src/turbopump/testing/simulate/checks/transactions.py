"""A message of a transaction is visible if, and only if, the transaction has committed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from turbopump.testing.simulate.events import (
    Acknowledged,
    BrokerUp,
    Calm,
    ConsumeBegan,
    Readable,
    SendTried,
    TransactionDecided,
    TransactionsLeft,
)
from turbopump.testing.simulate.history import on
from turbopump.testing.simulate.ledger import Check, Ledger
from turbopump.wire.names import HALF_TOPIC


class TransactionsEnd(Check):
    """Committed messages are visible once, all others never; no transaction stays open.

    Except for half messages lost in a power loss, as the mode does not guarantee them. One that
    was sent more than once, because brokers rejected it, may have been stored each time.
    """

    name = "transactions end as decided"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._keys = frozenset(ledger.plan.transactions.keys)
        self._commits: dict[str, bool] = {}
        self._halves: dict[str, Acknowledged] = {}
        self._lost: set[str] = set()
        self._tries: Counter[str] = Counter()

    @property
    def committed(self) -> int:
        """How many transactions have committed."""
        return sum(self._commits.values())

    @property
    def rolled_back(self) -> int:
        """How many transactions were rolled back."""
        return len(self._commits) - self.committed

    def invisible(self) -> list[str]:
        """Return the keys of committed messages that no consumer can read."""
        ledger = self._ledger
        readable = {key for topic in ledger.plan.queues for key in ledger.keys_in(topic)}
        committed = (key for key, commits in self._commits.items() if commits)
        return [key for key in committed if key not in readable and key not in self._lost]

    @on(SendTried)
    def _tried(self, event: SendTried) -> None:
        self._tries[event.key] += 1

    @on(Acknowledged)
    def _acknowledged(self, event: Acknowledged) -> None:
        if event.queue.topic == HALF_TOPIC:
            self._halves[event.key] = event

    @on(TransactionDecided)
    def _decided(self, event: TransactionDecided) -> None:
        self._commits[event.key] = event.commits

    @on(Readable)
    def _readable(self, event: Readable) -> Iterator[str]:
        if self._ledger.is_own(event.queue.topic):
            yield from self._judge(event.message.key or "", f"is readable in {event.queue}")

    @on(ConsumeBegan)
    def _consumed(self, event: ConsumeBegan) -> Iterator[str]:
        yield from self._judge(event.key, f"is consumed by {event.group}")

    def _judge(self, key: str, what: str) -> Iterator[str]:
        if key in self._keys and not self._commits.get(key):
            state = "rolled back" if key in self._commits else "open"
            yield f"{key} {what}, but its transaction is {state}"

    @on(BrokerUp)
    def _started(self, event: BrokerUp) -> None:
        """Record which half messages are lost; `AcknowledgedKept` judges whether they may be."""
        for key, half in self._halves.items():
            is_there = self._ledger.is_stored(half.queue, half.offset, key)
            if half.queue.broker == event.broker and not is_there:
                self._lost.add(key)

    @on(TransactionsLeft)
    def _left(self, event: TransactionsLeft) -> Iterator[str]:
        missing = set(self.invisible())
        ended = {key for key, commits in self._commits.items() if commits and key not in missing}
        left = [*event.keys, *(key for key in event.passed if key not in ended)]
        if left:
            yield f"{', '.join(left)} still open on {event.broker}"

    @on(Calm)
    def _at_end(self, _: Calm) -> Iterator[str]:
        for key in self.invisible():
            yield f"{key} was committed, and is not visible"
        ledger = self._ledger
        # Including those stored when a broker crashed: no observer saw them become readable.
        copies = Counter(key for topic in ledger.plan.queues for key in ledger.keys_in(topic))
        for key in self._commits:
            if copies[key] > self._tries[key]:
                yield f"{key} is visible {copies[key]} times, but was sent {self._tries[key]} times"
