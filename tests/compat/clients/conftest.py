"""Fixtures: a server, and real third-party clients for it."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from compat.clients.operating import Operator
from compat.clients.peers import Peers
from servers import Standalone, standalone

DELAY_LEVELS = "1s 2s " + "1s " * 16
"""Short, so that failed messages are redelivered soon."""

NODE_HOME = Path(sys.prefix) / "node"
"""Where scripts/node-client installs it."""

_CPP = Path(__file__).with_name("cpp_client.py")
_NODE = Path(__file__).with_name("node") / "client.js"


def missing(reason: str) -> None:
    """Skip a test because a tool is missing; fail it where skipping is not permitted."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def cpp_peers(nameserver: str, directory: Path) -> Peers:
    if importlib.util.find_spec("rocketmq") is None:
        missing("the C++ client is only there for Linux on x86-64")
    return Peers([sys.executable, str(_CPP), nameserver], directory, {})


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """One server for all tests: each test uses its own topics and groups."""
    settings = {"messageDelayLevel": DELAY_LEVELS.strip()}
    with standalone(tmp_path_factory.mktemp("server"), settings) as running:
        yield running
        assert "Traceback" not in running.log.read_text()


@pytest.fixture
def operator(server: Standalone) -> Operator:
    return Operator(server.broker)


@pytest.fixture
def cpp(server: Standalone, tmp_path: Path) -> Iterator[Peers]:
    """C++ clients."""
    with cpp_peers(server.nameserver, tmp_path) as peers:
        yield peers


@pytest.fixture
def cpp_of(tmp_path: Path) -> Callable[[str], Peers]:
    """Return a function that starts C++ clients for another name server."""
    return lambda nameserver: cpp_peers(nameserver, tmp_path)


@pytest.fixture
def node(server: Standalone, tmp_path: Path) -> Iterator[Peers]:
    """Node clients."""
    modules = NODE_HOME / "node_modules"
    if not (modules / "ali-ons").is_dir():
        missing("the Node client is not installed: run scripts/node-client")
    command = [str(NODE_HOME / "bin" / "node"), str(_NODE), server.nameserver]
    with Peers(command, tmp_path, {"NODE_PATH": str(modules)}) as peers:
        yield peers
