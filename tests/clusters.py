"""A name server and brokers in virtual time, and sessions of clients that use them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import brokers
import nameserver_peers
from turbopump.broker.broker import Broker
from turbopump.broker.config import IdentityConfig
from turbopump.client.calls import require_success
from turbopump.client.config import ClientConfig
from turbopump.client.session import Session
from turbopump.nameserver import NameServer
from turbopump.net.hooks import Hook
from turbopump.testing import MemoryNetwork, VirtualClock, virtual_loop
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import Command, request
from turbopump.wire.headers import CreateTopic

BROKERS = ("a", "b")


@dataclass
class Recorder:
    """A hook that keeps the requests that were sent, and may change or refuse them."""

    requests: list[tuple[str, Command]] = field(default_factory=list)
    refuse: Callable[[str, Command], None] | None = None

    def before_request(self, address: str, command: Command) -> Command:
        self.requests.append((address, command))
        if self.refuse is not None:
            self.refuse(address, command)
        return command

    def after_response(self, address: str, request: Command, response: Command) -> None:
        pass

    def of(self, code: int) -> list[Command]:
        return [command for _, command in self.requests if command.code == code]

    def addresses_of(self, code: int) -> list[str]:
        return [address for address, command in self.requests if command.code == code]


@dataclass
class Cluster:
    """What runs, by name; hosts are ``nsN``, ``10.0.0.N`` for brokers, IPs for clients."""

    network: MemoryNetwork
    directory: Path
    nameservers: list[NameServer]
    brokers: dict[str, Broker]
    stack: AsyncExitStack
    settings: dict[str, Any]

    @property
    def clock(self) -> VirtualClock:
        return virtual_loop().clock

    @property
    def nameserver(self) -> str:
        return ";".join(server.address for server in self.nameservers)

    def config(self, **changes: Any) -> ClientConfig:
        return replace(ClientConfig(self.nameserver), **changes)

    def session(
        self,
        name: str = "10.0.1.1",
        hooks: Sequence[Hook] = (),
        kind: type[Session] = Session,
        **changes: Any,
    ) -> Session:
        """Return a session on a host of its own, not started; ``changes`` are of its settings."""
        config = self.config(**{"host": name, "instance": "test", **changes})
        return kind(
            config,
            self.network.host(name),
            clock=self.clock,
            random=Random(1),
            hooks=hooks,
        )

    async def make_topic(self, topic: str, broker: str, queues: int = 4) -> None:
        """Make a topic on one broker, as an operator does."""
        header = CreateTopic(
            topic=topic,
            default_topic="TBW102",
            read_queue_nums=queues,
            write_queue_nums=queues,
            perm=6,
            topic_filter_type="SINGLE_TAG",
        )
        command = request(RequestCode.UPDATE_AND_CREATE_TOPIC, header)
        async with self.session("10.0.2.1") as session:
            address = self.brokers[broker].address
            require_success(await session.request(address, command, 3000))

    async def start_broker(self, name: str) -> Broker:
        """Run one more broker."""
        number = len(self.brokers) + 1
        host = f"10.0.0.{number}"
        identity = IdentityConfig(broker_name=name, bind_host=host, port=10911)
        config = replace(
            brokers.config_at(self.directory / f"broker-{number}", identity=identity),
            **self.settings,
        )
        addresses = tuple(server.address for server in self.nameservers)
        config = replace(config, registration=replace(config.registration, name_servers=addresses))
        broker = Broker(config, self.network.host(host), self.clock, seed=number)
        self.brokers[name] = await self.stack.enter_async_context(broker)
        return broker


@asynccontextmanager
async def cluster(
    directory: Path, names: Sequence[str] = BROKERS[:1], nameservers: int = 1, **settings: Any
) -> AsyncIterator[Cluster]:
    """Run name servers and brokers; ``settings`` replace sections of the brokers' settings."""
    network = MemoryNetwork()
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(
                nameserver_peers.name_server_on(
                    network, nameserver_peers.config_at(directory, f"ns{number}")
                )
            )
            for number in range(nameservers)
        ]
        made = Cluster(network, directory, servers, {}, stack, settings)
        for name in names:
            await made.start_broker(name)
        yield made
