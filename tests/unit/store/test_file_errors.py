"""An error of the operating system names the file and the operation."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from appending import append
from store_work import log_of
from turbopump.errors import DiskFailed
from turbopump.machine.files import create_full_size
from turbopump.store import Files, Store
from unit.store.support import record, small_config

FILES = Files()


def on_closed_for_writing(path: Path, call: Callable[[int], object]) -> None:
    """Call with a read-only descriptor."""
    path.touch()
    fd = os.open(path, os.O_RDONLY)
    try:
        call(fd)
    finally:
        os.close(fd)


def on_closed_for_reading(path: Path, call: Callable[[int], object]) -> None:
    path.write_bytes(b"x")
    fd = os.open(path, os.O_WRONLY)
    try:
        call(fd)
    finally:
        os.close(fd)


FAILING: dict[str, Callable[[Path], object]] = {
    "open": lambda path: FILES.open(path),
    "create": lambda path: FILES.open_new(path / "file"),
    "write": lambda path: on_closed_for_writing(path, lambda fd: FILES.write(fd, b"x", 0)),
    "read": lambda path: on_closed_for_reading(path, lambda fd: FILES.read(fd, 1, 0)),
    "resize": lambda path: on_closed_for_writing(path, lambda fd: FILES.truncate(fd, 9)),
    "map": lambda path: on_closed_for_reading(path, lambda fd: FILES.map(fd, 1)),
    "rename": lambda path: FILES.rename(path, path.with_name("other")),
    "link": lambda path: FILES.link(path, path.with_name("other")),
    "delete": lambda path: FILES.remove(path.parent),
    "create directory": lambda path: on_closed_for_writing(
        path, lambda _: FILES.make_directory(path / "inner")
    ),
    "flush directory": lambda path: FILES.sync_directory(path),
    "lock": lambda path: on_closed_for_writing(path, FILES.lock),
}


@pytest.mark.parametrize("operation", FAILING)
def test_each_operation_and_its_file(operation: str, tmp_path: Path) -> None:
    path = tmp_path / "some file"
    with pytest.raises(OSError) as failed:
        FAILING[operation](path)
    error = failed.value
    assert error.errno is not None
    assert os.strerror(error.errno) in str(error)
    assert str(tmp_path) in str(error)
    said = "open directory" if operation == "flush directory" else operation
    assert f"cannot {said}: " in str(error)
    # Its type stays what callers expect.
    assert type(error) is type(OSError(error.errno, ""))


def test_an_error_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as failed:
        create_full_size(FILES, tmp_path / "a" / "b", 10, tmp_path / "a" / "spare")
    assert str(failed.value).count("cannot") == 1


def test_an_unknown_descriptor_is_named_by_its_number() -> None:
    text = "cannot write: Bad file descriptor: 'file descriptor 98765'"
    with pytest.raises(OSError, match=text):
        FILES.write(98765, b"x", 0)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"x")
    fd = FILES.open(path)
    try:
        with pytest.raises(OSError, match=f"cannot map: it is shorter than 9 bytes: '{path}'"):
            FILES.map(fd, 9)
    finally:
        FILES.close(fd)


def test_store_errors_name_the_file(tmp_path: Path) -> None:
    with Store.open(tmp_path, small_config()) as store:
        for _ in range(12):
            append(store, [record(b"x" * 900)])
        store.flush()
        log_of(store).close()
        log = tmp_path / "commitlog" / f"{0:020d}"
        log.rename(log.with_name("moved"))
        with pytest.raises(
            DiskFailed, match=re.escape(f"cannot open: No such file or directory: '{log}'")
        ):
            store.message_at(store.min_offset)
        log.with_name("moved").rename(log)
