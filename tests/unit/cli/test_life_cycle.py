"""What a server process sets up for itself."""

from __future__ import annotations

import json
import logging
import platform
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import typer

from brokers import SMALL_STORE
from turbopump.broker.broker import Broker
from turbopump.broker.config import BrokerConfig, IdentityConfig
from turbopump.cli import life_cycle
from turbopump.cli.administration import reported
from turbopump.cli.life_cycle import keep_freed_memory, serve
from turbopump.cli.logs import (
    TEXT_LINES,
    JsonLines,
    LogFormat,
    LogLevel,
    LogSettings,
    configure_logging,
)
from turbopump.core import CORE_NAME
from turbopump.net.sockets import SocketNetwork


def test_freed_memory_is_retained_where_the_c_library_can() -> None:
    is_gnu = platform.libc_ver()[0] == "glibc"
    assert keep_freed_memory() == is_gnu


def test_a_fatal_broker_error_ends_the_process_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise LookupError("a bug")

    def ready(running: Broker) -> str:
        monkeypatch.setattr(running.store, "tick", fail)
        return "ready"

    # Both apply to the whole process, which continues here.
    for own in ("_collect_garbage_rarely", "keep_freed_memory"):
        monkeypatch.setattr(life_cycle, own, lambda: None)
    monkeypatch.setattr("turbopump.supervisor.FATAL_FAILURES", 1)
    identity = IdentityConfig(bind_host="127.0.0.1", port=0)
    config = BrokerConfig(directory=tmp_path, identity=identity, store=SMALL_STORE)
    with pytest.raises(typer.Exit) as ended, reported():
        serve(Broker(config, SocketNetwork()), ready)
    assert ended.value.exit_code == 1
    printed = capsys.readouterr()
    assert printed.out == "ready\n"
    assert "stops: store maintenance keeps failing with LookupError('a bug')" in printed.err


LOGGED_AT = datetime(2024, 2, 29, 12, 30, 15, 678_000, UTC)


def record(level: int, text: str, error: Exception | None = None) -> logging.LogRecord:
    cause = None if error is None else (type(error), error, None)
    made = logging.LogRecord("turbopump.x", level, "x.py", 1, text, ("y",), cause)
    made.created = LOGGED_AT.timestamp()
    return made


def test_logs_can_be_json_lines() -> None:
    line = JsonLines().format(record(logging.ERROR, "failed for %s", ValueError("a bug")))
    value = json.loads(line)
    assert (value["level"], value["message"]) == ("error", "failed for y")
    assert (value["logger"], value["exception"]) == ("turbopump.x", "ValueError: a bug")
    assert datetime.fromisoformat(value["time"]) == LOGGED_AT
    assert re.fullmatch(r"2024-0\S+:15\.678[+-]\d\d:\d\d", value["time"])
    assert "exception" not in json.loads(JsonLines().format(record(logging.INFO, "%s")))
    assert TEXT_LINES.format(record(logging.INFO, "%s")).endswith(" INFO turbopump.x: y")


def test_logging_is_configured_by_options(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(logging, "basicConfig", given.update)
    configure_logging(LogSettings(LogLevel.WARNING, LogFormat.JSON))
    assert given["level"] == "WARNING"
    assert isinstance(given["handlers"][0].formatter, JsonLines)


@pytest.mark.parametrize("has_old", [False, True])
def test_the_data_directory_is_logged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    has_old: bool,
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(life_cycle, "run", lambda work: work.close())
    if has_old:
        (tmp_path / "store" / "commitlog").mkdir(parents=True)
    directory = BrokerConfig().directory
    assert directory == tmp_path / ".turbopump" / "store"
    caplog.set_level(logging.INFO, "turbopump.cli.life_cycle")
    serve(Broker(BrokerConfig(), SocketNetwork()), str, directory=directory)
    assert f"data directory: {directory}" in caplog.text
    assert f"core: {CORE_NAME}" in caplog.text
    assert ("and is not used; pass --dir" in caplog.text) == has_old
