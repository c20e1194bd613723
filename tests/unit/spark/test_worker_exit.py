"""What a worker prints when Spark closes its socket."""

from __future__ import annotations

import importlib
import sys
import traceback
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
from pyspark import TaskContext

import turbopump.spark
from turbopump.spark.worker_process import begin_call


def main_module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Let a module run as the program, as ``python -m name`` does."""
    main = ModuleType("__main__")
    main.__spec__ = ModuleSpec(name, None)
    setattr(main, "traceback", traceback)  # noqa: B010 - mypy knows no such attribute
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main


def run_task(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Spark run a task in this process."""
    monkeypatch.setattr(TaskContext, "_taskContext", TaskContext(taskAttemptId=number))


def printed(main: ModuleType, error: Exception, capsys: pytest.CaptureFixture[str]) -> str:
    try:
        raise error  # noqa: TRY301 - as the daemon sees it
    except Exception:  # noqa: BLE001 - as the daemon does it
        main.traceback.print_exc()
    return capsys.readouterr().err


def test_only_a_closed_socket_is_not_worth_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = main_module("pyspark.daemon", monkeypatch)
    for number in (1, 2):
        run_task(number, monkeypatch)
        begin_call()
        assert printed(main, BrokenPipeError(32, "Broken pipe"), capsys) == ""
        assert printed(main, ConnectionResetError(), capsys) == ""
        assert "ValueError: 7" in printed(main, ValueError(7), capsys)
        assert main.traceback.format_exc is traceback.format_exc


def test_other_tasks_of_the_worker_keep_their_tracebacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = main_module("pyspark.daemon", monkeypatch)
    run_task(1, monkeypatch)
    # A user's function may import it in any task.
    importlib.reload(turbopump.spark)
    assert "BrokenPipeError" in printed(main, BrokenPipeError(32, "Broken pipe"), capsys)
    begin_call()
    run_task(2, monkeypatch)
    assert "BrokenPipeError" in printed(main, BrokenPipeError(32, "Broken pipe"), capsys)


def test_the_last_rows_of_a_task_are_sent_after_spark_has_forgotten_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = main_module("pyspark.daemon", monkeypatch)
    run_task(1, monkeypatch)
    begin_call()
    monkeypatch.setattr(TaskContext, "_taskContext", None)
    assert printed(main, BrokenPipeError(32, "Broken pipe"), capsys) == ""


def test_other_programs_keep_their_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    main = main_module("turbopump", monkeypatch)
    run_task(1, monkeypatch)
    begin_call()
    assert main.traceback is traceback
