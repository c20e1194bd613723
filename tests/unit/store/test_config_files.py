"""Configuration files: replaced completely or not at all, with the previous one as backup."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from turbopump.machine.files import REAL_FILES, Files
from turbopump.machine.text_files import save_text
from turbopump.store.config_files import load_json, save_json
from unit.store.disks import Killed, KilledFiles
from unit.store.support import DATA, FaultyFiles

FILES = Files()


def test_saving_keeps_the_previous_version(tmp_path: Path) -> None:
    path = tmp_path / "config" / "topics.json"
    save_json(FILES, path, {"a": 1})
    assert not path.with_name("topics.json.bak").exists()
    save_json(FILES, path, {"a": 2})
    assert load_json(REAL_FILES, path) == {"a": 2}
    assert load_json(REAL_FILES, path.with_name("topics.json.bak")) == {"a": 1}
    assert sorted(entry.name for entry in path.parent.iterdir()) == [
        "topics.json",
        "topics.json.bak",
    ]


def test_integer_keys_may_be_bare_as_in_apache_rocketmq(tmp_path: Path) -> None:
    path = tmp_path / "delayOffset.json"
    save_text(FILES, path, '{"offsetTable":{1:5}}')
    assert load_json(REAL_FILES, path) == {"offsetTable": {"1": 5}}


@pytest.mark.parametrize("broken", [None, b"", b"  ", b"{", b"\xff"])
def test_loading_falls_back_to_the_backup(tmp_path: Path, broken: bytes | None) -> None:
    path = tmp_path / "topics.json"
    save_text(FILES, path, '{"a":1}')
    save_text(FILES, path, '{"a":2}')
    if broken is None:
        path.unlink()
    else:
        path.write_bytes(broken)
    assert load_json(REAL_FILES, path) == {"a": 1}


def test_nothing_to_load(tmp_path: Path) -> None:
    assert load_json(REAL_FILES, tmp_path / "topics.json") is None


def test_a_failed_write_leaves_the_old_text(tmp_path: Path) -> None:
    path = tmp_path / "topics.json"
    save_text(FILES, path, '{"a":1}')
    for change in ({"bytes_left": 3}, {"sync_error": errno.EIO}):
        files = FaultyFiles()
        for name, value in change.items():
            setattr(files, name, value)
        with pytest.raises(OSError, match=r"No space|Input/output"):
            save_text(files, path, '{"a":2}')
        assert load_json(REAL_FILES, path) == {"a": 1}


def test_a_backup_that_cannot_be_written_leaves_the_old_text(tmp_path: Path) -> None:
    class LinkFails(Files):
        def link(self, path: Path, name: Path) -> None:
            raise OSError(errno.EIO, "Input/output error")

    path = tmp_path / "topics.json"
    save_text(FILES, path, '{"a":1}')
    with pytest.raises(OSError, match="Input/output"):
        save_text(LinkFails(), path, '{"a":2}')
    assert load_json(REAL_FILES, path) == {"a": 1}


def test_a_kill_at_any_step_leaves_an_intact_file(tmp_path: Path) -> None:
    for changes in range(20):
        root = tmp_path / str(changes)
        path = root / "topics.json"
        save_text(FILES, path, '{"a":1}')
        save_text(FILES, path, '{"a":2}')
        try:
            save_text(KilledFiles(changes), path, '{"a":3}')
        except Killed:
            assert load_json(REAL_FILES, path) in ({"a": 2}, {"a": 3})
            shutil.rmtree(root)
            continue
        assert load_json(REAL_FILES, path) == {"a": 3}
        assert changes > 3
        return
    raise AssertionError("saving never came to its end")


def test_files_of_apache_rocketmq_are_read() -> None:
    for path in sorted((DATA / "config").iterdir()):
        assert isinstance(load_json(REAL_FILES, path), dict), path
    offsets = load_json(REAL_FILES, DATA / "config" / "consumerOffset.json")["offsetTable"]
    assert all(queue.isdecimal() for table in offsets.values() for queue in table)
