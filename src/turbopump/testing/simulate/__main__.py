"""``python -m turbopump.testing.simulate``: run seeds, report what fails."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from turbopump.testing.simulate.report import COMMAND, Totals, failure_lines
from turbopump.testing.simulate.run import Outcome, simulate

_SEEDS_DEFAULT = range(200)
_PROGRESS_EVERY = 500


def _seeds(text: str) -> range:
    first, colon, end = text.partition(":")
    try:
        found = range(int(first), int(end)) if colon else range(int(first), int(first) + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected A:B, such as 0:200, got {text!r}") from None
    if not found or found.start < 0:
        raise argparse.ArgumentTypeError(f"expected 0 <= A < B, got {text!r}")
    return found


def _number(text: str, least: int, most: float, expected: str) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return int(text)


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    seed = partial(_number, least=0, most=math.inf, expected="a whole number from 0 on")
    jobs = partial(_number, least=1, most=256, expected="a number of processes from 1 to 256")
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description="Simulate clusters under faults and check what is guaranteed. "
        "The exit code is 1 if any seed fails.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--seeds", type=_seeds, default=_SEEDS_DEFAULT, metavar="A:B",
        help="run the seeds from A up to but not including B (default: 0:200)",
    )  # fmt: skip
    which.add_argument(
        "--seed", type=seed, metavar="S", help="run one seed and print its whole history"
    )
    parser.add_argument(
        "--jobs", type=jobs, default=1, metavar="N", help="run in N processes (default: 1)"
    )
    return parser.parse_args(given)


def _outcomes(seeds: Iterable[int], jobs: int) -> Iterator[Outcome]:
    if jobs == 1:
        yield from map(simulate, seeds)
        return
    # Not by fork: each process starts without this one's state.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(simulate, seeds, chunksize=4)


def main(given: Sequence[str] | None = None) -> int:
    """Run seeds; return the exit code."""
    arguments = _arguments(given)
    totals = Totals()
    if arguments.seed is not None:
        outcome = simulate(arguments.seed, keeps_history=True)
        totals.add(outcome)
        print(*(failure_lines(outcome) if outcome.violations else outcome.history), sep="\n")
        print(f"digest: {outcome.digest}")
    else:
        for outcome in _outcomes(arguments.seeds, arguments.jobs):
            totals.add(outcome)
            if outcome.violations:
                print(*failure_lines(outcome), sep="\n", flush=True)
            if totals.runs % _PROGRESS_EVERY == 0:
                print(f"... {totals.runs} seeds, {len(totals.failed)} failed", flush=True)
    print(*totals.lines(), sep="\n")
    return 1 if totals.failed else 0


if __name__ == "__main__":
    sys.exit(main())
