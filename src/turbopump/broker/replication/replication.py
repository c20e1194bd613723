"""Replication of one broker: the HA port, its slaves, and on a slave the link to the master."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from turbopump.broker.live_config import LiveConfig
from turbopump.broker.registration import MasterAddress
from turbopump.broker.replication.master import SlaveConnection, Slaves
from turbopump.broker.replication.slave import Follower, MasterLink
from turbopump.clock import Clock
from turbopump.errors import ListenFailed
from turbopump.net.network import Listener, Network
from turbopump.store.store import Store
from turbopump.supervisor import Supervisor

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Replication:
    """Both sides of replication; which one is active depends on the broker's role."""

    store: Store
    live: LiveConfig
    network: Network
    clock: Clock
    work: Supervisor
    on_stored: Callable[[], None]

    def __post_init__(self) -> None:
        self.ha_address = ""
        """The address for slaves, as reported to name servers."""
        self._listener: Listener | None = None
        store, live, clock = self.store, self.live, self.clock
        is_slave = live.current.identity.is_slave
        watch = self.work.watch("heartbeats to the master" if is_slave else "heartbeats to slaves")
        self.slaves = Slaves(store, live, clock, watch)
        self.follower = (
            Follower(store, live, self.network, clock, watch, self.on_stored) if is_slave else None
        )

    async def listen(self) -> int:
        """Open the HA port and return it; slaves are served from `start` on.

        Raises ListenFailed only if the port was asked for.
        """
        identity, port = self.live.current.identity, self.live.current.replication.port
        host, make = identity.bind_host, partial(SlaveConnection, self.slaves)
        try:
            after_own = identity.port + 1 if identity.port else 0
            self._listener = await self.network.listen(host, port or after_own, make)
        except ListenFailed as error:
            if port or not identity.port:
                raise
            self._listener = await self.network.listen(host, 0, make)
            text = "HA port is %d, as the one after listenPort is taken: %s"
            _log.warning(text, self._listener.port, error)
        return self._listener.port

    def start(self) -> None:
        """Serve slaves, or follow the master, until the work is stopped."""
        if self.follower is not None:
            self.work.keep("replication", self.follower.run)
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
    def master_link(self) -> MasterLink | None:
        """The state of a slave's link to its master; None on a master."""
        return None if self.follower is None else self.follower.status
