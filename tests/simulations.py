"""Simulator seeds as tests."""

from __future__ import annotations

from turbopump.testing.simulate.report import failure_lines
from turbopump.testing.simulate.run import simulate


def check_seeds(seeds: range) -> None:
    """Run seeds; show the first failure with its whole history."""
    for seed in seeds:
        outcome = simulate(seed)
        assert not outcome.violations, "\n".join(failure_lines(outcome))


def chunks(seeds: range, size: int) -> list[range]:
    """Divide seeds into chunks, to locate failures and to share them between processes."""
    return [seeds[at : at + size] for at in range(0, len(seeds), size)]
