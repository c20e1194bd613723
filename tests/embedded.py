"""Servers in a thread of the test's own process, on real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from brokers import config_at
from turbopump.broker.broker import Broker
from turbopump.broker.config import IdentityConfig, RegistrationConfig
from turbopump.nameserver import NameServer, NameServerConfig
from turbopump.net.sockets import SocketNetwork

_START_S = 20.0


@contextmanager
def embedded(directory: Path, brokers: Sequence[str] = ("a",)) -> Iterator[str]:
    """Run a name server and brokers of these names; give the name server's address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="embedded servers")
    thread.start()
    stack = AsyncExitStack()

    async def start() -> str:
        network = SocketNetwork()
        names = NameServerConfig(host="127.0.0.1", port=0, kv_config_path=directory / "kv.json")
        nameserver = await stack.enter_async_context(NameServer(names, network))
        registration = RegistrationConfig(name_servers=(nameserver.address,))
        for broker in brokers:
            identity = IdentityConfig(broker_name=broker, bind_host="127.0.0.1", port=0)
            config = config_at(directory / broker, identity=identity, registration=registration)
            await stack.enter_async_context(Broker(config, network))
        return nameserver.address

    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(_START_S)
    finally:
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result(_START_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
