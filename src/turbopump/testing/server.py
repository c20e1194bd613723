"""A real name server and brokers on 127.0.0.1, in real time, for clients of any kind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from turbopump.broker.broker import Broker
from turbopump.broker.config_keys import parse
from turbopump.durations import Duration, seconds
from turbopump.errors import NotRunning
from turbopump.nameserver import NameServer, NameServerConfig
from turbopump.net.loop import run
from turbopump.net.sockets import SocketNetwork
from turbopump.testing import cluster_state
from turbopump.testing.cluster import BROKER, SMALL_FILES
from turbopump.testing.stack_dump import described

T = TypeVar("T")

TIMEOUT_S = 30.0
"""Real time, and the machine may be busy."""

_POLL_INTERVAL_S = 0.01


@dataclass(frozen=True, slots=True)
class _Running:
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event
    brokers: tuple[Broker, ...]
    nameserver: str


class RunningServer(cluster_state.ReadsState):
    """A name server and brokers in their own thread, at free ports.

    ::

        with running_server(tmp_path) as server:
            with Producer("shop", nameserver=server.nameserver) as producer:
                producer.send(Message("orders", b"hello"))
            assert len(server.messages("orders")) == 1

    After `stop` and `start` it has the same addresses and all messages.
    """

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, str] | None = None,
        brokers: Sequence[str] = (BROKER,),
    ) -> None:
        self._directory = directory
        self._settings = dict(settings or {})
        self._nameserver_port = 0
        self._broker_ports = dict.fromkeys(brokers, 0)
        self._thread: threading.Thread | None = None
        self._running: _Running | None = None

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all, and wait until they serve; raises what prevented it."""
        if self._thread is not None:
            return
        ready: Future[_Running] = Future()
        self._thread = threading.Thread(
            target=self._main, args=(ready,), name="turbopump-server", daemon=True
        )
        self._thread.start()
        try:
            self._running = ready.result(TIMEOUT_S)
        except BaseException:
            self._thread = None
            raise
        self._nameserver_port = _port(self.nameserver)
        ports = [_port(broker.address) for broker in self._running.brokers]
        self._broker_ports = dict(zip(self._broker_ports, ports, strict=True))

    def stop(self) -> None:
        """Stop all as an operator does; all state is saved."""
        thread, self._thread = self._thread, None
        running, self._running = self._running, None
        if running is not None and thread is not None:
            running.loop.call_soon_threadsafe(running.stop.set)
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), f"the server did not stop within {TIMEOUT_S:g} s"

    def _main(self, ready: Future[_Running]) -> None:
        try:
            run(self._serve(ready))
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    async def _serve(self, ready: Future[_Running]) -> None:
        path = self._directory / "namesrv" / "kvConfig.json"
        names = NameServerConfig(port=self._nameserver_port, kv_config_path=path)
        async with NameServer(names, SocketNetwork()) as nameserver, AsyncExitStack() as stack:
            brokers = [
                await stack.enter_async_context(self._broker(name, port, nameserver.address))
                for name, port in self._broker_ports.items()
            ]
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()
            ready.set_result(_Running(loop, stop, tuple(brokers), nameserver.address))
            await stop.wait()

    def _broker(self, name: str, port: int, nameserver: str) -> Broker:
        own = {
            "storePathRootDir": str(self._directory / name),
            "brokerName": name,
            "namesrvAddr": nameserver,
            "listenPort": str(port),
        }
        return Broker(parse({**SMALL_FILES, **self._settings, **own}))

    # --- what clients need ------------------------------------------------------------------------

    @property
    def nameserver(self) -> str:
        """The name server address for clients, as ``host:port``."""
        return self._require_running().nameserver

    @property
    def broker(self) -> str:
        """The address of the first broker, as ``host:port``."""
        brokers = self._require_running().brokers
        if not brokers:
            raise NotRunning("this server has no broker; it was started with a name server only")
        return brokers[0].address

    # --- what is inside ---------------------------------------------------------------------------

    def until(self, fact: Callable[[], object], timeout: Duration = TIMEOUT_S) -> None:
        """Wait until a condition holds; raises AssertionError on timeout."""
        timeout_s = seconds(timeout)
        end_s = time.monotonic() + timeout_s
        while not fact():
            if time.monotonic() >= end_s:
                lines = self._read(cluster_state.summary)
                text = f"not so within {timeout_s:g} s: {described(fact)}"
                raise AssertionError("\n  ".join([text, *lines]))
            time.sleep(_POLL_INTERVAL_S)

    # --- what goes wrong --------------------------------------------------------------------------

    def cut(self) -> int:
        """Reset the connections of all clients; return how many there were."""
        return self._read(_cut)

    def _read(self, question: Callable[[Collection[Broker]], T]) -> T:
        """Call a function on the brokers' own thread, the only one that may access them."""
        running = self._require_running()

        async def ask() -> T:
            return question(running.brokers)

        return asyncio.run_coroutine_threadsafe(ask(), running.loop).result(TIMEOUT_S)

    def _require_running(self) -> _Running:
        if self._running is None:
            raise NotRunning("this server is not running: use it inside `with`, or call start()")
        return self._running


def _cut(brokers: Collection[Broker]) -> int:
    connections = [each for broker in brokers for each in broker.connections]
    for connection in connections:
        connection.abort("cut by a test")
    return len(connections)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


@contextmanager
def running_server(
    directory: Path,
    settings: Mapping[str, str] | None = None,
    brokers: Sequence[str] = (BROKER,),
) -> Iterator[RunningServer]:
    """Run a name server and brokers with these names; settings by their keys in files."""
    server = RunningServer(directory, settings, brokers)
    server.start()
    try:
        yield server
    finally:
        server.stop()
