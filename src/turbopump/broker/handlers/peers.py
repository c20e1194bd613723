"""Clients that the broker sends commands to."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from turbopump.broker.clients import AbsentPeer, Peer
from turbopump.errors import ConnectionLost
from turbopump.wire.command import Command


@runtime_checkable
class CommandPeer(Protocol):
    """A client that takes commands: a connection."""

    def oneway(self, command: Command) -> None: ...

    async def request(self, command: Command, timeout_ms: int) -> Command: ...


def commands_to(peer: Peer) -> CommandPeer:
    """Return the connection of a client; raises ConnectionLost if it has none for commands."""
    if isinstance(peer, CommandPeer):
        return peer
    if isinstance(peer, AbsentPeer):
        raise ConnectionLost("the client has not reconnected since the broker restarted")
    raise ConnectionLost(f"{peer.peer_address} does not accept commands")
