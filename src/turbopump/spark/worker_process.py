"""Spark's Python worker processes: how they exit, and what they collect after each call."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from itertools import count
from types import ModuleType
from typing import Any

from pyspark import TaskContext

_DAEMON = "pyspark.daemon"
_IS_USED_AGAIN = "SPARK_REUSE_WORKER"
"""Set by Spark in the environment of workers that it reuses, and of no other process."""


class _QuietTraceback(ModuleType):
    """The module ``traceback``, except that it does not print broken pipes of one task."""

    def __init__(self, task: int) -> None:
        super().__init__(traceback.__name__)
        self._task = task

    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)

    def print_exc(self) -> None:
        is_closed = isinstance(sys.exception(), BrokenPipeError | ConnectionResetError)
        # PySpark forgets the task before it sends its last rows.
        if not (is_closed and _running_task() in (None, self._task)):
            traceback.print_exc()


def _end_quietly() -> None:
    """Let a worker that PySpark's daemon has forked exit silently if Spark closes its socket now.

    `show`, `limit` and the end of a session close the sockets of workers that still have rows. The
    daemon then prints the traceback of a BrokenPipeError, as if a query had failed. No setting of
    Spark prevents that, and sessions need not be ours. Tasks that do not use this package, which
    the same worker may run next, keep their tracebacks.
    """
    main, task = sys.modules["__main__"], _running_task()
    spec = getattr(main, "__spec__", None)
    if task is not None and spec is not None and spec.name == _DAEMON:
        main.traceback = _QuietTraceback(task)  # type: ignore[attr-defined]


def _running_task() -> int | None:
    """Return the id of the task that this process runs for Spark."""
    context = TaskContext.get()
    return None if context is None else context.taskAttemptId()


_calls = count(1)


def begin_call() -> None:
    """Prepare for a call; to be called first whenever Spark calls this process.

    Objects that outlived its first call are excluded from garbage collection. A worker that Spark
    reuses collects garbage after each task and each call for the driver. With pandas, Arrow and
    this package imported, there are some 80,000 objects to scan, none of which is ever freed: 20 to
    40 ms, more than many micro-batches take.

    When the second call starts, Spark has collected the garbage of the first: modules and their
    state are left. Only those of them that later become cyclic garbage are never freed.
    """
    _end_quietly()
    if os.environ.get(_IS_USED_AGAIN) and next(_calls) == 2:
        gc.freeze()
