"""Which seeds have slaves, and what goes wrong with them.

Uses its own random numbers, so that everything else that a seed decides stays the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random

from turbopump.testing.simulate.fault_plan import (
    DISK_FAULTS,
    Fault,
    FaultKind,
    planned_fault,
    planned_peer_fault,
)

_REPLICATED_SHARE = 0.25

_CRASHES = (
    FaultKind.KILL_BROKER,
    FaultKind.POWER_LOSS,
    FaultKind.RESTART_BROKER,
    FaultKind.CRASH_AT_CHANGE,
)
_LINKS = (FaultKind.PARTITION, FaultKind.LOSE, FaultKind.RESET, FaultKind.FREEZE, FaultKind.ISOLATE)
_AWAY_S = (1.0, 15.0, 40.0)
"""How long a master is down: consumers move to the slave after a few seconds."""

_PROMOTED_SHARE = 0.4
"""The share of the runs with slaves and faults."""
_CONTESTED_SHARE = 0.5
"""The share of the runs with promotions."""
_LOSSES = (
    None,
    FaultKind.KILL_BROKER,
    FaultKind.POWER_LOSS,
    FaultKind.ISOLATE,
    FaultKind.RESTART_BROKER,
    FaultKind.FREEZE,
)
"""Why a slave is promoted; None is a switch-over."""


_ODD_SHARE = 0.35
"""The share of the runs with slaves and faults."""
_ODD_S = {
    # Retention begins a minute after the start of a broker.
    FaultKind.CROWDED_SLAVE: (75.0, 100.0),
    FaultKind.MUTE_SLAVE: (1.0, 8.0, 40.0),
    FaultKind.LYING_SLAVE: (1.0, 8.0, 40.0),
}
_LATE_SHARE = 0.3
"""The share of the runs with slaves."""


@dataclass(frozen=True, slots=True)
class Slave:
    """One slave."""

    name: str
    master: str
    broker_id: int


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """The slaves of a run, and what they change."""

    slaves: tuple[Slave, ...] = ()
    is_sync_master: bool = False
    """Whether an acknowledgement guarantees that a slave has the message."""
    settings: Mapping[str, str] = field(default_factory=dict)
    recent_bytes: int | None = None
    """Consumers that read messages further from the end of the log are redirected to a slave; with
    None, only those that are far behind, which is the default."""
    faults: tuple[Fault, ...] = ()
    promotes: bool = False
    """Whether slaves are promoted."""
    nameservers: int | None = None
    """How many name servers there are; with None, as many as without slaves."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(slave.name for slave in self.slaves)

    def of(self, master: str) -> list[Slave]:
        """Return the slaves of a master."""
        return [slave for slave in self.slaves if slave.master == master]

    def machines_of(self, broker: str) -> list[str]:
        """Return the machines that may be master of a broker name."""
        return [broker, *(slave.name for slave in self.of(broker))]

    def described(self) -> list[str]:
        """Describe the slaves for users; empty if there are none."""
        if not self.slaves:
            return []
        settings = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        return [f"slaves: {', '.join(self.names)} ({settings})"]


def planned_replicas(
    seed: int, brokers: tuple[str, ...], load_s: float, *, is_calm: bool
) -> ReplicaPlan:
    """Return the slaves that a seed decides on; a calm run has no faults of theirs either."""
    chance = Random(f"replicas of {seed}")  # noqa: S311 - the same in every run
    if chance.random() >= _REPLICATED_SHARE:
        return ReplicaPlan()
    count = chance.choice((1, 1, 1, 2))
    slaves = tuple(
        Slave(f"{master}-{number}", master, number)
        for master in brokers
        for number in range(1, count + 1)
    )
    is_sync_master = chance.random() < 0.6
    settings = {
        "brokerRole": "SYNC_MASTER" if is_sync_master else "ASYNC_MASTER",
        "slaveReadEnable": chance.choice(("true", "false")),
        "haTransferBatchSize": chance.choice(("1024", "32768")),
        "maxHaTransferByteInSecond": chance.choice(("0", "0", "20000")),
        "slaveTimeout": chance.choice(("500", "3000")),
        # The later a master flushes, the more messages slaves have that it loses in a power loss.
        "flushIntervalCommitLog": chance.choice(("500", "5000")),
    }
    recent_bytes = chance.choice((1, 5000, None))
    if is_calm:
        return ReplicaPlan(slaves, is_sync_master, settings, recent_bytes)
    promotions, odd = _promotions(seed, brokers, load_s), _odd_slaves(seed, brokers, slaves, load_s)
    faults = (*_faults(chance, slaves, load_s), *promotions, *odd)
    made = ReplicaPlan(slaves, is_sync_master, settings, recent_bytes, faults, bool(promotions))
    is_odd = any(fault.kind is not FaultKind.LATE_NOTICES for fault in odd)
    return _contested(seed, brokers, load_s, made) if made.promotes and not is_odd else made


def _contested(
    seed: int, brokers: tuple[str, ...], load_s: float, plan: ReplicaPlan
) -> ReplicaPlan:
    """Add a second operator, a second slave, and name servers that refuse writes meanwhile.

    In the runs that the seed decides on, with their own random numbers.
    """
    chance = Random(f"contested promotions of {seed}")  # noqa: S311 - the same in every run
    if chance.random() >= _CONTESTED_SHARE:
        return plan
    nameservers = chance.choice((1, 3, 3))
    found = []
    for _ in range(chance.choice((1, 2))):
        kind = chance.choice((FaultKind.PROMOTE, FaultKind.PROMOTE_TWO, FaultKind.PROMOTE_TWO))
        promotion = planned_fault(chance, kind, chance.choice(brokers), "", load_s)
        found.append(promotion)
        servers = [f"ns{number}" for number in range(nameservers)]
        for server in chance.sample(servers, chance.randint(0, nameservers)):
            kind = chance.choice((FaultKind.FULL_DISK, FaultKind.FAIL_WRITES, FaultKind.STALL_DISK))
            refusal = planned_fault(chance, kind, server, "", load_s)
            at_s = promotion.at_s - chance.choice((0.0, 0.01, 0.1, 2.0))
            found.append(replace(refusal, at_s=max(0.0, at_s)))
    slaves = tuple(
        Slave(f"{master}-{number}", master, number) for master in brokers for number in (1, 2)
    )
    return replace(plan, slaves=slaves, faults=(*plan.faults, *found), nameservers=nameservers)


def _odd_slaves(
    seed: int, brokers: tuple[str, ...], slaves: tuple[Slave, ...], load_s: float
) -> tuple[Fault, ...]:
    """Choose slaves without room for the log, and peers that follow without storing anything.

    Uses its own random numbers: runs without them stay the same.
    """
    chance = Random(f"odd slaves of {seed}")  # noqa: S311 - the same in every run
    found = []
    if chance.random() < _LATE_SHARE:
        kind = FaultKind.LATE_NOTICES
        found.append(replace(planned_fault(chance, kind, "", "", load_s, (load_s,)), at_s=0))
    if chance.random() >= _ODD_SHARE:
        return tuple(found)
    for _ in range(chance.choice((1, 1, 2))):
        kind = chance.choice(tuple(_ODD_S))
        is_own = kind is FaultKind.CROWDED_SLAVE
        target = chance.choice(slaves).name if is_own else chance.choice(brokers)
        fault = planned_fault(chance, kind, target, "", load_s, _ODD_S[kind])
        found.append(fault)
        if not is_own:
            # While its own slaves are there, nothing depends on the other one.
            away = [slave.name for slave in slaves if slave.master == target]
            found += [replace(fault, kind=FaultKind.KILL_BROKER, target=name) for name in away]
    return tuple(found)


def _promotions(seed: int, brokers: tuple[str, ...], load_s: float) -> tuple[Fault, ...]:
    """Choose promotions, each after a fault of the machine that is configured as master.

    Uses its own random numbers: runs without promotions stay the same.
    """
    chance = Random(f"promotions of {seed}")  # noqa: S311 - the same in every run
    if chance.random() >= _PROMOTED_SHARE:
        return ()
    found = []
    for _ in range(chance.choice((1, 1, 2, 3))):
        broker, loss = chance.choice(brokers), chance.choice(_LOSSES)
        promotion = planned_fault(chance, FaultKind.PROMOTE, broker, "", load_s)
        if loss is not None:
            fault = planned_fault(chance, loss, broker, "", load_s, _AWAY_S)
            found.append(fault)
            at_s = fault.at_s + chance.choice((0.0, 0.05, 1.0, 5.0, 12.0))
            promotion = replace(promotion, at_s=at_s)
        found.append(promotion)
    return tuple(found)


def _faults(chance: Random, slaves: tuple[Slave, ...], load_s: float) -> tuple[Fault, ...]:
    """Choose faults of a few kinds, on both sides."""
    themes = (
        [*_CRASHES],
        [*_LINKS],
        [*DISK_FAULTS],
        [FaultKind.POWER_LOSS, FaultKind.NEW_DISK],
        [*_CRASHES, *_LINKS, *DISK_FAULTS, FaultKind.NEW_DISK],
    )
    theme = chance.choice(themes)
    found = []
    for _ in range(chance.randint(1, 5)):
        slave = chance.choice(slaves)
        if chance.random() < 0.3:
            kind = chance.choice((FaultKind.KILL_BROKER, FaultKind.POWER_LOSS))
            found.append(planned_fault(chance, kind, slave.master, "", load_s, _AWAY_S))
            continue
        kind = chance.choice(theme)
        found.append(planned_peer_fault(chance, kind, slave.name, slave.master, load_s))
    return tuple(found)
