"""How Spark's Python workers exit when Spark needs no further rows.

`show`, `limit` and the end of a session close the sockets of workers that still have rows.
PySpark's daemon then prints the traceback of a BrokenPipeError, as if a query had failed.
"""

from __future__ import annotations

import sys
import traceback
from types import ModuleType
from typing import Any

_DAEMON = "pyspark.daemon"


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

    Called inside workers, since no setting of Spark does this and sessions need not be ours. The
    daemon's only use of `traceback` here is to print what ended a worker.
    """
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name == _DAEMON:
        main.traceback = _QuietTraceback("traceback")  # type: ignore[attr-defined]
