"""Brokers that benchmarks run in separate processes, and connections to them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from turbopump.bench.sample import process_cpu_s
from turbopump.net.connection import Connection
from turbopump.net.pool import ConnectionPool
from turbopump.net.sockets import SocketNetwork

TIMEOUT_MS = 10_000
BROKER = "broker-a"
NAMED_CONFIG = f"brokerName={BROKER}\n"
"""Fixes the broker's name, which Spark's offsets refer to."""


class Server:
    """The broker's process."""

    def __init__(self, process: subprocess.Popen[str], address: str, nameserver: str = "") -> None:
        self.process = process
        self.address = address
        self.nameserver = nameserver

    @property
    def cpu_s(self) -> float:
        return process_cpu_s(self.process.pid)

    @property
    def memory_mib(self) -> float:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.partition("VmRSS:")[2].split()[0]) / 1024

    def turbopump(self, *words: str) -> str:
        """Run a command against this cluster; return what it prints."""
        command = [sys.executable, "-m", "turbopump", *words, f"--nameserver={self.nameserver}"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def environment(core: str) -> dict[str, str]:
    """Return the environment of a process that runs on a core; on the usual one if it is empty."""
    return {**os.environ, "TURBOPUMP_CORE": core} if core else dict(os.environ)


@contextmanager
def started(*arguments: str, core: str = "") -> Iterator[Server]:
    """Run a command that prints its broker's address, in a separate process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "turbopump", *arguments],
        env=environment(core),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    ready = process.stdout.readline()
    try:
        addresses = dict(word.split("=") for word in ready.split()[1:])
        assert core in {"", addresses["core"]}, ready
        yield Server(process, addresses["broker"], addresses.get("nameserver", ""))
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def server(*options: str, config: str = "", core: str = "") -> Iterator[Server]:
    """Run name server and broker in one process, with these lines of configuration."""
    ports = ("--nameserver-port", "0", "--broker-port", "0")
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "broker.conf")
        file.write_text(config, encoding="utf-8")
        used = ("--config", str(file)) if config else ()
        store = ("--dir", str(Path(directory, "store")))
        with started("standalone", *store, *ports, *used, *options, core=core) as made:
            yield made


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Connection]:
    async with ConnectionPool(SocketNetwork()) as pool:
        yield await pool.connection(address)


def with_children(pid: int) -> tuple[int, ...]:
    """Return a process and its descendants."""
    return pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
