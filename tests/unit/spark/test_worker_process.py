"""Workers of PySpark's daemon: how they exit, and what they collect after each call."""

from __future__ import annotations

import gc
import importlib
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from io import BytesIO
from itertools import count
from types import ModuleType

import pytest

import turbopump.spark
from turbopump.spark import worker_process
from turbopump.spark.offline.source import DefaultSource as StoreSource
from turbopump.spark.source import DefaultSource
from turbopump.spark.worker_process import begin_call

DAEMON = textwrap.dedent("""
    import traceback

    def worker(open_file, call):
        outfile = open_file()
        call()
        outfile.flush()

    def manager(open_file, call):
        try:
            worker(open_file, call)
        except BaseException:
            traceback.print_exc()
""")
"""How the daemon runs one call in a worker that it has forked."""


class ClosedSocket(BytesIO):
    """A file whose last rows cannot be sent."""

    error: Exception = BrokenPipeError(32, "Broken pipe")

    def flush(self) -> None:
        raise self.error


class ResetSocket(ClosedSocket):
    error = ConnectionResetError()


class FailingFile(ClosedSocket):
    error = ValueError(7)


def main_module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Pretend that this process was started with ``python -m name``."""
    main = ModuleType("__main__")
    main.__spec__ = ModuleSpec(name, loader=None)
    exec(DAEMON, main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return main_module("pyspark.daemon", monkeypatch)


def do_nothing() -> None:
    """A call of another package."""


def import_again() -> None:
    """A user's function may import it in any task."""
    importlib.reload(turbopump.spark)


def test_only_a_closed_socket_is_not_worth_a_traceback(
    daemon: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        daemon.manager(ClosedSocket, begin_call)
        daemon.manager(ResetSocket, begin_call)
        assert capsys.readouterr().err == ""
        daemon.manager(FailingFile, begin_call)
        assert "ValueError: 7" in capsys.readouterr().err
        assert daemon.traceback.format_exc is traceback.format_exc


@pytest.mark.parametrize("call", [DefaultSource.name, StoreSource.name])
def test_lookups_of_the_formats_end_quietly(
    call: Callable[[], object], daemon: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.manager(ClosedSocket, call)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("call", [do_nothing, import_again])
def test_other_calls_of_the_worker_keep_their_tracebacks(
    call: Callable[[], object], daemon: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        daemon.manager(ClosedSocket, call)
        assert "BrokenPipeError" in capsys.readouterr().err
        daemon.manager(BytesIO, begin_call)


def test_other_programs_keep_their_tracebacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = main_module("turbopump", monkeypatch)
    main.manager(ClosedSocket, begin_call)
    assert "BrokenPipeError" in capsys.readouterr().err
    assert main.traceback is traceback


@pytest.fixture
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(worker_process, "_calls", count(1))
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    yield
    gc.unfreeze()
    if was_frozen:
        gc.freeze()


def begin_twice() -> None:
    """Spark calls a data source several times in one call of its worker."""
    begin_call()
    begin_call()


def test_the_second_call_freezes_existing_objects(
    monkeypatch: pytest.MonkeyPatch, daemon: ModuleType, nothing_frozen: None
) -> None:
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    daemon.manager(BytesIO, begin_twice)
    assert gc.get_freeze_count() == 0
    daemon.manager(BytesIO, begin_call)
    there = gc.get_freeze_count()
    assert there > 1000
    daemon.manager(BytesIO, begin_call)
    assert gc.get_freeze_count() <= there


def test_processes_that_are_not_reused_freeze_nothing(
    monkeypatch: pytest.MonkeyPatch, daemon: ModuleType, nothing_frozen: None
) -> None:
    monkeypatch.delenv("SPARK_REUSE_WORKER", raising=False)
    for _ in range(3):
        daemon.manager(BytesIO, begin_call)
    assert gc.get_freeze_count() == 0
