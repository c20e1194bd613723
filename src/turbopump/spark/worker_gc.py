"""Shortening the garbage collection of Spark's worker processes after every call.

A worker that Spark reuses collects garbage after each task and each call for the driver. With
pandas, Arrow and this package imported, there are some 80,000 objects to scan, none of which is
ever freed: 20 to 40 ms, more than many micro-batches take. These are excluded, once.
"""

from __future__ import annotations

import gc
import os

_IS_USED_AGAIN = "SPARK_REUSE_WORKER"
"""Set by Spark in the environment of such workers, and of no other process."""


class Lasting:
    """Excludes objects that outlived the first call of a process from garbage collection."""

    def __init__(self) -> None:
        self._calls = 0

    def begin_call(self) -> None:
        """Note that Spark calls this process; call this first.

        When the second call starts, Spark has collected the garbage of the first: modules and their
        state are left. Only those of them that later become cyclic garbage are never freed.
        """
        if not os.environ.get(_IS_USED_AGAIN):
            return
        self._calls += 1
        if self._calls == 2:
            gc.freeze()


_lasting = Lasting()
begin_call = _lasting.begin_call
