"""A peer at a master's HA port that stores nothing, and reports nothing or everything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from turbopump.broker.replication.frames import TransferDecoder, encode_report
from turbopump.broker.replication.master import EVERYTHING
from turbopump.errors import NetworkError
from turbopump.machine.timers import set_within
from turbopump.message import PhysicalOffset
from turbopump.net.network import Network
from turbopump.wire.hosts import split_address

_HEARTBEAT_MS = 5000
_RECONNECT_S = 0.5


async def follow_falsely(network: Network, ha_address: Callable[[], str], *, lies: bool) -> None:
    """Follow whichever broker is the master, until cancelled; with ``lies``, report everything."""
    while True:
        slave = _FalseSlave(lies=lies)
        try:
            await network.connect(*split_address(ha_address()), lambda: slave)  # noqa: B023 - called in the same turn of the loop
            while not await set_within(slave.ended, _HEARTBEAT_MS):
                slave.report()
        except NetworkError:
            # The master is down, or refuses connections.
            pass
        finally:
            slave.close()
        await asyncio.sleep(_RECONNECT_S)


class _FalseSlave(asyncio.Protocol):
    """One connection."""

    _transport: asyncio.Transport | None = None

    def __init__(self, *, lies: bool) -> None:
        self.ended = asyncio.Event()
        self._lies = lies
        self._transfers = TransferDecoder()
        self._position = EVERYTHING

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.report()

    def data_received(self, data: bytes) -> None:
        before = self._position
        for transfer in self._transfers.feed(data):
            if self._lies:
                end = PhysicalOffset(transfer.position + len(transfer.data))
                self._position = max(self._position, end)
        if self._position > before:
            self.report()

    def connection_lost(self, _: Exception | None) -> None:
        self.ended.set()

    def report(self) -> None:
        if self._transport is not None and not self.ended.is_set():
            self._transport.write(encode_report(self._position))

    def close(self) -> None:
        self.ended.set()
        if self._transport is not None:
            self._transport.close()
