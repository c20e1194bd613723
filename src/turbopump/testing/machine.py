"""The machine of a server or client in virtual time."""

from __future__ import annotations

from random import Random

from turbopump.machine import Files, Machine
from turbopump.testing.background import VirtualBackground
from turbopump.testing.disk import Disk
from turbopump.testing.loop import virtual_loop


def virtual_machine(files: Files | None = None, seed: int = 0) -> Machine:
    """Return a machine in the time of the running loop, with a memory disk unless one is given.

    The loop runs its jobs, and ``seed`` decides what is left to chance.
    """
    loop = virtual_loop()
    files = files or Disk(loop)
    background = files.background if isinstance(files, Disk) else VirtualBackground(loop)
    return Machine(files, background, loop.clock, Random(seed))  # noqa: S311 - the same each time
