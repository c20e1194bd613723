"""A master and its slaves, with name servers, over an in-memory network in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from brokers import Client, config_at
from turbopump.broker.broker import Broker
from turbopump.broker.config import BrokerConfig, IdentityConfig, RegistrationConfig, Role
from turbopump.broker.replicated import ReplicatedBroker
from turbopump.broker.replication.mastership import Mastership
from turbopump.machine.files import read_file
from turbopump.nameserver import NameServer, NameServerConfig
from turbopump.net.pool import ConnectionPool
from turbopump.testing import MemoryNetwork, virtual_loop, virtual_machine
from turbopump.testing.disk import Disk
from turbopump.wire.bodies import ClusterInfo
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import Command, request, whole_body
from turbopump.wire.mastership import PromoteBroker

NAME = "broker-a"
CLIENT_HOST = "10.0.0.9"
TIMEOUT_MS = 20_000


def mastership_of(broker: Broker) -> Mastership:
    """Return what a broker knows of its role."""
    return broker._mastership


class PromotableBrokers:
    """Brokers of one name by number: 0 is configured as master, others as slaves."""

    def __init__(self, directory: Path, *, nameservers: int = 1) -> None:
        self.directory = directory
        self.network = MemoryNetwork()
        self.nameservers: dict[int, NameServer] = {}
        self.brokers: dict[int, ReplicatedBroker] = {}
        self.disks: dict[int, Disk] = {}
        self.nameserver_disks: dict[int, Disk] = {}
        self._nameserver_count = nameservers
        clock = virtual_loop().clock
        self.pool = ConnectionPool(self.network.host(CLIENT_HOST), clock=clock)

    # --- servers ----------------------------------------------------------------------------------

    async def start_nameserver(self, number: int = 0) -> None:
        host = f"10.0.1.{number + 1}"
        disk = self.nameserver_disks.setdefault(number, Disk(virtual_loop()))
        config = NameServerConfig(host=host, kv_config_path=Path(f"/ns{number}/kvConfig.json"))
        machine = virtual_machine(disk, seed=100 + number)
        server = NameServer(config, self.network.host(host), machine)
        self.nameservers[number] = await server.__aenter__()

    async def stop_nameserver(self, number: int = 0) -> None:
        await self.nameservers.pop(number).__aexit__(None, None, None)

    def host_of(self, number: int) -> str:
        return f"10.0.0.{number + 1}"

    def config_of(self, number: int) -> BrokerConfig:
        identity = IdentityConfig(
            broker_name=NAME,
            broker_id=number,
            role=Role.SLAVE if number else Role.ASYNC_MASTER,
            bind_host=self.host_of(number),
            port=10911,
        )
        servers = tuple(f"10.0.1.{each + 1}:9876" for each in range(self._nameserver_count))
        return config_at(
            self.directory / str(number),
            identity=identity,
            registration=RegistrationConfig(name_servers=servers, interval_ms=10_000),
        )

    async def start(self, number: int, config: BrokerConfig | None = None) -> ReplicatedBroker:
        disk = self.disks.setdefault(number, Disk(virtual_loop()))
        machine = virtual_machine(disk, seed=number)
        host = self.network.host(self.host_of(number))
        broker = ReplicatedBroker(config or self.config_of(number), host, machine)
        await broker.start()
        self.brokers[number] = broker
        return broker

    async def stop(self, number: int) -> None:
        await self.brokers.pop(number).close()

    async def crash(self, number: int) -> None:
        """Crash a broker in the middle of its work: nothing is written, no peer is notified."""
        broker = self.brokers.pop(number)
        self.disks[number].die()
        self.network.kill(self.network.host(self.host_of(number)))
        await broker.close()
        self.disks[number].close_all()

    async def close(self) -> None:
        async with AsyncExitStack() as rest:
            for server in list(self.nameservers):
                rest.push_async_callback(self.stop_nameserver, server)
            for number in list(self.brokers):
                rest.push_async_callback(self.stop, number)
            rest.push_async_callback(self.pool.close)

    # --- questions --------------------------------------------------------------------------------

    def broker(self, number: int) -> Broker:
        return self.brokers[number].current

    def client(self, number: int) -> Client:
        return Client(self.pool, f"{self.host_of(number)}:10911")

    def role(self, number: int) -> tuple[Role, int]:
        identity = self.broker(number).config.identity
        return identity.role, identity.broker_id

    def set_aside(self, number: int) -> bytes:
        """Return what a broker has cut off its log and kept."""
        disk, directory = self.disks[number], self.config_of(number).directory
        kept = [path for path in disk.entries(directory) if path.name.startswith("diverged")]
        return b"".join(read_file(disk, path) for each in kept for path in disk.entries(each))

    async def addresses(self, nameserver: int = 0) -> dict[int, str]:
        """Return the addresses of the broker name by id, as name servers report them."""
        command = request(RequestCode.GET_BROKER_CLUSTER_INFO)
        answer = await self.pool.request(f"10.0.1.{nameserver + 1}:9876", command, TIMEOUT_MS)
        table = ClusterInfo.decode(whole_body(answer)).broker_addr_table
        return dict(table[NAME].broker_addrs) if NAME in table else {}

    async def promote(self, number: int, role: str = "ASYNC_MASTER") -> Command:
        """Promote as an operator does, and return the answer."""
        return await self.client(number).ask(
            RequestCode.PROMOTE_BROKER, PromoteBroker(broker_role=role), timeout_ms=TIMEOUT_MS
        )


@asynccontextmanager
async def promotable_brokers(
    directory: Path, *, slaves: int = 1, nameservers: int = 1
) -> AsyncIterator[PromotableBrokers]:
    """Run name servers, a master and slaves."""
    replicas = PromotableBrokers(directory, nameservers=nameservers)
    try:
        for number in range(nameservers):
            await replicas.start_nameserver(number)
        for number in range(slaves + 1):
            await replicas.start(number)
        yield replicas
    finally:
        await replicas.close()
