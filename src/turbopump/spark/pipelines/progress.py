"""Progress of a pipeline, shown as a bar on a terminal, else as lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO, TypeAlias

_LINE_INTERVAL_S = 5.0
"""The interval of lines without a terminal."""


@dataclass(frozen=True, slots=True)
class Step:
    """A pipeline's progress: a count of ``what`` out of ``total``, as far as known."""

    what: str
    done: int | None = None
    total: int | None = None


Watch: TypeAlias = Callable[[Step], None]


def unwatched(step: Step) -> None:
    """Ignore progress."""


class Lines:
    """Writes a line at intervals, and whenever the pipeline starts a new step."""

    def __init__(self, out: TextIO, now_s: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._now_s = now_s
        self._last: Step | None = None
        self._written_s = 0.0

    def __call__(self, step: Step) -> None:
        now_s = self._now_s()
        if step == self._last:
            return
        is_new = self._last is None or self._last.what != step.what
        is_end = step.done is not None and step.done == step.total
        if is_new or is_end or now_s - self._written_s >= _LINE_INTERVAL_S:
            self._out.write(f"{step_text(step)}\n")
            self._out.flush()
            self._written_s = now_s
            self._last = step


def step_text(step: Step) -> str:
    if step.done is None:
        return step.what
    if step.total is None:
        return f"{step.what}: {step.done:,}"
    return f"{step.what}: {step.done:,} of {step.total:,}"


@contextmanager
def shown(out: TextIO | None = None) -> Iterator[Watch]:
    """Show steps on stderr within the context, keeping stdout for the report."""
    stream = out or sys.stderr
    if not stream.isatty():
        yield Lines(stream)
        return
    with _bar(stream) as watch:
        yield watch


@contextmanager
def _bar(stream: TextIO) -> Iterator[Watch]:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn

    # Description, bar, percentage and remaining time are the default.
    default = Progress.get_default_columns()
    columns = (SpinnerColumn(), *default, MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(file=stream)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def watch(step: Step) -> None:
            progress.update(task, description=step.what, completed=step.done, total=step.total)

        yield watch
