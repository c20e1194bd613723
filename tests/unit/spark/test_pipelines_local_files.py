"""Files of archives: what excludes what, and what is recorded."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from turbopump.spark.pipelines.archive_layout import COMPACTION, SETTINGS_FILE
from turbopump.spark.pipelines.local_files import (
    folders_stay,
    local_directory,
    moving_folders,
    writing_archive,
)


def is_free(directory: Path, how: int) -> bool:
    """Whether another process may take the lock now."""
    with (directory / COMPACTION / "moving").open("a") as lock:
        try:
            fcntl.flock(lock, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_listing_and_moving_files_exclude_each_other(
    tmp_path: Path,
) -> None:
    (tmp_path / SETTINGS_FILE).touch()
    with folders_stay(tmp_path):
        assert is_free(tmp_path, fcntl.LOCK_SH)
        assert not is_free(tmp_path, fcntl.LOCK_EX)
    with moving_folders(tmp_path):
        assert not is_free(tmp_path, fcntl.LOCK_SH)
    assert is_free(tmp_path, fcntl.LOCK_EX)


def test_readers_without_write_permission_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError

    (tmp_path / SETTINGS_FILE).touch()
    monkeypatch.setattr(Path, "mkdir", refused)
    with folders_stay(tmp_path):
        assert [each.name for each in tmp_path.iterdir()] == [SETTINGS_FILE]


def test_no_file_is_left_in_a_directory_that_is_not_an_archive(tmp_path: Path) -> None:
    with folders_stay(tmp_path):
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "local"),
    [("/a/b", Path("/a/b")), ("file:///a%20b", Path("/a b")), ("s3a://lake/a", None)],
)
def test_which_paths_are_of_this_machine(path: str, local: Path | None) -> None:
    assert local_directory(path) == local


def test_the_first_writer_removes_leftovers_of_killed_ones(tmp_path: Path) -> None:
    stale = tmp_path / ".spark-staging-1" / "_temporary"
    stale.mkdir(parents=True)
    (tmp_path / "topic=orders").mkdir()
    with writing_archive(tmp_path):
        assert [each.name for each in tmp_path.iterdir()] == ["topic=orders"]
        stale.mkdir(parents=True)
        with writing_archive(tmp_path):
            assert stale.exists(), "it may be the first writer's"
    with writing_archive(tmp_path):
        assert not stale.exists()


def test_without_file_locks_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(fcntl, "flock", refused)
    (tmp_path / ".spark-staging-1").mkdir()
    with writing_archive(tmp_path):
        assert (tmp_path / ".spark-staging-1").exists()
