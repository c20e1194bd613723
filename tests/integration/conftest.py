"""What tests over real sockets share: both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from netkit import Run
from turbopump.net.loop import LoopFactory, fastest_loop


@pytest.fixture(params=[asyncio.new_event_loop, fastest_loop()], ids=["asyncio", "fastest"])
def run_on_loop(request: pytest.FixtureRequest) -> Run:
    factory: LoopFactory = request.param

    def run_on(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main)

    return run_on
