"""What a worker prints when Spark closes its socket."""

from __future__ import annotations

import sys
import traceback
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from turbopump.spark.worker_process import end_quietly


def main_module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Let a module run as the program, as ``python -m name`` does."""
    main = ModuleType("__main__")
    main.__spec__ = ModuleSpec(name, None)
    setattr(main, "traceback", traceback)  # noqa: B010 - mypy knows no such attribute
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main


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
    end_quietly()
    assert printed(main, BrokenPipeError(32, "Broken pipe"), capsys) == ""
    assert printed(main, ConnectionResetError(), capsys) == ""
    assert "ValueError: 7" in printed(main, ValueError(7), capsys)
    assert main.traceback.format_exc is traceback.format_exc


def test_other_programs_keep_their_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    main = main_module("turbopump", monkeypatch)
    end_quietly()
    assert main.traceback is traceback
