"""Servers of other messaging systems, started for one run if installed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from broker_process import free_port, with_children

START_S = 60.0
RABBITMQ_DIRECTORY = "/usr/lib/rabbitmq/bin"
"""The rabbitmq-server here runs as the caller. Debian's in /usr/sbin switches to another user,
which may not write to our directory."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server's address, and its processes, for measuring CPU time."""

    address: str
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PeerServer:
    """How to start a server, and the Python package of its client."""

    program: str
    package: str

    @property
    def missing(self) -> str | None:
        """What has to be installed; None if nothing is missing."""
        wanted = [f"Python package {self.package}"] * (find_spec(self.package) is None)
        wanted += [f"program {self.program}"] * (_program(self.program) is None)
        return " and ".join(wanted) or None

    def command(self, directory: str, port: int) -> list[str]:
        program = _program(self.program)
        assert program is not None
        match self.program:
            case "nats-server":
                return [program, "-js", "-sd", directory, "-a", "127.0.0.1", "-p", str(port)]
            case "redis-server":
                listen = ["--bind", "127.0.0.1", "--port", str(port), "--dir", directory]
                durable = ["--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
                return [program, *listen, *durable]
            case _:
                return [program]

    def environment(self, directory: str, port: int) -> dict[str, str]:
        """Return RabbitMQ's settings, which avoid the files and ports of other instances.

        The other servers ignore them.
        """
        return {
            **os.environ,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(port),
            "RABBITMQ_DIST_PORT": str(port + 20_000 if port < 45_000 else port - 20_000),
            "RABBITMQ_NODENAME": f"bench{port}@localhost",
            "RABBITMQ_MNESIA_BASE": directory,
            "RABBITMQ_LOG_BASE": directory,
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{directory}/plugins",
            "RABBITMQ_CONF_ENV_FILE": f"{directory}/env",
            "RABBITMQ_CONFIG_FILE": f"{directory}/config",
            "ERL_EPMD_PORT": str(free_port()),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "HOME": directory,
        }


PEER_SERVERS = {
    "nats": PeerServer("nats-server", "nats"),
    "redis": PeerServer("redis-server", "redis"),
    "rabbitmq": PeerServer("rabbitmq-server", "aio_pika"),
}


@contextmanager
def peer_server(name: str, directory: Path) -> Iterator[RunningServer]:
    """Run a server until the context ends; raises TimeoutError if it does not listen in time."""
    server, place = PEER_SERVERS[name], directory / name
    place.mkdir()
    port = free_port()
    command, environment = server.command(str(place), port), server.environment(str(place), port)
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        _wait_listening(process, port, place / "log")
        yield RunningServer(f"127.0.0.1:{port}", with_children(process.pid))
    finally:
        process.terminate()
        process.wait(30)
        _stop_epmd(environment)


def _stop_epmd(environment: dict[str, str]) -> None:
    """Stop Erlang's port mapper, which RabbitMQ starts and leaves running."""
    epmd = shutil.which("epmd")
    if epmd is not None:
        subprocess.run([epmd, "-kill"], env=environment, capture_output=True, check=False)


def _program(name: str) -> str | None:
    # Some servers are installed in directories that are only on root's PATH.
    return shutil.which(name, path=f"{RABBITMQ_DIRECTORY}:{os.environ['PATH']}:/usr/sbin")


def _wait_listening(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    why = "".join(said) or f"exit code {process.poll()}"
    raise TimeoutError(f"it does not listen on port {port}: {why}")
