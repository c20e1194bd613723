"""Without faults, messages are delivered without delay."""

from __future__ import annotations

from collections.abc import Iterator

from turbopump.testing.simulate.events import US_PER_S, Acknowledged, Calm, ConsumeBegan, Ended
from turbopump.testing.simulate.history import on
from turbopump.testing.simulate.ledger import Check, Ledger

PROMPT_US = 2 * US_PER_S
"""Less than the 5 s after which brokers check long polls that nothing has woken."""


class DeliveredPromptly(Check):
    """A message acknowledged in a calm cluster reaches every group within 2 s."""

    name = "calm deliveries are prompt"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._is_calm = False
        self._sent: dict[str, Acknowledged] = {}
        self._first_us: dict[tuple[str, str], int] = {}

    @property
    def waiting(self) -> int:
        """How many deliveries are due."""
        return sum(
            (group.name, key) not in self._first_us
            for key, sent in self._sent.items()
            for group in self._ledger.plan.groups
            if sent.queue.topic in group.topics
        )

    @on(Calm)
    def _calm(self, _: Calm) -> None:
        self._is_calm = True

    @on(Acknowledged)
    def _acknowledged(self, event: Acknowledged) -> None:
        if self._is_calm:
            self._sent[event.key] = event

    @on(ConsumeBegan)
    def _began(self, event: ConsumeBegan) -> None:
        if self._is_calm:
            self._first_us.setdefault((event.group, event.key), event.at_us)

    @on(Ended)
    def _at_end(self, event: Ended) -> Iterator[str]:
        for key, sent in self._sent.items():
            for group in self._ledger.plan.groups:
                if sent.queue.topic not in group.topics:
                    continue
                got_us = self._first_us.get((group.name, key), event.at_us)
                if got_us - sent.at_us > PROMPT_US:
                    after_s = (got_us - sent.at_us) / US_PER_S
                    yield f"{group.name} got {key} of {sent.queue} after {after_s:.3f} s"
