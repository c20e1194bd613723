"""What Spark's worker processes do behind every call, and how it is made short.

A worker that Spark uses again collects garbage after each task and each call for the driver. With
pandas, Arrow and this package imported there are some 80,000 objects to look through, none of which
ever goes away: 20 to 40 ms, more than many micro-batches take. Those are set aside, once.
"""

from __future__ import annotations

import gc
import os

_IS_USED_AGAIN = "SPARK_REUSE_WORKER"
"""What Spark sets in the environment of such workers, and of no other process."""


class Lasting:
    """Sets aside what has outlived the first call of a process."""

    def __init__(self) -> None:
        self._calls = 0

    def begin_call(self) -> None:
        """Note that Spark calls this process; to be called first of all.

        Spark has collected garbage behind the first call when the second one begins: what is left
        are modules and what they keep. Nothing is lost for good but what of that becomes garbage
        later and refers to itself.
        """
        if not os.environ.get(_IS_USED_AGAIN):
            return
        self._calls += 1
        if self._calls == 2:
            gc.freeze()


_lasting = Lasting()
begin_call = _lasting.begin_call
