"""Spark's Python worker processes: how they exit, and what they collect after each call."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from itertools import count
from types import ModuleType
from typing import Any

_DAEMON = "pyspark.daemon"
_IS_USED_AGAIN = "SPARK_REUSE_WORKER"
"""Set by Spark in the environment of workers that it reuses, and of no other process."""


class _QuietTraceback(ModuleType):
    """The module ``traceback``, except that it does not print broken pipes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)

    @staticmethod
    def print_exc() -> None:
        if not isinstance(sys.exception(), BrokenPipeError | ConnectionResetError):
            traceback.print_exc()


def end_quietly() -> None:
    """Let a worker that PySpark's daemon has forked exit silently when its socket is closed.

    `show`, `limit` and the end of a session close the sockets of workers that still have rows. The
    daemon then prints the traceback of a BrokenPipeError, as if a query had failed, which is its
    only use of `traceback` here. Called inside workers, since no setting of Spark does this and
    sessions need not be ours.
    """
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name == _DAEMON:
        main.traceback = _QuietTraceback("traceback")  # type: ignore[attr-defined]


_calls = count(1)


def begin_call() -> None:
    """Exclude objects that outlived the first call of a process from garbage collection.

    To be called first whenever Spark calls this process. A worker that Spark reuses collects
    garbage after each task and each call for the driver. With pandas, Arrow and this package
    imported, there are some 80,000 objects to scan, none of which is ever freed: 20 to 40 ms, more
    than many micro-batches take.

    When the second call starts, Spark has collected the garbage of the first: modules and their
    state are left. Only those of them that later become cyclic garbage are never freed.
    """
    if os.environ.get(_IS_USED_AGAIN) and next(_calls) == 2:
        gc.freeze()
