"""The processes of a broker's filter servers: started, kept running, and ended with it."""

from __future__ import annotations

import asyncio
import functools
import sys

import msgspec

from turbopump.broker.config import FiltersConfig, IdentityConfig
from turbopump.errors import ServerFailed
from turbopump.filters.server_config import FilterServerConfig
from turbopump.machine.child_process import wait_or_kill
from turbopump.net.network import address_text
from turbopump.supervisor import Supervisor
from turbopump.timeouts import timeout
from turbopump.wire.hosts import ANY_HOST

_START_MS = 30_000
_END_MS = 1000


class FilterServerProcesses:
    """Runs the configured number of filter servers until stopped."""

    def __init__(self, filters: FiltersConfig, identity: IdentityConfig, port: int) -> None:
        self._filters = filters
        self._identity = identity
        host = identity.bind_host
        self._broker = address_text(("127.0.0.1" if host in ANY_HOST else host, port))
        first = filters.server_port
        self._ports = [first + slot if first else 0 for slot in range(filters.servers)]
        """The port of each; a restarted server takes the same one."""

    def start(self, work: Supervisor) -> None:
        for slot in range(self._filters.servers):
            work.keep(f"filter server {slot}", functools.partial(self._run, slot))

    async def _run(self, slot: int) -> None:
        """Run one until it exits, which it should not."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "turbopump.filter_server"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(self._config(slot)) + b"\n")
            async with timeout(_START_MS / 1000):
                line = await process.stdout.readline()
            # A port taken by another process meanwhile is replaced, unless it was configured.
            is_listening = line.strip().isdigit()
            if not self._filters.server_port:
                self._ports[slot] = int(line) if is_listening else 0
            code = await process.wait()
        finally:
            # It exits when its input closes; if it hangs, it is killed.
            process.stdin.close()
            await wait_or_kill(process, _END_MS / 1000)
        raise ServerFailed(f"filter server {slot} exited with {code}; see its log above")

    def _config(self, slot: int) -> FilterServerConfig:
        return FilterServerConfig(
            broker=self._broker,
            bind_host=self._identity.bind_host,
            advertised_host=self._identity.reachable_host,
            port=self._ports[slot],
            limits=self._filters.code_limits,
        )
