"""Observes what slaves hold, and compares their logs with those of their masters."""

from __future__ import annotations

from dataclasses import dataclass, field

from turbopump.broker.broker import Broker
from turbopump.broker.replication.copying import first_difference
from turbopump.broker.replication.master import Slaves
from turbopump.broker.replication.roles import RoleRecord
from turbopump.broker.replication.slave import MasterConnection
from turbopump.message import MessageQueue, PhysicalOffset
from turbopump.net.network import address_text
from turbopump.store.store import Store
from turbopump.testing.simulate.events import (
    Contested,
    LogsCompared,
    ReplicaHolds,
    Replicated,
    StaleWrite,
    Unexpected,
)
from turbopump.testing.simulate.replica_plan import Slave
from turbopump.testing.simulate.roles import is_ready
from turbopump.testing.simulate.store_contents import (
    contents_of,
    ends_of,
    keys_written,
    new_messages,
)
from turbopump.testing.simulate.world import World

_PIECE_BYTES = 1 << 20
_LATE_US = 2_000_000
"""How much longer than ``slaveTimeout`` a wait for a slave may seem to take."""


@dataclass(slots=True)
class _Seen:
    """What is known of a slave that runs."""

    slave: Slave
    broker: Broker
    cut_bytes: int
    """How much of its log it has truncated; and where it begins."""
    begin: PhysicalOffset
    end: PhysicalOffset
    ends: dict[MessageQueue, int] = field(default_factory=dict)
    master: Broker | None = None
    link: MasterConnection | None = None
    address: str = ""
    """The slave's end of the connection whose reports were last compared."""
    compared: PhysicalOffset = field(default=PhysicalOffset(0))


@dataclass(slots=True)
class _Stale:
    """What is known of a machine that considers itself a master, as it was last seen."""

    broker: Broker
    end: PhysicalOffset
    is_suspended: bool
    record: RoleRecord
    started_us: int
    knows_successor: bool
    """Whether it has recorded that it was replaced."""


class ReplicaObserver:
    """Inspects slaves, and adds what is new to the history."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._seen: dict[str, _Seen] = {}
        self._stale: dict[str, _Stale] = {}
        self._fenced: set[tuple[str, int]] = set()
        """Machines that were fenced, and the epochs that they were fenced with."""
        self._oldest_waits: dict[str, tuple[Slaves, int | None, int]] = {}
        """By master, the number of its oldest wait for slaves, and when it was first seen."""

    def look(self) -> None:
        """Inspect all running slaves."""
        for slave in self._world.slaves_seen:
            broker = self._world.brokers.get(slave.name)
            if broker is None or slave.name in self._world.doomed or not _is_readable(broker):
                continue
            self._look_at(slave, broker)
        self._note_last_copies()
        self._count_waits()
        if self._world.plan.replicas.promotes:
            self._look_for_stale_writes()
            self._look_for_two_masters()

    def _look_at(self, slave: Slave, broker: Broker) -> None:
        seen, cut_bytes = self._seen.get(slave.name), _cut_bytes(broker)
        is_start = seen is None or seen.broker is not broker
        begin = broker.store.min_offset
        if seen is None or is_start or (seen.cut_bytes, seen.begin) != (cut_bytes, begin):
            contents = contents_of(broker.store, slave.master, self._world.damaged)
            end, ends = broker.store.readable_end, ends_of(contents)
            seen = _Seen(slave, broker, cut_bytes, begin, end, ends)
            self._seen[slave.name] = seen
            # Its log may be truncated before it is promoted, if it ever is.
            self._world.abandoned.pop(slave.name, None)
            now_us, followed = self._world.now_us, "" if is_start else self._followed(broker)
            self._world.history.add(ReplicaHolds(now_us, slave.name, contents, is_start, followed))
        self._note_messages(seen)
        self._compare_reported(slave, seen)

    def _count_waits(self) -> None:
        """Report waits for slaves that have ended, with their sends or with a report."""
        for name, broker in self._world.masters_seen.items():
            waits, sends = broker.replication.slaves.waiting, len(broker.path.durability)
            if waits > sends:
                text = f"waits for slaves outlive their sends: {waits} for {sends} of {name}"
                self._world.history.add(Unexpected(self._world.now_us, text))
            if _is_overdue(broker.replication.slaves):
                text = f"sends wait for slaves of {name} that have reported them"
                self._world.history.add(Unexpected(self._world.now_us, text))
            if self._is_endless(name, broker.replication.slaves):
                text = f"waits for slaves of {name} do not end with slaveTimeout"
                self._world.history.add(Unexpected(self._world.now_us, text))

    def _is_endless(self, name: str, slaves: Slaves) -> bool:
        """Whether the oldest wait for slaves should have ended."""
        oldest = next(iter(slaves._waiting), None)  # noqa: SLF001 - no other code sees it
        before, now_us = self._oldest_waits.get(name), self._world.now_us
        if before is None or before[:2] != (slaves, oldest):
            self._oldest_waits[name] = (slaves, oldest, now_us)
            return False
        limit_us = slaves.config.timeout_ms * 1000 + _LATE_US
        return oldest is not None and now_us - before[2] > limit_us

    def _followed(self, slave: Broker) -> str:
        """Return the machine that a slave follows; empty if it knows none."""
        link = slave.replication.master_link
        host = "" if link is None else link.address.rpartition(":")[0]
        return self._world.machine_at(host) if host else ""

    def _note_last_copies(self) -> None:
        """Record what slaves have reported to their master just before they change their role."""
        for name, seen in self._seen.items():
            broker = self._world.brokers.get(name)
            is_closing = broker is seen.broker and not is_ready(broker)
            if is_closing and _is_readable(seen.broker):
                self._note_messages(seen)

    def _note_messages(self, seen: _Seen) -> None:
        store, slave = seen.broker.store, seen.slave
        if seen.end == store.readable_end:
            return
        seen.end = store.readable_end
        for found in new_messages(store, slave.master, seen.ends, self._world.damaged):
            self._world.history.add(Replicated(self._world.now_us, slave.name, *found))

    # --- bytes ------------------------------------------------------------------------------------

    def _compare_reported(self, slave: Slave, seen: _Seen) -> None:
        """Compare what the slave has reported over its connection, and was not compared yet."""
        master, link = self._world.masters_seen.get(slave.master), _master_connection(seen.broker)
        machine = self._world.roles.masters[slave.master]
        if master is None or machine in self._world.doomed or link is None:
            return
        if seen.master is not master or seen.link is not link:
            seen.master, seen.link, seen.compared = master, link, PhysicalOffset(0)
            seen.address = address_text(link._transport.get_extra_info("sockname"))  # noqa: SLF001 - to know whose reports a master has
        reported = _reported(master, seen.address)
        if reported <= seen.compared:
            return
        difference = _difference(master.store, seen.broker.store, seen.compared, reported)
        seen.compared = reported
        if difference:
            self._world.history.add(LogsCompared(self._world.now_us, slave.name, difference))

    def compare_all(self) -> None:
        """Compare whole logs, when nothing is sent any more."""
        for slave in self._world.slaves:
            master = self._world.masters[slave.master].store
            copy = self._world.broker(slave.name).store
            end = max(master.readable_end, copy.readable_end)
            text = _difference(master, copy, PhysicalOffset(0), end)
            self._world.history.add(LogsCompared(self._world.now_us, slave.name, text))

    # --- promotions -------------------------------------------------------------------------------

    def _look_for_two_masters(self) -> None:
        """Record masters that accept writes with the same epoch, and fencing without a majority."""
        accepting: dict[tuple[str, int], str] = {}
        for name, machine, broker in self._world.roles.masters_then:
            mastership = broker._mastership  # noqa: SLF001 - also while it accepts writes
            epoch = mastership.record.epoch
            if mastership.was_replaced:
                self._look_at_fencing(name, machine, epoch)
            elif broker.path.writer.suspension is None and epoch:
                other = accepting.setdefault((name, epoch), machine)
                if other != machine:
                    text = f"accepts writes with epoch {epoch}, as {other} does"
                    self._world.history.add(Contested(self._world.now_us, machine, text))

    def _look_at_fencing(self, name: str, machine: str, epoch: int) -> None:
        if (machine, epoch) in self._fenced:
            return
        self._fenced.add((machine, epoch))
        claims = self._world.claims(name)
        having = sum(claim is not None and claim.epoch >= epoch for claim in claims)
        if having <= len(claims) // 2:
            text = f"fenced with epoch {epoch}, which {having} of {len(claims)} name servers have"
            self._world.history.add(Contested(self._world.now_us, machine, text))

    # --- replaced masters -------------------------------------------------------------------------

    def _look_for_stale_writes(self) -> None:
        """Record writes of machines that consider themselves masters and are not."""
        for name, machine, broker in self._world.roles.masters_then:
            before, end = self._stale.get(machine), broker.store.written_end
            mastership = broker._mastership  # noqa: SLF001 - also while it accepts writes
            record, is_suspended = mastership.record, broker.path.writer.suspension is not None
            now_us = started_us = self._world.now_us
            if before is not None and before.broker is broker:
                if (before.end, before.is_suspended, before.record) == (end, is_suspended, record):
                    continue
                started_us = before.started_us
            seen = self._stale[machine] = _Stale(
                broker, end, is_suspended, record, started_us, mastership.was_replaced
            )
            if before is None or before.broker is not broker or machine in self._world.doomed:
                continue
            is_other = machine != self._world.roles.masters[name]
            if seen.end > before.end and (is_other or before.knows_successor):
                since_us = self._world.roles.since_us.get(name, now_us)
                must_know = _must_know(before, seen, since_us)
                keys = keys_written(broker.store, before.end, seen.end)
                self._world.history.add(StaleWrite(now_us, machine, must_know, keys))


def _must_know(before: _Stale, seen: _Stale, promoted_us: int) -> str:
    """Return why a machine that has written should have known; empty if it need not have.

    What it learns at the instant of its write, it may have learned after the write.
    """
    if before.knows_successor:
        return "it has heard that it was replaced"
    if before.is_suspended and seen.is_suspended:
        return "its writes are suspended"
    if seen.started_us > promoted_us:
        return "it has started since the promotion"
    return ""


def _cut_bytes(slave: Broker) -> int:
    follower = slave.replication.follower
    return 0 if follower is None else follower._cut_bytes  # noqa: SLF001 - without a whole status at every look


def _is_overdue(slaves: Slaves) -> bool:
    """Whether anything waits for what a slave has reported."""
    confirmed, waiting = slaves._confirmed, slaves._waiting  # noqa: SLF001 - no other code sees it
    return any(end <= confirmed and number in waiting for end, number in slaves._order)  # noqa: SLF001


def _is_readable(broker: Broker) -> bool:
    """Whether its store is open: not after a failed truncation, until that is retried."""
    return broker.store._open  # noqa: SLF001 - brokers have no need to know


def _master_connection(slave: Broker) -> MasterConnection | None:
    """Return the slave's connection; None if there is none, or logs are compared."""
    follower = slave.replication.follower
    link = None if follower is None else follower._connection  # noqa: SLF001 - to know whose reports a master has, also after a restart of the slave
    if link is None or link.copying.is_comparing or link.ended.done():
        return None
    return link


def _reported(master: Broker, address: str) -> PhysicalOffset:
    """Return how much of its master's log a slave has reported."""
    for slave in master.replication.slaves._connected:  # noqa: SLF001 - without a whole status at every look
        if slave.has_reported and slave.address == address:
            return slave.acknowledged
    return PhysicalOffset(0)


def _difference(master: Store, slave: Store, start: PhysicalOffset, end: PhysicalOffset) -> str:
    """Describe where two logs differ first between two positions; empty if they do not."""
    if slave.readable_end < end:
        return f"has reported {end}, but its log ends at {slave.readable_end}"
    position = max(start, master.min_offset, slave.min_offset)
    while position < end:
        one, other = (log.raw(position, _PIECE_BYTES) for log in (master, slave))
        if one is None or other is None:
            return f"the master's log ends at {position}, its own at {slave.readable_end}"
        size = min(len(one), len(other), end - position)
        if one[:size] != other[:size]:
            return f"differs at {position + first_difference(one[:size], other[:size])}"
        position = PhysicalOffset(position + size)
    return ""
