"""Which seeds have transactions, how they end, and which faults their producers have.

Uses its own random numbers, so that everything else that a seed decides stays the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from random import Random

from turbopump.testing.simulate.fault_plan import (
    Fault,
    FaultKind,
    planned_fault,
    planned_peer_fault,
)

_TRANSACTIONS_SHARE = 0.35

_PRODUCER_FAULTS = (
    FaultKind.KILL_PRODUCER,
    FaultKind.ISOLATE,
    FaultKind.PARTITION,
    FaultKind.LOSE,
    FaultKind.RESET,
    FaultKind.FREEZE,
)
_CRASH_AT_CHANGE = (0, 0, 0, 0, 0, 0, 0, 1, 2, 3)
"""A commit is one change, its flush another, and the operation that follows it the next."""
_CRASHES = (FaultKind.KILL_BROKER, FaultKind.POWER_LOSS, FaultKind.CRASH_AT_CHANGE)


class Ending(Enum):
    """What a producer does after its half message is stored."""

    COMMITS = "commits"
    ROLLS_BACK = "rolls back"
    COMMITS_UNSAID = "commits and says nothing"
    ROLLS_BACK_UNSAID = "rolls back and says nothing"
    DIES_BEFORE = "dies before it commits"
    DIES_AFTER = "dies after it has committed"

    @property
    def commits(self) -> bool:
        """Whether the local transaction commits, if nothing else fails."""
        return self in (Ending.COMMITS, Ending.COMMITS_UNSAID, Ending.DIES_AFTER)

    @property
    def dies(self) -> bool:
        return self in (Ending.DIES_BEFORE, Ending.DIES_AFTER)


@dataclass(frozen=True, slots=True)
class Deed:
    """One transaction of a producer, after a pause."""

    pause_s: float
    key: str
    size: int
    work_s: float
    """How long the local transaction takes."""
    ending: Ending
    crash_at_change: int = 0
    """At which change on its disk after the end was sent the broker dies, if it does."""


@dataclass(frozen=True, slots=True)
class TransactionPlan:
    """The transactions of a run, and what they change."""

    transacting: Mapping[str, tuple[Deed, ...]] = field(default_factory=dict)
    """By producer; all are in one group, and answer for each other."""
    settings: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(deed.key for deeds in self.transacting.values() for deed in deeds)

    def described(self) -> list[str]:
        """Describe the transactions for users; empty if there are none."""
        return [
            f"{name}: " + ", ".join(f"{deed.key} {deed.ending.value}" for deed in deeds)
            for name, deeds in self.transacting.items()
        ]


def planned_transactions(
    seed: int, brokers: tuple[str, ...], load_s: float, *, is_calm: bool
) -> TransactionPlan:
    """Return the transactions that a seed decides on; in a calm run, no producer dies."""
    chance = Random(f"transactions of {seed}")  # noqa: S311 - the same in every run
    if chance.random() >= _TRANSACTIONS_SHARE:
        return TransactionPlan()
    transacting = {
        f"teller-{number}": _deeds(chance, f"t{number}", load_s, is_calm=is_calm)
        for number in range(chance.choice((1, 2)))
    }
    settings = {
        "transactionCheckInterval": chance.choice(("1000", "3000")),
        "transactionTimeOut": chance.choice(("500", "2000")),
        # With few, transactions are abandoned, and an operator has to resume them.
        "transactionCheckMax": chance.choice(("2", "15", "15")),
        # After a crash, a commit is found by its key; without the index it may be stored twice.
        "messageIndexEnable": "true",
    }
    if is_calm:
        return TransactionPlan(transacting, settings)
    return TransactionPlan(
        transacting, settings, _faults(chance, tuple(transacting), brokers, load_s)
    )


def _deeds(chance: Random, prefix: str, load_s: float, *, is_calm: bool) -> tuple[Deed, ...]:
    count = chance.randint(3, 10)
    endings = [ending for ending in Ending if not (is_calm and ending.dies)]
    return tuple(
        Deed(
            pause_s=chance.expovariate(count / load_s),
            key=f"{prefix}-{number}",
            size=chance.choice((20, 1500, 3000)),
            work_s=chance.choice((0.0, 0.0, 0.05, 1.5, 5.0)),
            ending=chance.choice((Ending.COMMITS, Ending.ROLLS_BACK, *endings)),
            crash_at_change=0 if is_calm else chance.choice(_CRASH_AT_CHANGE),
        )
        for number in range(count)
    )


def _faults(
    chance: Random, transacting: tuple[str, ...], brokers: tuple[str, ...], load_s: float
) -> tuple[Fault, ...]:
    found = []
    for _ in range(chance.choice((0, 1, 2, 3))):
        producer, broker = chance.choice(transacting), chance.choice(brokers)
        if chance.random() < 0.4:
            found.append(planned_fault(chance, chance.choice(_CRASHES), broker, "", load_s))
            continue
        kind = chance.choice(_PRODUCER_FAULTS)
        found.append(planned_peer_fault(chance, kind, producer, broker, load_s))
    return tuple(found)
