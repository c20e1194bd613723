"""Which cluster a client belongs to, when several are in one event loop: that of its address."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

from turbopump.client.config import ClientConfig
from turbopump.client.session import Session
from turbopump.client.shared_sessions import create_sessions_with
from turbopump.errors import InvalidArgument, NotRunning
from turbopump.testing.loop import VirtualTimeLoop

Make = Callable[[ClientConfig], Session]


@dataclass(slots=True)
class ClusterEntry:
    """The place of one cluster among those of its event loop."""

    suffix: str
    """Ends the names of its hosts, so that none has the address of another one's."""

    nameserver: str = ""
    make: Make | None = None
    """None when it is not open: not yet, or no longer."""

    @contextmanager
    def open(self, nameserver: str, make: Make) -> Iterator[None]:
        """Let clients in that have the address."""
        self.nameserver, self.make = nameserver, make
        try:
            yield
        finally:
            self.make = None


_clusters: WeakKeyDictionary[VirtualTimeLoop, list[ClusterEntry]] = WeakKeyDictionary()
"""In the order of their start; closed ones too, as there may still be clients with the address."""


def register_cluster(loop: VirtualTimeLoop) -> ClusterEntry:
    """Return a place for one more cluster in the running event loop."""
    clusters = _clusters.setdefault(loop, [])
    cluster = ClusterEntry(f"-{len(clusters) + 1}" if clusters else "")
    clusters.append(cluster)
    create_sessions_with(partial(_session, clusters))
    return cluster


def _session(clusters: Sequence[ClusterEntry], config: ClientConfig) -> Session:
    wanted = config.nameserver_addresses
    opened = [cluster for cluster in clusters if cluster.make is not None]
    meant = [
        cluster for cluster in clusters if not set(wanted).isdisjoint(cluster.nameserver.split(";"))
    ]
    # Who has an address that is nobody's is let in too, to find out that nobody answers there.
    candidates = meant or opened
    if len(candidates) > 1:
        known = ", ".join(cluster.nameserver for cluster in opened)
        raise InvalidArgument(
            f"nameserver {';'.join(wanted)}: there are several clusters in this event loop, give "
            f"the address of one: {known}"
        )
    make = candidates[0].make if candidates else None
    if make is None:
        raise NotRunning(f"nameserver {';'.join(wanted)}: this cluster is closed")
    return make(config)
