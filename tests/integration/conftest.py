"""Shared by tests over real sockets: both event loops, and a cluster for commands."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from netkit import Run
from shells import Shell
from turbopump.net.loop import LoopFactory, fastest_loop
from turbopump.testing import running_server


@pytest.fixture(params=[asyncio.new_event_loop, fastest_loop()], ids=["asyncio", "fastest"])
def run_on_loop(request: pytest.FixtureRequest) -> Run:
    factory: LoopFactory = request.param

    def run_on(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main)

    return run_on


@pytest.fixture(scope="module")
def nameserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_server(tmp_path_factory.mktemp("daily"), brokers=("a", "b")) as server:
        address = server.nameserver
        yield address


@pytest.fixture
def shell(nameserver: str) -> Shell:
    return Shell(nameserver)
