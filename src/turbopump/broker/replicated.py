"""A broker that restarts within its process when its role changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Self

from turbopump.broker.broker import Broker
from turbopump.broker.config import BrokerConfig
from turbopump.errors import ServerFailed
from turbopump.machine import Machine
from turbopump.net.network import Network
from turbopump.supervisor import Supervisor


class ReplicatedBroker:
    """Runs one `Broker` after the other, at the same address.

    ::

        async with ReplicatedBroker(BrokerConfig(directory=Path("store"))) as broker:
            print(broker.address)

    A promoted slave is built as any master is, and a replaced master as any slave: no part changes
    its role while it runs. Clients reconnect, as they do after any restart.
    """

    def __init__(
        self,
        config: BrokerConfig,
        network: Network | None = None,
        machine: Machine | None = None,
        *,
        config_path: Path | None = None,
    ) -> None:
        self._configured = config
        self._network = network
        self._machine = machine
        self._config_path = config_path
        self._lives = Supervisor()
        self._is_closing = False
        self.current = self._new_broker(config)
        """The broker that runs, or ran last."""

    def _new_broker(self, config: BrokerConfig) -> Broker:
        return Broker(
            config,
            self._network,
            self._machine,
            config_path=self._config_path,
            on_role_change=self._role_changed,
        )

    @property
    def address(self) -> str:
        """Where clients find the broker, as ``host:port``."""
        return self.current.address

    async def __aenter__(self) -> Self:
        await self.current.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._end_changes()
        await self.current.__aexit__(kind)

    async def start(self) -> None:
        """Start in the current role."""
        await self.current.start()

    async def close(self) -> None:
        await self._end_changes()
        await self.current.close()

    async def _end_changes(self) -> None:
        """Wait for a role change in progress: an aborted one would leave files open."""
        self._is_closing = True
        await self._lives.wait()

    def _role_changed(self) -> None:
        if not self._is_closing:
            self._lives.start(self._start_again())

    async def _start_again(self) -> None:
        before = self.current
        try:
            await before.replica.roles.wait_followed()
            await before.close()
            self.current = self._new_broker(self._next_config(before))
            self.current.take_over(before)
            await self.current.start()
        except Exception as error:  # noqa: BLE001 - whatever it was, the process must end by it
            failure = ServerFailed(f"the broker could not start again in its new role: {error}")
            failure.__cause__ = error
            self.current.fail(failure)

    def _next_config(self, before: Broker) -> BrokerConfig:
        """Return the settings as they are now, with the configured role and the same port."""
        configured, now = self._configured, before.config
        identity = replace(
            now.identity,
            role=configured.identity.role,
            broker_id=configured.identity.broker_id,
            port=int(before.address.rpartition(":")[2]),
            # A port that the system chose has no VIP port.
            serves_vip=configured.identity.serves_vip and bool(configured.identity.port),
        )
        master_address = configured.replication.master_address
        replication = replace(now.replication, master_address=master_address)
        return replace(now, identity=identity, replication=replication)
