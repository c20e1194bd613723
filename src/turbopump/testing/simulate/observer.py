"""Observes what brokers hold, at every instant of virtual time at which anything has changed."""

from __future__ import annotations

from dataclasses import dataclass, field

from turbopump.broker.broker import Broker
from turbopump.message import MessageQueue
from turbopump.testing.simulate.events import Assigned, BrokerUp, Committed, Readable, Reopened
from turbopump.testing.simulate.replica_observer import ReplicaObserver
from turbopump.testing.simulate.roles import is_ready
from turbopump.testing.simulate.store_contents import (
    Contents,
    Offsets,
    contents_of,
    differences,
    ends_of,
    new_messages,
    offsets_in,
)
from turbopump.testing.simulate.world import World


@dataclass(slots=True)
class _Seen:
    """What is known of a broker that runs."""

    broker: Broker
    end: int = -1
    changes: int = -1
    """Of the log and of the committed offsets, as they were last seen."""
    ends: dict[MessageQueue, int] = field(default_factory=dict)
    committed: Offsets = field(default_factory=dict)


class Observer:
    """Inspects brokers, and adds what is new to the history."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._seen: dict[str, _Seen] = {}
        self.replicas = ReplicaObserver(world)
        self._assigned: dict[str, tuple[MessageQueue, ...]] = {}
        self._terms: dict[str, int] = {}
        self._loaded: dict[str, tuple[Broker, Offsets]] = {}
        """By machine: what a broker had loaded when it began to serve, until its start is over."""

    def look(self) -> bool:
        """Inspect all brokers; called when everything else is done at an instant."""
        with self._world.reads_succeeding():
            self._look()
        return False

    def _look(self) -> None:
        world = self._world
        if world.promotes:
            world.follow_roles()
        if world.stopped:
            self._note_last_commits()
        if world.starting:
            self._note_loaded()
        masters, doomed = world.roles.masters, world.doomed
        for name, broker in world.masters_seen.items():
            if doomed and masters[name] in doomed:
                continue
            seen = self._seen.get(name)
            if seen is None or seen.broker is not broker:
                self._note_start(name, masters[name], broker)
                continue
            end, changes = broker.store.readable_end, broker.state.offsets.saving.changes
            if end != seen.end or changes != seen.changes:
                seen.end, seen.changes = end, changes
                self._note_messages(name, seen)
                self._note_commits(name, seen)
        if world.has_slaves:
            self.replicas.look()

    def note_assignments(self, group: str, member: str, queues: tuple[MessageQueue, ...]) -> None:
        """Record the queues of a member if they have changed."""
        if self._assigned.get(member, ()) != queues:
            self._assigned[member] = queues
            self._world.history.add(Assigned(self._world.now_us, group, member, queues))

    def _note_last_commits(self) -> None:
        """Record commits that brokers accepted while stopping, which they have saved too."""
        stopped, self._world.stopped = self._world.stopped, []
        for name, seen in self._seen.items():
            if seen.broker in stopped:
                self._note_commits(name, seen)

    def _note_loaded(self) -> None:
        """Record what brokers have loaded, before clients commit anything to them."""
        for machine, broker in self._world.starting.items():
            before, _ = self._loaded.get(machine, (None, None))
            if before is not broker and is_ready(broker):
                name = self._world.roles.name_of(machine)
                self._loaded[machine] = broker, _committed(broker, name)

    def _note_start(self, name: str, machine: str, broker: Broker) -> None:
        contents = contents_of(broker.store, name, self._world.damaged)
        committed = _committed(broker, name)
        loaded = self._loaded.pop(machine, (None, committed))
        if loaded[0] is broker:
            committed = loaded[1]
        self._seen[name] = seen = _Seen(broker, ends=ends_of(contents), committed=committed)
        terms = self._world.roles.terms[name]
        promoted = machine if terms != self._terms.get(name, 0) else ""
        self._terms[name] = terms
        self._compare_with_abandoned(machine, contents)
        now_us = self._world.now_us
        self._world.history.add(BrokerUp(now_us, name, contents, committed, promoted))
        self._note_commits(name, seen)

    def _compare_with_abandoned(self, name: str, contents: Contents) -> None:
        """Compare with what was there before a recovery was repeated; it may have grown since."""
        abandoned = self._world.abandoned.pop(name, None)
        if abandoned is None:
            return
        same = {
            queue: (begin, found[: len(abandoned[queue][1])])
            for queue, (begin, found) in contents.items()
            if queue in abandoned
        }
        differing = tuple(differences(abandoned, same))
        self._world.history.add(Reopened(self._world.now_us, name, differing))

    def _note_messages(self, name: str, seen: _Seen) -> None:
        for found in new_messages(seen.broker.store, name, seen.ends, self._world.damaged):
            self._world.history.add(Readable(self._world.now_us, *found))

    def _note_commits(self, name: str, seen: _Seen) -> None:
        now = _committed(seen.broker, name)
        if now == seen.committed:
            return
        for place, offset in now.items():
            before = seen.committed.get(place)
            if before != offset:
                group, queue = place
                self._world.history.add(Committed(self._world.now_us, group, queue, offset, before))
        seen.committed = now


def _committed(broker: Broker, name: str) -> Offsets:
    return offsets_in(broker.state.offsets.snapshot, name)
