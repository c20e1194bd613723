"""What the store requires of the system, where that is old or rejects it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from turbopump.machine import files as disk_files
from turbopump.store import Files

CACHED = disk_files._syncfs


@pytest.fixture(autouse=True)
def clear_cache() -> Iterator[None]:
    CACHED.cache_clear()
    yield
    CACHED.cache_clear()


def test_a_failed_sync_of_a_file_system_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    if CACHED() is None:
        pytest.skip("this system cannot")
    monkeypatch.setattr(disk_files, "_unwritten_kb", lambda: 0)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        Files().sync_file_system(-1, 1)


@pytest.mark.parametrize("release", ["4.18.0-553.el8", "5.7.19", "strange"])
def test_a_system_that_does_not_report_sync_errors_is_not_relied_upon(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
    assert not _is_synced(tmp_path)


@pytest.mark.parametrize(
    ("dirty_kb", "count", "synced"),
    [(60_000, 1, True), (70_000, 1, False), (70_000, 3000, True), (100_000, 3000, False)],
)
def test_a_file_system_with_many_dirty_pages_is_not_synced_as_a_whole(
    dirty_kb: int, count: int, synced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "meminfo"
    memory.write_text(f"MemTotal: 1 kB\nDirty: {dirty_kb - 1} kB\nWriteback: 1 kB\n")
    monkeypatch.setattr(disk_files, "_MEMORY", memory)
    monkeypatch.setattr(disk_files, "_syncfs", lambda: lambda _: 0)
    assert _is_synced(tmp_path, count) == synced


def _is_synced(path: Path, count: int = 1) -> bool:
    fd = Files().open_directory(path)
    try:
        return Files().sync_file_system(fd, count)
    finally:
        os.close(fd)


@pytest.mark.parametrize("known", [True, False])
def test_locking_where_open_file_locks_are_unavailable(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[object] = []
    monkeypatch.setattr(fcntl, "lockf", lambda *how: taken.append(how))
    if known:
        monkeypatch.setattr(fcntl, "F_OFD_SETLK", 12_345)
    else:
        monkeypatch.delattr(fcntl, "F_OFD_SETLK", raising=False)
    files = Files()
    fd = files.open_new(tmp_path / "lock")
    files.lock(fd)
    files.close(fd)
    assert taken == [(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)]
