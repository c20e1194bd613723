"""Replication of one broker: the HA port, its slaves, and on a slave the link to the master."""

from __future__ import annotations

import logging
from collections.abc import Callable

from turbopump.broker.live_config import LiveConfig
from turbopump.broker.registration import MasterAddress
from turbopump.broker.replication.master import SlaveConnection, Slaves
from turbopump.broker.replication.slave import Follower
from turbopump.broker.replication.status import ReplicationStatus
from turbopump.clock import Clock
from turbopump.errors import ListenFailed
from turbopump.net.network import Listener, Network
from turbopump.store.store import Store
from turbopump.supervisor import Supervisor

_log = logging.getLogger(__name__)


async def listen(
    network: Network, live: LiveConfig, make: Callable[[], SlaveConnection]
) -> Listener:
    """Listen at the HA port; raises ListenFailed only if the port was asked for."""
    identity, port = live.current.identity, live.current.replication.port
    if port or not identity.port:
        return await network.listen(identity.bind_host, port, make)
    try:
        return await network.listen(identity.bind_host, identity.port + 1, make)
    except ListenFailed as error:
        listener = await network.listen(identity.bind_host, 0, make)
        _log.warning(
            "HA port is %d, as the one after listenPort is taken: %s", listener.port, error
        )
        return listener


class Replication:
    """Both sides of replication; which one is active depends on the broker's role."""

    def __init__(
        self,
        store: Store,
        live: LiveConfig,
        network: Network,
        clock: Clock,
        work: Supervisor,
        on_stored: Callable[[], None],
    ) -> None:
        self._store = store
        self._live = live
        self._network = network
        self.ha_address = ""
        """The address for slaves, as reported to name servers."""
        self._listener: Listener | None = None
        self._work = work
        is_slave = live.current.identity.is_slave
        watch = work.watch("heartbeats to the master" if is_slave else "heartbeats to slaves")
        self.slaves = Slaves(store, live, clock, watch)
        self.follower = (
            Follower(store, live, network, clock, watch, on_stored) if is_slave else None
        )

    async def listen(self) -> int:
        """Open the HA port and return it; slaves are served from `start` on."""
        self._listener = await listen(self._network, self._live, self.slaves.connection)
        return self._listener.port

    def start(self) -> None:
        """Serve slaves, or follow the master, until the work is stopped."""
        if self.follower is not None:
            self._work.keep("replication", self.follower.run)
            return
        self.slaves.accepts = True

    def master_is_at(self, master: MasterAddress) -> None:
        """Note the master's address, as a name server reports it."""
        if self.follower is not None:
            self.follower.master_is_at(master.ha_address)

    async def close(self) -> None:
        """Close the HA port and the connections of slaves."""
        self.slaves.close()
        if self._listener is not None:
            await self._listener.close()

    @property
    def status(self) -> ReplicationStatus:
        return ReplicationStatus(
            ha_address=self.ha_address,
            end=self._store.readable_end,
            slaves=self.slaves.status,
            master=None if self.follower is None else self.follower.status,
        )
