"""What a server process does for itself."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import typer

from brokers import SMALL_STORE
from turbopump.broker.broker import Broker
from turbopump.broker.config import BrokerConfig, IdentityConfig
from turbopump.cli import life_cycle
from turbopump.cli.life_cycle import keep_freed_memory, reported_errors, serve
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
