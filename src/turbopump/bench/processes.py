"""One workload in one or several client processes, measured together."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from threading import BrokenBarrierError
from typing import TYPE_CHECKING

from turbopump.bench.sample import Gate, Sample, WatchedProcesses
from turbopump.errors import TurbopumpError

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier

Work = Callable[[Gate], Sample]

_READY_S = 120.0
"""How long the processes wait for each other."""

_barrier: Barrier | None = None
"""Where this process waits for the others; set when it is started."""


def measured(work: Work, processes: int, watched: WatchedProcesses) -> tuple[list[Sample], float]:
    """Return each process's sample, and the CPU time that the watched processes used meanwhile."""
    alone = processes == 1
    samples = [work(watched.restart)] if alone else _in_processes(work, processes, watched)
    return samples, watched.used_s()


def _in_processes(work: Work, processes: int, watched: WatchedProcesses) -> list[Sample]:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes + 1)
    with ProcessPoolExecutor(processes, context, _join, (barrier,)) as pool:
        futures = [pool.submit(_run, work) for _ in range(processes)]
        try:
            barrier.wait(_READY_S)
        except BrokenBarrierError:
            raise _cause(futures) from None
        watched.restart()
        return [future.result() for future in futures]


def _join(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier


def _run(work: Work) -> Sample:
    assert _barrier is not None
    barrier = _barrier
    try:
        return work(lambda: barrier.wait(_READY_S))
    except TurbopumpError as error:
        barrier.abort()
        # Plain, since not every error can be sent to the parent process.
        raise TurbopumpError(str(error)) from None
    except BaseException:
        barrier.abort()
        raise


def _cause(futures: Sequence[Future[Sample]]) -> BaseException:
    """Return why a process failed; the others only stopped waiting for it."""
    errors = [future.exception() for future in futures]
    found = [each for each in errors if each and not isinstance(each, BrokenBarrierError)]
    return (
        found[0] if found else TurbopumpError(f"processes were not ready within {_READY_S:.0f} s")
    )
