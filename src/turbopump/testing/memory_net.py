"""A network in memory: hosts, links between them, and switches to break them.

`MemoryNetwork.host` returns the `turbopump.net.network.Network` of one host, which a name server, a
broker or a client uses in place of sockets. Delays and chunks come from a seeded generator, so a
run in virtual time is the same every time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from random import Random
from typing import TypeVar

from turbopump.durations import Duration, as_milliseconds
from turbopump.errors import ConnectFailed, InvalidArgument, ListenFailed
from turbopump.net.network import Listener
from turbopump.net.tls import ClientTls, ServerTls
from turbopump.testing.loop import virtual_loop
from turbopump.testing.memory_transport import Address, Link, MemoryTransport, Pipe
from turbopump.wire.hosts import ANY_HOST

P = TypeVar("P", bound=asyncio.Protocol)

CONNECT_TIMEOUT_MS = 3000
_FREE_PORTS = range(40_001, 65_001)
_HERE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkQuality:
    """How bytes travel between hosts."""

    latency: Duration = 0.0002
    jitter: Duration = 0.0001
    """Up to this much is added to the latency, by chance."""

    cut_chance: float = 0.1
    """How often bytes written together arrive in several chunks; 1 cuts as often as possible."""

    latency_ms: float = field(init=False, repr=False, compare=False)
    jitter_ms: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("latency", "jitter"):
            given = getattr(self, name)
            found_ms = as_milliseconds(given)
            if not found_ms >= 0:
                raise InvalidArgument(f"{name} must be at least 0 seconds, got {given!r}")
            object.__setattr__(self, f"{name}_ms", found_ms)
        if not 0 <= self.cut_chance <= 1:
            raise InvalidArgument(f"cut_chance must be 0 to 1, got {self.cut_chance}")


class MemoryNetwork:
    """All hosts, all connections, and their current faults.

    Create it inside virtual time; ``random`` defaults to the loop's own, which the seed of the run
    determines. Set ``trace`` to a list to record every event in it.
    """

    def __init__(self, quality: LinkQuality | None = None, random: Random | None = None) -> None:
        self.quality = quality or LinkQuality()
        self.random = random or virtual_loop().random
        self.trace: list[str] | None = None
        self.listeners: dict[Address, MemoryListener] = {}
        self.connections_made = 0
        self._connections: dict[MemoryTransport, None] = {}
        self._partitioned: set[frozenset[str]] = set()
        self._isolated: set[str] = set()
        self._losing: set[tuple[str, str]] = set()
        self._silent: set[str] = set()
        self._refusing: set[str] = set()
        self._frozen: set[str] = set()
        self._ports = cycle(_FREE_PORTS)

    @property
    def is_disturbed(self) -> bool:
        """Whether there is any fault."""
        faults = (self._partitioned, self._isolated, self._losing, self._refusing, self._frozen)
        return any(faults)

    def host(self, name: str) -> MemoryHost:
        """Return the network as seen by one host; its name or IP address is its identity."""
        return MemoryHost(self, name)

    # --- switches ---------------------------------------------------------------------------------

    def cut(self, one: str, other: str | None = None) -> int:
        """Reset all connections between two hosts, or all of one; return how many."""
        hit = [end for end in self._ends() if _touches(end, one, other)]
        for end in hit:
            end.reset(ConnectionResetError("connection cut"))
        return len(hit) // 2

    def partition(self, one: str, other: str) -> None:
        """Block traffic between two hosts; what was sent arrives after `heal`."""
        self._partitioned.add(frozenset((one, other)))

    def isolate(self, host: str) -> None:
        """Block traffic between a host and all others; what was sent arrives after `heal`."""
        self._isolated.add(host)

    def join(self, one: str, other: str) -> None:
        """End the partition between two hosts."""
        self._partitioned.discard(frozenset((one, other)))
        self._catch_up()

    def heal(self) -> None:
        """End all partitions."""
        self._partitioned.clear()
        self._isolated.clear()
        self._catch_up()

    def lose(self, source: str, target: str) -> None:
        """Drop everything one host sends to another from now on, without an error."""
        self._losing.add((source, target))

    def silence(self, host: str) -> None:
        """Drop all that a host sends until it is killed; for callers that cannot wait for that."""
        self._silent.add(host)

    def stop_losing(self, source: str | None = None, target: str | None = None) -> None:
        """End the losses from one host to another, or all; streams that lost bytes stay damaged."""
        if source is None or target is None:
            self._losing.clear()
        else:
            self._losing.discard((source, target))

    def refuse(self, host: str) -> None:
        """Refuse new connections to a host."""
        self._refusing.add(host)

    def accept(self, host: str) -> None:
        """Accept new connections again."""
        self._refusing.discard(host)

    def kill(self, host: MemoryHost) -> None:
        """End a host's connections and listeners, as if its process were killed.

        This host no longer connects or listens; another one of the same name may take its place.
        """
        host.is_dead = True
        self.cut(host.name)
        self._silent.discard(host.name)
        for at in [at for at in self.listeners if at[0] == host.name]:
            del self.listeners[at]

    def stop_reading(self, host: str) -> None:
        """Make a host read no bytes, as if its process hung."""
        self._frozen.add(host)
        self._apply_frozen()

    def resume_reading(self, host: str) -> None:
        self._frozen.discard(host)
        self._apply_frozen()
        self._catch_up()

    # --- questions --------------------------------------------------------------------------------

    @property
    def has_partitions(self) -> bool:
        return bool(self._isolated or self._partitioned)

    def is_partitioned(self, one: str, other: str) -> bool:
        is_apart = one != other and not self._isolated.isdisjoint((one, other))
        return is_apart or frozenset((one, other)) in self._partitioned

    def is_losing(self, source: str, target: str) -> bool:
        if not self._losing and not self._silent:
            return False
        return source in self._silent or (source, target) in self._losing

    def is_refusing(self, host: str) -> bool:
        return host in self._refusing

    @property
    def open_connections(self) -> int:
        """Connections with at least one living end."""
        return (len(list(self._ends())) + 1) // 2

    # --- used by hosts ----------------------------------------------------------------------------

    def free_port(self) -> int:
        """Return the next port, cyclically; an old connection may have had it."""
        taken = {port for _, port in self.listeners}
        return next(port for port in self._ports if port not in taken)

    def add_ends(self, *ends: MemoryTransport) -> None:
        for dead in [end for end in self._connections if end.is_lost]:
            del self._connections[dead]
        self._connections.update(dict.fromkeys(ends))
        self.connections_made += 1
        if self._frozen:
            self._apply_frozen()

    def note(self, event: str) -> None:
        if self.trace is not None:
            micros = round(asyncio.get_running_loop().time() * 1e6)
            self.trace.append(f"{micros} {event}")

    def _ends(self) -> Iterator[MemoryTransport]:
        return (end for end in tuple(self._connections) if not end.is_lost)

    def _apply_frozen(self) -> None:
        for end in self._ends():
            end.is_frozen = end.get_extra_info("sockname")[0] in self._frozen

    def _catch_up(self) -> None:
        for end in self._ends():
            end.catch_up()


def _touches(end: MemoryTransport, one: str, other: str | None) -> bool:
    hosts = {end.get_extra_info("sockname")[0], end.get_extra_info("peername")[0]}
    return one in hosts if other is None else hosts == {one, other}


class MemoryListener(Listener):
    """An address in memory where peers connect."""

    def __init__(
        self, network: MemoryNetwork, at: Address, factory: Callable[[], asyncio.Protocol]
    ) -> None:
        super().__init__(at)
        self._network = network
        self._at = at
        self.protocol_factory = factory

    async def close(self) -> None:
        """Accept no further connections; existing ones stay open."""
        if self._network.listeners.get(self._at) is self:
            del self._network.listeners[self._at]


class MemoryHost:
    """The network as seen by one host; a `turbopump.net.network.Network`."""

    def __init__(self, network: MemoryNetwork, name: str) -> None:
        self._network = network
        self.name = name
        self.is_dead = False

    async def connect(
        self,
        host: str,
        port: int,
        protocol_factory: Callable[[], P],
        *,
        tls: ClientTls | None = None,
    ) -> P:
        _refuse_tls(tls)
        if self.is_dead:
            raise ConnectFailed(f"{host}:{port}: {self.name} was killed")
        target = self.name if host in _HERE else host
        link = Link(self._network, self.name, target)
        if link.is_down or link.loses_bytes:
            await asyncio.sleep(CONNECT_TIMEOUT_MS / 1000)
            raise ConnectFailed(f"{host}:{port}: no answer within {CONNECT_TIMEOUT_MS} ms")
        await asyncio.sleep(2 * link.delay_s())
        listener = self._network.listeners.get((target, port))
        if listener is None or self._network.is_refusing(target):
            raise ConnectFailed(f"{host}:{port}: connection refused")
        return self._join(listener, protocol_factory())

    async def listen(
        self,
        host: str,
        port: int,
        protocol_factory: Callable[[], asyncio.Protocol],
        *,
        tls: ServerTls | None = None,
    ) -> MemoryListener:
        _refuse_tls(tls)
        if self.is_dead:
            raise ListenFailed(f"{host}:{port}: {self.name} was killed")
        if host not in (self.name, *ANY_HOST, *_HERE):
            raise InvalidArgument(f"host {host!r}: {self.name} can only listen at itself")
        at = (self.name, port or self._network.free_port())
        if at in self._network.listeners:
            raise ListenFailed(f"{at[0]}:{at[1]}: address already in use")
        listener = MemoryListener(self._network, at, protocol_factory)
        self._network.listeners[at] = listener
        return listener

    def _join(self, listener: MemoryListener, protocol: P) -> P:
        here, there = (self.name, self._network.free_port()), (listener.host, listener.port)
        onward = Pipe(Link(self._network, here[0], there[0]))
        back = Pipe(Link(self._network, there[0], here[0]))
        near = MemoryTransport(here, there, onward, back)
        far = MemoryTransport(there, here, back, onward)
        self._network.add_ends(near, far)
        self._network.note(f"{here[0]}:{here[1]} connected to {there[0]}:{there[1]}")
        accepted = listener.protocol_factory()
        far.set_protocol(accepted)
        near.set_protocol(protocol)
        # Only now, since either may close the connection immediately.
        accepted.connection_made(far)
        protocol.connection_made(near)
        return protocol


def _refuse_tls(tls: object) -> None:
    if tls is not None:
        raise InvalidArgument("the memory network does not support TLS; use sockets")
