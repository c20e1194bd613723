"""A broker's work as a replica: copies of tables, claims, promotion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from turbopump.broker.config import BrokerConfig
from turbopump.broker.handlers.roles import RoleRequests
from turbopump.broker.message_path import MessagePath
from turbopump.broker.registration import Registration
from turbopump.broker.replication.mastership import Mastership
from turbopump.broker.replication.replication import Replication
from turbopump.broker.replication.role_changes import FENCE_MS, RoleChanges
from turbopump.broker.replication.slave import LinkState
from turbopump.broker.replication.table_copy import Copy, TableCopies, copied_tables
from turbopump.broker.state import State
from turbopump.clock import Clock
from turbopump.message import PhysicalOffset
from turbopump.net.pool import ConnectionPool
from turbopump.net.router import Handler
from turbopump.store.store import Store
from turbopump.supervisor import Supervisor

_SETTLE_MS = 500
_LAG_MS = 1000
"""How often a slave notes whether it has all of its master's log."""


@dataclass(eq=False, kw_only=True)
class Replica:
    """One broker among several with the same name; `run` once everything is built."""

    config: BrokerConfig
    state: State
    path: MessagePath
    store: Store
    registration: Registration
    mastership: Mastership
    replication: Replication
    pool: ConnectionPool
    address: str
    clock: Clock
    work: Supervisor
    on_role_change: Callable[[], None]

    def __post_init__(self) -> None:
        self._in_sync_ms = self.clock.monotonic_ms()
        self._master_epoch = self.mastership.record.epoch
        if self.replication.follower is not None:
            # A replaced master knows that its successor's log is the valid one.
            self.replication.follower.may_drop_all = self.mastership.was_replaced
        self.store.kept_from = self._kept_from
        slaves = self.replication.slaves
        self.mastership.is_followed = lambda: bool(slaves.following)
        slaves.on_following = self.mastership.note_following
        self.copies = TableCopies(
            copied_tables(
                self.state, self.path.delays, self.store, self.mastership.note_master_begin
            ),
            self.pool.request,
            lambda: self.store.written_end,
            self.config.identity.broker_id,
            self._note_answer,
        )
        if self.replication.follower is not None:
            # They refer to the log: the master's tables count again once it has been copied again.
            self.replication.follower.on_cut = self.copies.versions.clear
        self.roles = RoleChanges(
            mastership=self.mastership,
            writes=self.path.writer,
            store=self.store,
            settle=partial(self.path.durability.settle, _SETTLE_MS),
            address=self.address,
            broker_id=self.config.identity.broker_id,
            master_address=lambda: self.copies.master,
            is_followed=slaves.is_copied,
            ask=self.pool.request,
            on_confirmed=lambda: self.registration.start(self.work),
            restart=self.on_role_change,
        )

    def described(self) -> dict[str, str]:
        """Return what operators see, as part of the broker's runtime information."""
        link = self.replication.master_link
        found = {
            "brokerRole": self.config.identity.role.value,
            "brokerEpoch": str(self.roles.epoch),
            "replicationSlaveIds": self.mastership.slave_ids,
        }
        if link is None:
            slaves = self.replication.slaves.following
            count, in_sync = len(slaves), sum(each.is_in_sync for each in slaves)
            text = f"{in_sync} of {count} slaves in sync" if count else "no slaves"
            return {**found, "replicationLink": text}
        self._note_in_sync()
        return {
            **found,
            "replicationLink": link.state.value,
            "replicationMaster": link.address,
            "replicationMasterRole": self.mastership.record.master_role,
            "replicationLagMillis": str(self.clock.monotonic_ms() - self._in_sync_ms),
            "replicationError": link.last_error,
            "replicationCutBytes": str(link.cut_bytes),
        }

    def _note_answer(self, copy: Copy) -> None:
        epoch, follower = copy.about.broker_epoch, self.replication.follower
        self.mastership.note_epoch(epoch)
        self.mastership.note_slave_ids(copy.about.slave_ids or "")
        self.mastership.note_master_role(copy.about.broker_role or "")
        if follower is not None:
            follower.master_ends_at(PhysicalOffset(copy.about.log_end))
            if epoch > self._master_epoch:
                follower.master_was_promoted()
        self._master_epoch = max(epoch, self._master_epoch)

    def _kept_from(self) -> PhysicalOffset | None:
        """Return where the log begins that a slave keeps, as its master has it; all if unknown."""
        live = self.replication.live.current
        if not live.identity.is_slave or live.replication.deletes_on_its_own:
            return None
        return PhysicalOffset(self.mastership.record.master_begin or 0)

    def _note_in_sync(self) -> None:
        link = self.replication.master_link
        if link is not None and link.state is LinkState.IN_SYNC:
            self._in_sync_ms = self.clock.monotonic_ms()

    def handlers(self) -> dict[int, Handler]:
        return RoleRequests(self.roles).handlers()

    def run(self) -> None:
        """Follow the master, or confirm being the master."""
        self.registration.listen_to_master(self.replication.master_is_at)
        self.replication.start()
        if self.config.identity.is_slave:
            self.copies.follow(self.config.replication.master_broker_address)
            follow = self.copies.follow
            self.registration.listen_to_master(lambda master: follow(master.address))
            self.copies.start(self.work)
            self.work.every("replication lag", _LAG_MS, self._note_in_sync)
        else:
            self.work.every("mastership", self.roles.check_interval_ms, self.roles.check)
            self.work.every("fencing", FENCE_MS, self.roles.fence_predecessor)
