"""The machine that a server or client runs on: disk, background jobs, clock, chance, process.

Store, broker, name server and client receive a `Machine` and use nothing else of the operating
system. `turbopump.testing` gives them one in memory and in virtual time, with faults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from turbopump.clock import SYSTEM_CLOCK, Clock
from turbopump.machine.background import Background, Threads, Worker
from turbopump.machine.files import REAL_FILES, Files

__all__ = ["Background", "Files", "Machine", "Threads", "Worker"]


@dataclass(frozen=True, slots=True)
class Machine:
    """What a server or client runs on; the real machine unless parts are given."""

    files: Files = REAL_FILES
    background: Background = field(default_factory=Threads)
    clock: Clock = SYSTEM_CLOCK
    # It spreads load, and keeps no secret.
    random: Random = field(default_factory=Random)
