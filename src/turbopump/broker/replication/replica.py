"""A broker's work as a replica: copies of tables, claims, promotion."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from turbopump.broker.config import BrokerConfig
from turbopump.broker.handlers.roles import RoleRequests
from turbopump.broker.message_path import MessagePath
from turbopump.broker.registration import Registration
from turbopump.broker.replication.mastership import Mastership
from turbopump.broker.replication.replication import Replication
from turbopump.broker.replication.role_changes import FENCE_MS, RoleChanges
from turbopump.broker.replication.status import LinkState
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


class Replica:
    """One broker among several with the same name; `run` once everything is built."""

    def __init__(
        self,
        *,
        config: BrokerConfig,
        state: State,
        path: MessagePath,
        store: Store,
        registration: Registration,
        mastership: Mastership,
        replication: Replication,
        pool: ConnectionPool,
        address: str,
        clock: Clock,
        work: Supervisor,
        on_role_change: Callable[[], None],
    ) -> None:
        self._config = config
        self._registration = registration
        self._mastership = mastership
        self._replication = replication
        self._clock = clock
        self._in_sync_ms = clock.monotonic_ms()
        self._master_epoch = mastership.record.epoch
        if replication.follower is not None:
            # A replaced master knows that its successor's log is the valid one.
            replication.follower.may_drop_all = mastership.was_replaced
        self._work = work
        self.copies = TableCopies(
            copied_tables(state, path.delays, store),
            pool.request,
            lambda: store.written_end,
            config.identity.broker_id,
            self._note_answer,
        )
        self.roles = RoleChanges(
            mastership=mastership,
            writes=path.writer,
            store=store,
            settle=partial(path.durability.settle, _SETTLE_MS),
            address=address,
            broker_id=config.identity.broker_id,
            master_address=lambda: self.copies.master,
            is_followed=self._is_followed,
            ask=pool.request,
            on_confirmed=lambda: registration.start(work),
            restart=on_role_change,
        )

    def described(self) -> dict[str, str]:
        """Return what operators see, as part of the broker's runtime information."""
        status = self._replication.status
        found = {
            "brokerRole": self._config.identity.role.value,
            "brokerEpoch": str(self.roles.epoch),
            "replicationSlaveIds": self._mastership.slave_ids,
        }
        if status.master is None:
            count, in_sync = len(status.slaves), sum(each.is_in_sync for each in status.slaves)
            text = f"{in_sync} of {count} slaves in sync" if count else "no slaves"
            return {**found, "replicationLink": text}
        self._note_in_sync()
        return {
            **found,
            "replicationLink": status.master.state.value,
            "replicationMaster": status.master.address,
            "replicationLagMillis": str(self._clock.monotonic_ms() - self._in_sync_ms),
            "replicationError": status.master.last_error,
            "replicationCutBytes": str(status.master.cut_bytes),
        }

    def _note_answer(self, copy: Copy) -> None:
        epoch, follower = copy.about.broker_epoch, self._replication.follower
        self._mastership.note_epoch(epoch)
        self._mastership.note_slave_ids(copy.about.slave_ids or "")
        if follower is not None:
            follower.master_ends_at(PhysicalOffset(copy.about.log_end))
            if epoch > self._master_epoch:
                follower.master_was_promoted()
        self._master_epoch = max(epoch, self._master_epoch)

    def _note_in_sync(self) -> None:
        link = self._replication.status.master
        if link is not None and link.state is LinkState.IN_SYNC:
            self._in_sync_ms = self._clock.monotonic_ms()

    def handlers(self) -> dict[int, Handler]:
        return RoleRequests(self.roles).handlers()

    def run(self) -> None:
        """Follow the master, or confirm being the master."""
        self._registration.listen_to_master(self._replication.master_is_at)
        self._replication.start()
        if self._config.identity.is_slave:
            self.copies.follow(self._config.replication.master_broker_address)
            follow = self.copies.follow
            self._registration.listen_to_master(lambda master: follow(master.address))
            self.copies.start(self._work)
            self._work.every("replication lag", _LAG_MS, self._note_in_sync)
        else:
            self._work.every("mastership", self.roles.check_interval_ms, self.roles.check)
            self._work.every("fencing", FENCE_MS, self.roles.fence_predecessor)

    def _is_followed(self) -> bool:
        """Whether a slave has the whole log, or none follows."""
        status = self._replication.status
        slaves = status.slaves
        return not slaves or any(slave.acknowledged >= status.end for slave in slaves)
