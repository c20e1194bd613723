"""The simulator finds bugs that are planted in the product, by the invariants meant for them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from planted_bugs import BUGS, PlantedBug
from turbopump.testing.simulate.report import failure_lines
from turbopump.testing.simulate.run import simulate

SEEDS_MAX = 500
GUIDE = Path(__file__).parents[2] / "docs/guide/simulation.md"

each_bug = pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)


def seed_that_finds(bug: PlantedBug, seeds: Iterable[int]) -> int:
    """Return the first seed that violates an invariant because of a bug."""
    for seed in seeds:
        with bug.planted() as calls:
            outcome = simulate(seed)
        if not outcome.violations:
            continue
        assert calls.count, f"{bug.name} was never called"
        found = [str(violation) for violation in outcome.violations]
        assert any(text.startswith(bug.found_by) for text in found), "\n".join(found)
        right = simulate(seed)
        assert not right.violations, "\n".join(failure_lines(right))
        return seed
    pytest.fail(f"{bug.name} is not found by any of {seeds}")


@pytest.mark.slow
@each_bug
def test_is_found(bug: PlantedBug) -> None:
    seed_that_finds(bug, range(bug.near, bug.near + SEEDS_MAX))


@pytest.mark.long
@each_bug
def test_is_found_starting_at_the_first_seed(bug: PlantedBug) -> None:
    # Races of two operators take more seeds.
    seed_that_finds(bug, range(max(SEEDS_MAX, bug.near + 1)))


def test_guide_lists_every_planted_bug() -> None:
    rows = [line for line in GUIDE.read_text().splitlines() if line.startswith("| ")]
    for bug in BUGS:
        [row] = [row for row in rows if row.startswith(f"| {bug.name} | {bug.wrong.__doc__} |")]
        assert row.endswith(f" | {bug.near + 1} |"), row


def test_a_bug_in_a_function_that_does_not_exist_fails() -> None:
    bug = PlantedBug("none", PlantedBug, "no_such_function", print, (), 0)

    with pytest.raises(AttributeError, match="no_such_function"), bug.planted():
        pass
