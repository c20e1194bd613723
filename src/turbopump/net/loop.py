"""Run programs on the fastest event loop available."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from importlib import import_module
from typing import Any, TypeVar

from turbopump.machine.process import open_standard_streams

T = TypeVar("T")

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, on uvloop if it is installed."""
    with asyncio.Runner(loop_factory=fastest_loop()) as runner:
        return runner.run(main)


def fastest_loop() -> LoopFactory:
    """Return the factory of event loops: uvloop's, or else asyncio's."""
    try:
        factory: LoopFactory = import_module("uvloop").new_event_loop
    except ImportError:
        return asyncio.new_event_loop
    open_standard_streams()
    return factory
