"""Which seeds have faults of one machine's clock, of name servers' disks, or of stored data.

Uses its own random numbers, so that everything else that a seed decides stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from turbopump.testing.simulate.fault_plan import (
    DISK_FAULTS,
    MACHINE_FAULTS,
    Fault,
    FaultKind,
    planned_fault,
)

_SHARE = 0.25
_DISK_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class MachinePlan:
    """Faults of machines, and what an operator stores on name servers meanwhile."""

    faults: tuple[Fault, ...] = ()
    values: tuple[tuple[float, str], ...] = ()
    """When a value is stored under which key."""


def planned_machine_faults(
    seed: int, nameservers: int, brokers: tuple[str, ...], load_s: float
) -> MachinePlan:
    """Return what a seed decides on, for a run that has faults at all."""
    chance = Random(f"machines of {seed}")  # noqa: S311 - the same in every run
    if chance.random() >= _SHARE:
        return MachinePlan()
    faults = []
    for _ in range(chance.choice((1, 2, 3))):
        kind = chance.choice(MACHINE_FAULTS)
        server = f"ns{chance.randrange(nameservers)}"
        target = chance.choice(brokers) if kind is FaultKind.ONE_CLOCK_JUMP else server
        faults.append(planned_fault(chance, kind, target, "", load_s))
    return MachinePlan(tuple(faults), _values(chance, load_s))


def _values(chance: Random, load_s: float) -> tuple[tuple[float, str], ...]:
    count = chance.randint(5, 20)
    times_s = sorted(chance.uniform(0, load_s) for _ in range(count))
    return tuple((at_s, f"value-{number}") for number, at_s in enumerate(times_s))


def planned_disk_faults(
    seed: int, nameservers: int, machines: tuple[str, ...], load_s: float
) -> MachinePlan:
    """Do the same for failing disks of name servers, failing reads, and flipped bits."""
    chance = Random(f"disks of {seed}")  # noqa: S311 - the same in every run
    if chance.random() >= _DISK_SHARE:
        return MachinePlan()
    kinds = chance.choice((DISK_FAULTS, (FaultKind.FAIL_READS,), (FaultKind.FLIP_BITS,)))
    targets = [f"ns{number}" for number in range(nameservers)] if kinds is DISK_FAULTS else machines
    faults = tuple(
        planned_fault(chance, chance.choice(kinds), chance.choice(targets), "", load_s)
        for _ in range(chance.choice((1, 2, 3)))
    )
    return MachinePlan(faults, _values(chance, load_s) if kinds is DISK_FAULTS else ())
