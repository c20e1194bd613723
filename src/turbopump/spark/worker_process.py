"""Spark's Python processes: how they exit, and what workers collect after each call."""

from __future__ import annotations

import gc
import inspect
import os
import socket
import sys
import traceback
import weakref
from collections.abc import Callable
from functools import wraps
from itertools import count
from types import ModuleType, TracebackType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_DAEMON = "pyspark.daemon"
_STREAM = "pyspark.sql.streaming.python_streaming_source_runner"
"""What the driver runs in one process for each streaming query."""

_IS_USED_AGAIN = "SPARK_REUSE_WORKER"
"""Set by Spark in the environment of workers that it reuses, and of no other process."""

_CLOSED = 1
"""Anything but 0 ends the process."""

_CLOSED_ERRORS = BrokenPipeError, ConnectionResetError


class _QuietTraceback(ModuleType):
    """The module ``traceback``, except that it does not print broken pipes of one call."""

    def __init__(self, results: object) -> None:
        super().__init__(traceback.__name__)
        self._results = weakref.ref(results)

    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)

    def is_of(self, results: object) -> bool:
        return self._results() is results

    def print_exc(self) -> None:
        is_closed = isinstance(sys.exception(), _CLOSED_ERRORS)
        # The daemon opens another file for the next call.
        if not is_closed or self._results() is None:
            traceback.print_exc()


def _results_of_call() -> object | None:
    """Return the file that the daemon's ``worker`` sends the results of this call to."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "worker":
            spec = frame.f_globals.get("__spec__")
            if spec is not None and spec.name == _DAEMON:
                return frame.f_locals.get("outfile")
        frame = frame.f_back
    return None


def _unless_closed(
    worker: Callable[[socket.socket, bool], int],
) -> Callable[[socket.socket, bool], int]:
    """Let the daemon's ``worker`` end if Spark closes the socket instead of sending a call.

    It would send Spark an error about that, and fail.
    """

    @wraps(worker)
    def run_if_called(sock: socket.socket, authenticated: bool) -> int:
        try:
            is_called = sock.recv(1, socket.MSG_PEEK) != b""
        except ConnectionResetError:
            is_called = False
        return worker(sock, authenticated) if is_called else _CLOSED

    return run_if_called


def _print_unless_closed(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if not issubclass(kind, _CLOSED_ERRORS):
        sys.__excepthook__(kind, error, trace)


_calls = count(1)


def begin_call() -> None:
    """Prepare for a call; to be called first whenever Spark calls this process.

    Instances of `BeginsCall` do so when they arrive, and functions that `begins_call` wraps.

    Only processes that PySpark's daemon has forked are prepared, and those of streams; others run
    one call.

    Broken pipes: `show`, `limit` and the end of a session close the sockets of workers that still
    have rows, or wait for a call, and stopping a query that of its process. The daemon, or Python,
    then prints the traceback of a BrokenPipeError, as if a query had failed. No setting of Spark
    prevents that, and sessions need not be ours. Calls that do not use this package, which the same
    worker may run next, keep their tracebacks.

    Garbage: objects that outlived its first call are excluded from garbage collection. A worker
    that Spark reuses collects garbage after each task and each call for the driver. With pandas,
    Arrow and this package imported, there are some 80,000 objects to scan, none of which is ever
    freed: 20 to 40 ms, more than many micro-batches take. When the second call starts, Spark has
    collected the garbage of the first: modules and their state are left. Only those of them that
    later become cyclic garbage are never freed.
    """
    main_spec = getattr(sys.modules["__main__"], "__spec__", None)
    if main_spec is not None and main_spec.name == _STREAM:
        sys.excepthook = _print_unless_closed
    results = _results_of_call()
    if results is None:
        return
    daemon: Any = sys.modules["__main__"]
    if not isinstance(daemon.traceback, _QuietTraceback):
        daemon.worker = _unless_closed(daemon.worker)
    elif daemon.traceback.is_of(results):
        return
    daemon.traceback = _QuietTraceback(results)
    if os.environ.get(_IS_USED_AGAIN) and next(_calls) == 2:
        gc.freeze()


class BeginsCall:
    """Has its instances prepare for the call that Spark sends them with.

    That is before any of their methods is called, and for tasks before their input has arrived:
    Spark may close the socket of a worker that still waits for it.
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        begin_call()
        self.__dict__.update(state)


def begins_call(work: Callable[P, T]) -> Callable[P, T]:
    """Have a function of tasks prepare for the call first."""

    @wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        begin_call()
        return work(*args, **kwargs)

    return run
