"""What a kind of trouble gets, and what it reports."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torture.processes import Processes

FINDINGS_MAX = 20


@dataclass
class Row:
    """One line of the final table."""

    name: str
    did: str = ""
    """What was done to the processes, with its count."""
    tried: int = 0
    acknowledged: int = 0
    lost: int = 0
    duplicated: int = 0
    dead: int = 0
    dead_expected: int = 0
    notes: list[str] = field(default_factory=list)
    """What else was measured."""
    broken: list[str] = field(default_factory=list)
    """Promises that did not hold."""
    skipped: str = ""
    """Why nothing was done."""
    seconds: float = 0.0

    def expect(self, holds: bool, otherwise: str) -> None:
        """Report a promise that does not hold."""
        if not holds and len(self.broken) < FINDINGS_MAX:
            self.broken.append(otherwise)


@dataclass
class Scenario:
    """Where a kind of trouble runs, for how long, and with which chance."""

    name: str
    directory: Path
    chance: random.Random
    seconds: float
    """How long to make trouble; bringing everything to rest comes on top."""
    processes: Processes
    say: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.seconds

    @property
    def left_s(self) -> float:
        """Return how much of the time for trouble is left."""
        return self._end - time.monotonic()


Trouble = Callable[[Scenario], Row]
"""Makes trouble for as long as the scenario says, and reports what came of it."""
