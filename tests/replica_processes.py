"""A master and a slave as separate processes, under load, over a link that can be disturbed."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Self

from brokers import Client
from commands import ready_addresses
from turbopump.errors import NetworkError
from turbopump.net.pool import ConnectionPool
from turbopump.net.sockets import SocketNetwork
from turbopump.testing import wait_until
from turbopump.wire.bodies import KeyValues
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import whole_body
from turbopump.wire.headers import SendMessage, SendMessageV2

MASTER, SLAVE = "master", "slave"
DEADLINE_S = 120.0
"""Long enough for a busy machine."""
QUEUES = 2
_STOP_S = 20.0
_PAUSE_S = 0.005

_SETTINGS = {
    "brokerName": "b",
    "bindAddress": "127.0.0.1",
    "brokerIP1": "127.0.0.1",
    "vipChannelEnable": "false",
    # Small files, so that they fill up.
    "mappedFileSizeCommitLog": "1048576",
    "mappedFileSizeConsumeQueue": "20000",
    "maxHashSlotNum": "1000",
    "maxIndexNum": "4000",
    "maxMessageSize": "65536",
    "defaultTopicQueueNums": str(QUEUES),
    "slaveTimeout": "500",
}
_ROLES = {
    MASTER: {"brokerRole": "SYNC_MASTER", "brokerId": "0"},
    SLAVE: {"brokerRole": "SLAVE", "brokerId": "1"},
}
STORED = {
    ResponseCode.SUCCESS,
    ResponseCode.FLUSH_SLAVE_TIMEOUT,
    ResponseCode.SLAVE_NOT_AVAILABLE,
}
"""Codes with which the master answers sends that it has stored."""


class ReplicaProcesses:
    """A name server, a master and a slave, started on demand; all are killed at the end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: dict[str, subprocess.Popen[str]] = {}
        self.addresses: dict[str, str] = {}
        """By name of a running or stopped broker, which keeps its port across restarts."""
        self.stores = {name: directory / name / "store" for name in (MASTER, SLAVE)}

    def __enter__(self) -> Self:
        ready = self._launch("names", "nameserver", "--host", "127.0.0.1", "--port", "0")
        self.nameserver = ready["nameserver"]
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.kill()
            process.communicate()

    def _launch(self, name: str, *words: str) -> dict[str, str]:
        directory = self._directory / name
        directory.mkdir(exist_ok=True)
        with (directory / "log").open("a") as log:
            self._running[name] = process = subprocess.Popen(
                [sys.executable, "-m", "turbopump", *words],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "HOME": str(directory)},
            )
        return ready_addresses(process)

    def start(self, name: str, settings: Mapping[str, str] | None = None) -> None:
        """Start the master or the slave, and wait until it is ready."""
        port = self.addresses.get(name, ":0").rpartition(":")[2]
        own = {
            **_SETTINGS,
            **_ROLES[name],
            "listenPort": port,
            "storePathRootDir": str(self.stores[name]),
            "namesrvAddr": self.nameserver,
            **(settings or {}),
        }
        config = self._directory / f"{name}.conf"
        config.write_text("".join(f"{key}={value}\n" for key, value in own.items()))
        self.addresses[name] = self._launch(name, "broker", "--config", str(config))["broker"]

    def kill(self, name: str) -> None:
        """Kill a broker with SIGKILL."""
        process = self._running.pop(name)
        process.kill()
        process.communicate()

    def stop(self, name: str) -> None:
        """Stop a broker as an operator does."""
        process = self._running.pop(name)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=_STOP_S)
        assert process.returncode == 0
        assert "Traceback" not in (self._directory / name / "log").read_text()

    def assert_same_logs(self, end: int) -> None:
        """Compare the logs of both stopped brokers byte for byte."""
        master, slave = (
            b"".join(path.read_bytes() for path in sorted((store / "commitlog").iterdir()))
            for store in self.stores.values()
        )
        assert end > 0
        assert len(master) >= end
        assert master[:end] == slave[:end]


def body_of(number: int) -> bytes:
    chosen = random.Random(number)
    return b"%d:" % number + chosen.randbytes(chosen.choice((10, 300, 5000)))


def _header(queue_id: int) -> SendMessage:
    return SendMessageV2(
        producer_group="pg",
        topic="T",
        default_topic="TBW102",
        default_topic_queue_nums=QUEUES,
        queue_id=queue_id,
        sys_flag=0,
        born_timestamp=0,
        flag=0,
    )


class Load:
    """Senders of numbered messages to the master, and the answers they got."""

    def __init__(self, address: str, senders: int = 4) -> None:
        self._address = address
        self._senders = senders
        self._numbers = itertools.count()
        self._is_over = False
        self.answers: Counter[int] = Counter()
        self.acknowledged: set[int] = set()
        """Numbers answered with SEND_OK: a slave has them."""
        self.stored: set[int] = set()
        """Numbers that the master has stored."""

    async def run(self) -> None:
        async with ConnectionPool(SocketNetwork()) as pool:
            client = Client(pool, self._address)
            await asyncio.gather(*(self._send_all(client) for _ in range(self._senders)))

    async def _send_all(self, client: Client) -> None:
        while not self._is_over:
            number = next(self._numbers)
            try:
                header = _header(number % QUEUES)
                answer = await client.ask(RequestCode.SEND_MESSAGE_V2, header, body_of(number))
            except NetworkError:
                # Until the master is back.
                await asyncio.sleep(0.05)
                continue
            # A master without a slave is much faster than the slave can catch up here.
            await asyncio.sleep(_PAUSE_S)
            self.answers[answer.code] += 1
            if answer.code in STORED:
                self.stored.add(number)
            if answer.code == ResponseCode.SUCCESS:
                self.acknowledged.add(number)

    async def until_answered(self, code: ResponseCode, count: int = 20) -> None:
        """Wait for ``count`` more answers of a kind."""
        wanted = self.answers[code] + count
        await until(lambda: self.answers[code] >= wanted)

    def end(self) -> None:
        """Stop sending."""
        self._is_over = True


async def until(fact: Callable[[], object]) -> None:
    await wait_until(fact, DEADLINE_S, interval=0.02)


@asynccontextmanager
async def loaded(address: str) -> AsyncIterator[Load]:
    """Send to a broker while the block runs."""
    load = Load(address)
    sending = asyncio.create_task(load.run())
    try:
        yield load
    finally:
        load.end()
        await sending


async def runtime_info(address: str) -> dict[str, str]:
    """Return a broker's runtime info; empty if it does not answer."""
    async with ConnectionPool(SocketNetwork()) as pool:
        try:
            answer = await Client(pool, address).ask(RequestCode.GET_BROKER_RUNTIME_INFO)
        except NetworkError:
            return {}
    return dict(KeyValues.decode(whole_body(answer)).table)


async def until_copied(processes: ReplicaProcesses) -> int:
    """Wait until the slave has the master's whole log; return where it ends."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            infos = [await runtime_info(processes.addresses[name]) for name in (MASTER, SLAVE)]
            end, copied = (info.get("commitLogMaxOffset") for info in infos)
            if end is not None and end == copied and infos[1]["replicationLink"] == "in sync":
                return int(end)
            await asyncio.sleep(0.1)


async def numbers_at(address: str) -> set[int]:
    """Return the numbers of all messages of a broker; each message must be as sent."""
    found: set[int] = set()
    async with ConnectionPool(SocketNetwork()) as pool:
        for queue_id in range(QUEUES):
            client = Client(pool, address)
            messages = await client.messages(queue_id=queue_id)
            end = await client.pull(len(messages), queue_id=queue_id)
            assert end.code == ResponseCode.PULL_NOT_FOUND, end
            assert [message.queue_offset for message in messages] == list(range(len(messages)))
            for message in messages:
                number = int(message.body.partition(b":")[0])
                assert message.body == body_of(number)
                found.add(number)
    return found


async def check_replicas(processes: ReplicaProcesses, load: Load) -> None:
    """Check that the slave has all that was stored, and that both logs are the same."""
    end = await until_copied(processes)
    found = await numbers_at(processes.addresses[SLAVE])
    assert load.acknowledged <= load.stored <= found
    for name in (SLAVE, MASTER):
        processes.stop(name)
    processes.assert_same_logs(end)


class Link:
    """A TCP proxy in front of a master's HA port, which a test can cut or slow down."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.cut_after: int | None = None
        """Bytes from the master after which the connection is cut."""
        self.cuts = 0
        self.bytes_per_s: int | None = None
        self._connections: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Listen while the block runs; yield the address."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, slave: asyncio.StreamReader, to_slave: asyncio.StreamWriter) -> None:
        self._connections.append(asyncio.create_task(self._serve(slave, to_slave)))

    async def _serve(self, slave: asyncio.StreamReader, to_slave: asyncio.StreamWriter) -> None:
        host, _, port = self._target.rpartition(":")
        async with AsyncExitStack() as stack:
            stack.push_async_callback(_aborted, to_slave)
            master, to_master = await asyncio.open_connection(host, int(port))
            stack.push_async_callback(_aborted, to_master)
            directions = [self._forward_log(master, to_slave), _forward(slave, to_master)]
            tasks = [asyncio.create_task(each) for each in directions]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _forward_log(
        self, master: asyncio.StreamReader, to_slave: asyncio.StreamWriter
    ) -> None:
        while data := await master.read(2048):
            if self.cut_after is not None and len(data) >= self.cut_after:
                to_slave.write(data[: self.cut_after])
                await to_slave.drain()
                self.cut_after = None
                self.cuts += 1
                return
            if self.cut_after is not None:
                self.cut_after -= len(data)
            to_slave.write(data)
            await to_slave.drain()
            if self.bytes_per_s is not None:
                await asyncio.sleep(len(data) / self.bytes_per_s)


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


async def _aborted(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()
