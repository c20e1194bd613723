"""The input of a kind of disruption, and its report."""

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
    """The disruptions, with their count."""
    tried: int = 0
    acknowledged: int = 0
    lost: int = 0
    duplicated: int = 0
    dead: int = 0
    dead_expected: int = 0
    notes: list[str] = field(default_factory=list)
    """Other measurements."""
    broken: list[str] = field(default_factory=list)
    """Violated guarantees."""
    skipped: str = ""
    """Why the scenario was skipped."""
    seconds: float = 0.0

    def expect(self, holds: bool, otherwise: str) -> None:
        """Report a guarantee if it is violated."""
        if not holds and len(self.broken) < FINDINGS_MAX:
            self.broken.append(otherwise)


@dataclass
class Scenario:
    """Where a kind of disruption runs, for how long, and with which random generator."""

    name: str
    directory: Path
    chance: random.Random
    seconds: float
    """How long to disrupt; draining and stopping take additional time."""
    processes: Processes
    say: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.seconds

    @property
    def left_s(self) -> float:
        """Return how much of the time for disruptions is left."""
        return self._end - time.monotonic()


Trouble = Callable[[Scenario], Row]
"""Disrupts for the duration of the scenario, and reports the result."""
