"""The one value that carries the machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from turbopump.clock import SYSTEM_CLOCK, Clock
from turbopump.machine.background import Background, Threads
from turbopump.machine.files import REAL_FILES, Files


def _new_random() -> Random:
    return Random()  # noqa: S311 - spreads load, keeps no secret


@dataclass(frozen=True, slots=True)
class Machine:
    """What a server or client runs on; the real machine unless parts are given."""

    files: Files = REAL_FILES
    background: Background = field(default_factory=Threads)
    clock: Clock = SYSTEM_CLOCK
    random: Random = field(default_factory=_new_random)
