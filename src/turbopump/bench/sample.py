"""Measurements of client processes, and the CPU time of other processes meanwhile."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from threading import BrokenBarrierError
from typing import TYPE_CHECKING, Any

import msgspec

from turbopump.errors import InvalidArgument, TurbopumpError

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier

Gate = Callable[[], object]
"""Called when a client is connected and warm, just before it is measured."""


class Sample(msgspec.Struct, frozen=True):
    """The messages of one client process between two times of the machine's monotonic clock."""

    messages: int
    started_s: float
    ended_s: float
    cpu_s: float
    latencies_s: list[float]
    """Of each send, batch or delivery; empty where none is measured."""


class Stopwatch:
    """Measures from its creation to `sample`."""

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self._cpu_s = time.process_time()

    def sample(
        self, messages: int, latencies_s: Sequence[float] = (), ended_s: float | None = None
    ) -> Sample:
        """Return the sample since creation, ending now or at ``ended_s``."""
        return Sample(
            messages,
            self.started_s,
            time.monotonic() if ended_s is None else ended_s,
            time.process_time() - self._cpu_s,
            list(latencies_s),
        )


class Quota:
    """How much to send: for a duration, or a number of messages. Threads may share one."""

    def __init__(self, batch: int, seconds: float | None, count: int | None) -> None:
        self._batch = batch
        self._end_s = time.monotonic() + (seconds or 0.0)
        self._sizes = None if count is None else iter(_sizes(count, batch))

    def take(self) -> int:
        """Return how many messages to send next; 0 when done."""
        if self._sizes is not None:
            return next(self._sizes, 0)
        return self._batch if time.monotonic() < self._end_s else 0


def _sizes(count: int, batch: int) -> list[int]:
    whole, rest = divmod(count, batch)
    return [batch] * whole + [rest] * bool(rest)


class WatchedProcesses:
    """Other processes of this machine whose CPU time is measured, such as brokers."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._before = self._cpu_s()

    def restart(self) -> None:
        self._before = self._cpu_s()

    def used_s(self) -> float:
        """Return the total CPU time of all processes since the last restart."""
        return self._cpu_s() - self._before

    def _cpu_s(self) -> float:
        return sum(map(process_cpu_s, self._pids))


def process_cpu_s(pid: int) -> float:
    """Return the CPU time of a process; InvalidArgument if there is none with this id."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        raise InvalidArgument(f"no process has the id {pid} on this machine") from None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- one workload in one or several processes, measured together ----------------------------------

Work = Callable[[Gate], Sample]


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how to work; called with a gate, it warms up, passes the gate, and measures."""

    nameserver: str
    topic: str
    asynchronous: bool
    warm_up_s: float


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


def summary(
    samples: Sequence[Sample], size_bytes: int | None, watched_s: float | None
) -> dict[str, Any]:
    """Return the combined figures of all client processes; TurbopumpError if nothing was done."""
    messages = sum(each.messages for each in samples)
    started, ended = min(each.started_s for each in samples), max(each.ended_s for each in samples)
    if messages <= 0 or ended <= started:
        raise TurbopumpError(
            "no messages were left to measure after the warm-up; use more messages or a shorter "
            "--warm-up"
        )
    seconds = ended - started
    latencies_ms = sorted(1000 * each for sample in samples for each in sample.latencies_s)
    return {
        "messages": messages,
        "seconds": round(seconds, 6),
        "messages_per_second": round(messages / seconds, 1),
        "bytes": None if size_bytes is None else messages * size_bytes,
        "client_cpu_us": _micros(sum(each.cpu_s for each in samples), messages),
        "watched_cpu_us": None if watched_s is None else _micros(watched_s, messages),
        "p50_ms": _percentile(latencies_ms, 0.5),
        "p99_ms": _percentile(latencies_ms, 0.99),
        "max_ms": _percentile(latencies_ms, 1.0),
    }


def _micros(cpu_s: float, messages: int) -> float:
    return round(cpu_s / messages * 1e6, 3)


def _percentile(ordered: Sequence[float], part: float) -> float | None:
    return round(ordered[int((len(ordered) - 1) * part)], 4) if ordered else None
