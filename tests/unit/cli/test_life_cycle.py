"""What a server process does for itself."""

from __future__ import annotations

import json
import logging
import platform
from pathlib import Path

import pytest
import typer

from brokers import SMALL_STORE
from turbopump.broker.broker import Broker
from turbopump.broker.config import BrokerConfig, IdentityConfig
from turbopump.cli import life_cycle
from turbopump.cli.life_cycle import keep_freed_memory, reported_errors, serve
from turbopump.cli.logs import LogFormat, LogLevel, LogSettings, configure_logging
from turbopump.net.sockets import SocketNetwork


def test_freed_memory_is_kept_where_the_c_library_can() -> None:
    is_gnu = platform.libc_ver()[0] == "glibc"
    assert keep_freed_memory() == is_gnu


def test_a_broker_that_fails_for_good_ends_its_process_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise LookupError("a bug")

    def ready(running: Broker) -> str:
        monkeypatch.setattr(running.store, "tick", fail)
        return "ready"

    # Both are for the whole process, which goes on here.
    for own in ("_collect_garbage_rarely", "keep_freed_memory"):
        monkeypatch.setattr(life_cycle, own, lambda: None)
    monkeypatch.setattr("turbopump.supervisor.FATAL_FAILURES", 1)
    identity = IdentityConfig(bind_host="127.0.0.1", port=0)
    config = BrokerConfig(directory=tmp_path, identity=identity, store=SMALL_STORE)
    with pytest.raises(typer.Exit) as ended, reported_errors():
        serve(Broker(config, SocketNetwork()), ready)
    assert ended.value.exit_code == 1
    printed = capsys.readouterr()
    assert printed.out == "ready\n"
    assert "stops: store maintenance keeps failing with LookupError('a bug')" in printed.err


@pytest.fixture
def bare_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test configure logging for itself."""
    monkeypatch.setattr(logging, "root", logging.RootLogger(logging.WARNING))


@pytest.mark.usefixtures("bare_logging")
def test_logs_can_be_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogSettings(LogLevel.WARNING, LogFormat.JSON))
    root = logging.root
    root.info("not this")
    root.error("failed for %s", "x", exc_info=ValueError("a bug"))
    value = json.loads(capsys.readouterr().err)
    assert value["level"] == "error"
    assert value["message"] == "failed for x"
    assert "ValueError: a bug" in value["exception"]
    assert {"time", "logger"} < value.keys()


@pytest.mark.usefixtures("bare_logging")
def test_logs_are_lines_of_text_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogSettings())
    logging.root.info("hello")
    logging.root.debug("not this")
    assert capsys.readouterr().err.endswith(" INFO root: hello\n")


@pytest.mark.usefixtures("bare_logging")
@pytest.mark.parametrize("has_old", [False, True])
def test_the_data_directory_is_logged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    has_old: bool,
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(life_cycle, "run", lambda work: work.close())
    if has_old:
        (tmp_path / "store" / "commitlog").mkdir(parents=True)
    directory = BrokerConfig().directory
    assert directory == tmp_path / ".turbopump" / "store"
    monkeypatch.setattr(life_cycle._log, "parent", logging.root)
    server = Broker(BrokerConfig(), SocketNetwork())
    serve(server, str, directory=directory)
    logged = capsys.readouterr().err
    assert f"data directory: {directory}" in logged
    assert ("and is not used; pass --dir" in logged) == has_old
