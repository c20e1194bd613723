"""Seeds of the simulator as tests."""

from __future__ import annotations

from turbopump.testing.simulate.report import failure_lines
from turbopump.testing.simulate.run import simulate


def check_seeds(seeds: range) -> None:
    """Run seeds; the first that fails is shown with its whole history."""
    for seed in seeds:
        outcome = simulate(seed)
        assert not outcome.violations, "\n".join(failure_lines(outcome))


def chunks(seeds: range, size: int) -> list[range]:
    """Divide seeds, so that a failure tells about where, and processes can share them."""
    return [seeds[at : at + size] for at in range(0, len(seeds), size)]
