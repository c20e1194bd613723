"""Which cluster a client belongs to, when an event loop has several: by its address."""

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
    """One cluster among those of its event loop."""

    suffix: str
    """Suffix of its host names, so that no two clusters share an address."""

    nameserver: str = ""
    make: Make | None = None
    """None while it is not open: not yet, or no longer."""

    @contextmanager
    def open(self, nameserver: str, make: Make) -> Iterator[None]:
        """Accept clients with the address."""
        self.nameserver, self.make = nameserver, make
        try:
            yield
        finally:
            self.make = None


_clusters: WeakKeyDictionary[VirtualTimeLoop, list[ClusterEntry]] = WeakKeyDictionary()
"""In start order; closed ones too, as clients may still have their address."""


def register_cluster(loop: VirtualTimeLoop) -> ClusterEntry:
    """Return the entry of one more cluster in the running event loop."""
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
    # Clients with an unknown address are accepted too, and find that no server answers.
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
