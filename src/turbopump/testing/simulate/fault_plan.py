"""Which faults a seed chooses: few kinds in each run, several times, as in swarm testing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from random import Random


class FaultKind(Enum):
    """What goes wrong."""

    # Network
    RESET = "reset connections of"
    ISOLATE = "isolate"
    PARTITION = "partition"
    LOSE = "lose bytes from"
    SLOW_NETWORK = "slow network"
    REFUSE = "refuse connections to"
    FREEZE = "freeze input of"
    # Processes
    KILL_BROKER = "kill"
    POWER_LOSS = "power loss of"
    RESTART_BROKER = "restart"
    KILL_NAMESERVER = "kill name server"
    NAMESERVER_POWER_LOSS = "power loss of name server"
    CRASH_NAMESERVER_AT_CHANGE = "crash at a change on the disk of name server"
    KILL_MEMBER = "kill member of"
    LEAVE = "leave of a member of"
    JOIN = "join of a member of"
    KILL_PRODUCER = "kill producer"
    CRASH_AT_CHANGE = "crash at a change on the disk of"
    NEW_DISK = "new disk of"
    PROMOTE = "promotion of a slave of"
    PROMOTE_TWO = "promotions at once of slaves of"
    CROWDED_SLAVE = "no room for the log of slave"
    MUTE_SLAVE = "slave that stores nothing of"
    LYING_SLAVE = "slave that reports what it does not store of"
    LATE_NOTICES = "late notices of flushes"
    # Disks
    SLOW_DISK = "slow disk of"
    STALL_DISK = "stalled disk of"
    FAIL_SYNCS = "failing syncs of"
    FAIL_WRITES = "failing writes of"
    FULL_DISK = "full disk of"
    FLAKY_DISK = "flaky disk of"
    FAIL_READS = "failing reads of"
    FLIP_BITS = "flipped bits of"
    BROKEN_WORK = "failing background work of"
    # Clocks
    CLOCK_JUMP = "clock jump"
    ONE_CLOCK_JUMP = "clock jump of"


BROKER_FAULTS = (
    FaultKind.KILL_BROKER,
    FaultKind.POWER_LOSS,
    FaultKind.RESTART_BROKER,
    FaultKind.CRASH_AT_CHANGE,
    FaultKind.REFUSE,
)
GROUP_FAULTS = (FaultKind.KILL_MEMBER, FaultKind.LEAVE, FaultKind.JOIN)
DISK_FAULTS = (
    FaultKind.SLOW_DISK,
    FaultKind.STALL_DISK,
    FaultKind.FAIL_SYNCS,
    FaultKind.FAIL_WRITES,
    FaultKind.FULL_DISK,
    FaultKind.FLAKY_DISK,
)
WORK_FAULTS = (FaultKind.BROKEN_WORK,)
HOST_FAULTS = (FaultKind.RESET, FaultKind.ISOLATE, FaultKind.FREEZE)
LINK_FAULTS = (FaultKind.PARTITION, FaultKind.LOSE)
SLAVE_FAULTS = (
    FaultKind.NEW_DISK,
    FaultKind.PROMOTE,
    FaultKind.PROMOTE_TWO,
    FaultKind.CROWDED_SLAVE,
    FaultKind.MUTE_SLAVE,
    FaultKind.LYING_SLAVE,
    FaultKind.LATE_NOTICES,
)
"""Only for slaves: a master without its disk has lost its messages."""
MACHINE_FAULTS = (
    FaultKind.ONE_CLOCK_JUMP,
    FaultKind.NAMESERVER_POWER_LOSS,
    FaultKind.CRASH_NAMESERVER_AT_CHANGE,
)
READ_FAULTS = (FaultKind.FAIL_READS, FaultKind.FLIP_BITS)
"""Decided separately from the others, see `machine_plan`."""

_SLAVE_AMOUNTS = {
    FaultKind.CROWDED_SLAVE: (0.87, 0.97),
    FaultKind.LATE_NOTICES: (5.0, 20.0, 200.0),
}

_CALM_SHARE = 0.08
"""The share of runs without any fault: there, nothing may be late or delivered twice."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, when and for how long."""

    at_s: float
    kind: FaultKind
    target: str = ""
    """A broker, group or producer by name, a name server by number, or any process."""
    other: str = ""
    """The other end of a link."""
    duration_s: float = 0.0
    amount: float = 0.0
    """A parameter of the kind: milliseconds, hours, an error number."""
    turns: int = 0
    """How many loop iterations after its time, to hit any await."""

    def __str__(self) -> str:
        target = f"{self.target} and {self.other}" if self.other else self.target
        text = f"{self.kind.value} {target}".strip()
        return f"{text} at {self.at_s:.3f} s for {self.duration_s:.3f} s ({self.amount:g})"


def planned_faults(
    chance: Random,
    brokers: tuple[str, ...],
    nameservers: int,
    groups: Mapping[str, int],
    producers: tuple[str, ...],
    load_s: float,
) -> tuple[Fault, ...]:
    """Choose the faults of a run, in the order of their times."""
    if chance.random() < _CALM_SHARE:
        return ()
    kinds = _kinds(chance)
    targets = _Targets(brokers, nameservers, tuple(groups), producers)
    count = chance.randint(1, 8)
    faults = [_fault(chance, chance.choice(kinds), targets, load_s) for _ in range(count)]
    return in_order(faults)


def in_order(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """Return faults in the order of their times."""
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _kinds(chance: Random) -> list[FaultKind]:
    """Choose the kinds of a run: any, or those that go together."""
    apart = (*SLAVE_FAULTS, *MACHINE_FAULTS, *READ_FAULTS)
    any_kind = [kind for kind in FaultKind if kind not in apart]
    themes = (
        any_kind,
        any_kind,
        [FaultKind.POWER_LOSS, FaultKind.CRASH_AT_CHANGE, FaultKind.SLOW_DISK],
        [FaultKind.POWER_LOSS],
        [*BROKER_FAULTS, *DISK_FAULTS],
        [*GROUP_FAULTS, *HOST_FAULTS, FaultKind.KILL_BROKER, FaultKind.RESTART_BROKER],
    )
    theme = chance.choice(themes)
    return chance.sample(theme, k=min(chance.randint(1, 5), len(theme)))


@dataclass(frozen=True, slots=True)
class _Targets:
    brokers: tuple[str, ...]
    nameservers: int
    groups: tuple[str, ...]
    producers: tuple[str, ...]

    def of(self, chance: Random, kind: FaultKind) -> tuple[str, str]:
        """Choose what a fault hits, and the other end of a link."""
        broker = chance.choice(self.brokers)
        if kind in BROKER_FAULTS or kind in DISK_FAULTS:
            return broker, ""
        if kind in WORK_FAULTS:
            return chance.choice((broker, *self.groups)), ""
        if kind in GROUP_FAULTS:
            return chance.choice(self.groups), ""
        if kind is FaultKind.KILL_PRODUCER:
            return chance.choice(self.producers), ""
        if kind is FaultKind.KILL_NAMESERVER:
            return f"ns{chance.randrange(self.nameservers)}", ""
        others = [*self.groups, *self.producers, f"ns{chance.randrange(self.nameservers)}"]
        if kind in LINK_FAULTS:
            pair = (chance.choice(others), broker)
            return pair if chance.random() < 0.5 else (pair[1], pair[0])
        if kind in HOST_FAULTS:
            return chance.choice((*others, broker)), ""
        return "", ""


def _fault(chance: Random, kind: FaultKind, targets: _Targets, load_s: float) -> Fault:
    target, other = targets.of(chance, kind)
    return planned_fault(chance, kind, target, other, load_s)


def planned_fault(
    chance: Random,
    kind: FaultKind,
    target: str,
    other: str,
    load_s: float,
    durations_s: tuple[float, ...] = (),
) -> Fault:
    """Choose when a fault happens, and how long it lasts: one of the durations, if given."""
    return Fault(
        at_s=chance.uniform(0.5, load_s),
        kind=kind,
        target=target,
        other=other,
        duration_s=chance.choice(durations_s) if durations_s else _duration_s(chance, kind),
        amount=_amount(chance, kind),
        turns=chance.choice((0, 0, 1, 2, 3, 5, 8)),
    )


def planned_peer_fault(
    chance: Random, kind: FaultKind, peer: str, broker: str, load_s: float
) -> Fault:
    """Choose a fault of a broker's peer, or of either direction of the link between them."""
    ends = [peer, broker if kind in LINK_FAULTS else ""]
    if ends[1] and chance.random() < 0.5:
        ends.reverse()
    return planned_fault(chance, kind, ends[0], ends[1], load_s)


def _duration_s(chance: Random, kind: FaultKind) -> float:
    if kind in (FaultKind.ISOLATE, FaultKind.PARTITION, FaultKind.FREEZE):
        return chance.choice((0.05, 0.5, 2.0, 5.0, 20.0, 40.0, 75.0))
    if kind in (*DISK_FAULTS, FaultKind.FAIL_READS, FaultKind.SLOW_NETWORK):
        return chance.choice((0.2, 1.0, 4.0, 12.0))
    return chance.choice((0.01, 0.3, 1.0, 3.0, 8.0, 20.0))


def _amount(chance: Random, kind: FaultKind) -> float:
    if kind in _SLAVE_AMOUNTS:
        return chance.choice(_SLAVE_AMOUNTS[kind])
    match kind:
        case FaultKind.SLOW_NETWORK:
            return chance.choice((20, 200, 1500))
        case FaultKind.SLOW_DISK:
            return chance.choice((5, 50, 400, 2500))
        case FaultKind.BROKEN_WORK:
            return chance.randrange(3)
        case FaultKind.FLAKY_DISK:
            return chance.choice((0.02, 0.2))
        case FaultKind.FAIL_READS:
            return chance.choice((0.1, 0.5, 1.0))
        case FaultKind.FLIP_BITS:
            return chance.choice((1, 1, 2, 5))
        case FaultKind.CRASH_AT_CHANGE | FaultKind.CRASH_NAMESERVER_AT_CHANGE:
            return chance.randint(1, 30)
        case FaultKind.CLOCK_JUMP | FaultKind.ONE_CLOCK_JUMP:
            return chance.choice((-3600, -60, -1, 1, 60, 3600))
        case _:
            return 0.0
