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
_LOSSES = (
    None,
    FaultKind.KILL_BROKER,
    FaultKind.POWER_LOSS,
    FaultKind.ISOLATE,
    FaultKind.RESTART_BROKER,
    FaultKind.FREEZE,
)
"""Why a slave is promoted; None is a switch-over."""


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
    faults, promotions = _faults(chance, slaves, load_s), _promotions(seed, brokers, load_s)
    return ReplicaPlan(
        slaves, is_sync_master, settings, recent_bytes, (*faults, *promotions), bool(promotions)
    )


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
