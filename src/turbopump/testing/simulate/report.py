"""The results of many runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from turbopump.testing.simulate.run import Outcome

COMMAND = "python -m turbopump.testing.simulate"


@dataclass(slots=True)
class Totals:
    """Sums over all runs."""

    runs: int = 0
    failed: list[int] = field(default_factory=list)
    virtual_s: float = 0.0
    processor_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    began_s: float = field(default_factory=time.perf_counter)

    def add(self, outcome: Outcome) -> None:
        self.runs += 1
        if outcome.violations:
            self.failed.append(outcome.seed)
        self.virtual_s += outcome.virtual_s
        self.processor_s += outcome.processor_s
        self.faults += outcome.faults
        self.counts += outcome.counts

    def lines(self) -> Iterator[str]:
        """Describe the totals."""
        real_s = time.perf_counter() - self.began_s
        yield (
            f"{self.runs} seeds in {real_s:.1f} s: {self.runs / max(real_s, 1e-9):.1f} seeds/s, "
            f"{self.processor_s / max(self.runs, 1) * 1000:.0f} ms each"
        )
        yield f"virtual time: {self.virtual_s / 3600:.1f} h"
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.faults.items()))
        yield f"faults injected: {self.faults.total()} ({kinds})"
        count = self.counts
        yield (
            f"messages: {count['sent']} sent, {count['acknowledged']} acknowledged, "
            f"{count['deliveries']} consumed, {count['dead_letters']} dead letters"
        )
        yield f"transactions: {count['committed']} committed, {count['rolled_back']} rolled back"
        yield (
            f"duplicates: {count['stored_twice']} stored twice by retries of producers, "
            f"{count['consumed_twice']} consumed again"
        )
        if self.failed:
            yield f"failed: {len(self.failed)} seeds: {', '.join(map(str, sorted(self.failed)))}"
        else:
            yield "failed: none"


def failure_lines(outcome: Outcome) -> Iterator[str]:
    """Describe a run that failed: its history, what was violated, and how to repeat it."""
    yield f"--- seed {outcome.seed} failed, history ---"
    yield from outcome.history
    yield f"--- seed {outcome.seed} failed ---"
    for violation in outcome.violations:
        yield f"violated: {violation}"
    yield f"repeat with: {COMMAND} --seed {outcome.seed}"
