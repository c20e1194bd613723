"""``turbopump store``: on the files of a stopped broker."""

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
    """A store that has lost the second of three files of its log."""
    root = tmp_path / "store"
    with Store.open(root, CONFIG) as store:
        for number in range(12):
            append(store, [record(b"%02d" % number * 400)])
    (root / "commitlog" / f"{4096:020d}").unlink()
    return root


def test_repair_shows_what_is_lost_before_it_changes_anything(root: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.name != "lock"}
    shown = run("repair", str(root), "--dry-run")
    assert shown.exit_code == 0, shown.output
    assert f"{4096:020d}" in shown.stdout
    assert "Topic              4" in shown.stdout
    assert "Would abandon about 4 messages." in shown.stdout
    told = json.loads(run("repair", str(root), "--dry-run", "--json").stdout)
    assert (told["messages"], told["topics"], told["dry_run"]) == (4, {"Topic": 4}, True)
    assert told["backup"] is None
    unasked = run("repair", str(root))
    assert unasked.exit_code == 2
    assert "--yes" in unasked.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_repaired_store_can_be_started(root: Path) -> None:
    done = run("repair", str(root), "--yes", "--json")
    assert done.exit_code == 0, done.output
    value = json.loads(done.stdout)
    assert value["messages"] == 4
    assert (Path(value["backup"]) / "consumequeue").is_dir()
    with Store.open(root, CONFIG) as store:
        assert store.queue_range("Topic", 0) == (0, 12)
        assert append(store, [record(b"new")]).queue_offset == 12
    again = run("repair", str(root), "--yes")
    assert (again.exit_code, again.stdout) == (0, "Nothing to repair.\n")


def test_damage_that_cannot_be_repaired_is_named(root: Path, tmp_path: Path) -> None:
    for name in ("nowhere", "."):
        missing = run("repair", str(tmp_path / name))
        assert (missing.exit_code, "is not a store" in missing.stderr) == (2, True)
    assert not (tmp_path / "lock").exists()
    (root / "commitlog" / f"{0:020d}").write_bytes(bytes(5000))
    long = run("repair", str(root), "--segment-bytes", "4096")
    assert long.exit_code == 1
    assert f"{0:020d} has 5000 bytes instead of 4096" in long.stderr


def test_a_running_broker_is_left_alone(root: Path) -> None:
    assert run("repair", str(root), "--yes").exit_code == 0
    with Store.open(root, CONFIG) as store:
        refused = run("repair", str(root), "--yes")
        assert refused.exit_code == 1
        assert "already open" in refused.stderr
        assert store.queue_range("Topic", 0) == (0, 12)
