"""``turbopump store backup``: what it says, and that it refuses what is no store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from appending import append
from turbopump.cli.app import app
from turbopump.store import Store
from unit.store.support import record, small_config

CONFIG = small_config()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["store", *arguments], env={"COLUMNS": "400"})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with Store.open(tmp_path / "store", CONFIG) as store:
        append(store, [record(b"x")])
    return tmp_path / "store"


def test_a_backup_is_reported_and_whole(root: Path, tmp_path: Path) -> None:
    made = run("backup", str(root), str(tmp_path / "copy"))
    end = json.loads(run("backup", str(root), str(tmp_path / "second"), "--json").stdout)["log_end"]
    assert made.exit_code == 0
    assert made.stdout == f"Backed up {root} in {tmp_path / 'copy'}: {end} bytes of messages.\n"
    assert run("verify", str(tmp_path / "copy")).stdout.startswith("1 messages, 1 queues")


def test_the_report_has_the_range_of_the_log(root: Path, tmp_path: Path) -> None:
    found = json.loads(run("backup", str(root), str(tmp_path / "copy"), "--json").stdout)
    assert found.pop("log_end") > found.pop("log_start") == 0
    assert found == {"directory": str(root), "backup": str(tmp_path / "copy")}


def test_what_is_no_store_or_exists_is_refused(root: Path, tmp_path: Path) -> None:
    assert run("backup", str(tmp_path), str(tmp_path / "copy")).exit_code == 2
    existing = run("backup", str(root), str(tmp_path))
    assert (existing.exit_code, "exists: name a new directory" in existing.output) == (2, True)
