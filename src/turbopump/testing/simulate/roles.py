"""Which machine is the master of each broker name, across promotions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from turbopump.broker.broker import Broker
from turbopump.testing.simulate.plan import Plan
from turbopump.testing.simulate.replica_plan import Slave


def is_ready(broker: Broker) -> bool:
    """Whether a broker serves: not while it restarts in another role."""
    return broker._ready  # noqa: SLF001 - a broker in the midst of that has no parts to look at


class Roles:
    """Follows the roles of all machines; ``brokers`` are the running ones, by machine."""

    def __init__(self, plan: Plan, brokers: Mapping[str, Broker]) -> None:
        self._brokers = brokers
        self._machines = {name: plan.replicas.machines_of(name) for name in plan.brokers}
        self.masters = {name: name for name in plan.brokers}
        """By broker name: the machine that is its master, or was its last one."""
        self.terms: Counter[str] = Counter()
        """By broker name: how often another machine has become its master."""
        self.since_us: dict[str, int] = {}
        """By broker name: when that last happened."""
        self._epochs: Counter[str] = Counter()
        self._replaced: set[str] = set()
        """Broker names whose master has become a slave, and which have no other yet."""
        self._marks: list[object] = []
        # As they were at the last change that `update` has seen.
        self.serving_then: dict[str, Broker] = {}
        self.slaves_then: list[Slave] = []
        self.masters_then: list[tuple[str, str, Broker]] = []

    def name_of(self, machine: str) -> str:
        """Return the broker name of a machine."""
        return next(name for name, known in self._machines.items() if machine in known)

    def serving(self) -> dict[str, Broker]:
        """Return the masters that serve, by broker name."""
        return {
            name: self._brokers[machine]
            for name, machine in self.masters.items()
            if name not in self._replaced and self._is_master(machine)
        }

    def slaves(self) -> list[Slave]:
        """Return the machines that follow others now."""
        return [
            Slave(machine, name, broker.config.identity.broker_id)
            for name, machines in self._machines.items()
            for machine in machines
            if (broker := self._brokers.get(machine)) is not None
            if is_ready(broker) and broker.config.identity.is_slave
        ]

    def all_masters(self) -> list[tuple[str, str, Broker]]:
        """Return machines that consider themselves masters: name, machine, broker."""
        return [
            (name, machine, self._brokers[machine])
            for name, machines in self._machines.items()
            for machine in machines
            if self._is_master(machine)
        ]

    def has_master(self, name: str) -> bool:
        """Whether any machine is or becomes master."""
        return any(map(self._is_master, self._machines[name]))

    def are_settled(self) -> bool:
        """Whether each broker name has one master, and all other machines follow it."""
        slaves = {slave.name for slave in self.slaves()}
        return all(
            set(machines) - {self.masters[name]} <= slaves and name in self.serving()
            for name, machines in self._machines.items()
        )

    def update(self, now_us: int) -> None:
        """Record which machines have become master since the last call."""
        marks = [_mark(self._brokers.get(each)) for of in self._machines.values() for each in of]
        if marks == self._marks:
            return
        self._marks = marks
        self._follow(now_us)
        self.serving_then, self.slaves_then = self.serving(), self.slaves()
        self.masters_then = self.all_masters()

    def _follow(self, now_us: int) -> None:
        for name, machines in self._machines.items():
            before = self._brokers.get(self.masters[name])
            if before is not None and is_ready(before) and before.config.identity.is_slave:
                self._replaced.add(name)
            for machine in machines:
                if machine == self.masters[name] and name not in self._replaced:
                    continue
                if self._is_confirmed(machine) and self._epoch(machine) > self._epochs[name]:
                    self.masters[name], self._epochs[name] = machine, self._epoch(machine)
                    self.terms[name] += 1
                    self.since_us[name] = now_us
                    self._replaced.discard(name)

    def _is_master(self, machine: str) -> bool:
        broker = self._brokers.get(machine)
        return broker is not None and is_ready(broker) and not broker.config.identity.is_slave

    def _is_confirmed(self, machine: str) -> bool:
        return self._is_master(machine) and self._brokers[machine].path.writer.suspension is None

    def _epoch(self, machine: str) -> int:
        return self._brokers[machine].replica.roles.epoch


def _mark(broker: Broker | None) -> object:
    """Return what changes with the role of a machine."""
    if broker is None or not is_ready(broker):
        return None
    is_suspended = broker.path.writer.suspension is not None
    return broker, broker.config.identity, is_suspended, broker.replica.roles.epoch
