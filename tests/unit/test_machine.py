"""Store, broker, name server and client reach the operating system through the machine only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from imports import imported, modules, name_of, tree, written

PARTS = ("store", "broker", "nameserver", "client")

FORBIDDEN_MODULES = {
    "ctypes",
    "fcntl",
    "mmap",
    "os",
    "resource",
    "shutil",
    "subprocess",
    "tempfile",
    "time",
}
FORBIDDEN_CALLS = {
    "Thread",
    "Timer",
    "datetime.now",
    "datetime.today",
    "open",
    "threading.Thread",
    "threading.Timer",
    "to_thread",
    "asyncio.to_thread",
}
PATH_METHODS = {
    "exists",
    "glob",
    "hardlink_to",
    "is_dir",
    "is_file",
    "iterdir",
    "lstat",
    "mkdir",
    "read_bytes",
    "read_text",
    "rename",
    "resolve",
    "rglob",
    "rmdir",
    "samefile",
    "stat",
    "symlink_to",
    "touch",
    "unlink",
    "write_bytes",
    "write_text",
}
"""Methods of paths that ask the disk; the disk's own methods of these names are allowed."""


def ways_around(source: ast.Module) -> Iterator[str]:
    """Yield what a source file asks of the operating system itself."""
    for node in ast.walk(source):
        if not isinstance(node, ast.Call):
            continue
        called = written(node.func)
        owner, _, method = called.rpartition(".")
        is_disk = owner.rpartition(".")[2].lstrip("_") in {"files", "REAL_FILES"}
        opens = method == "open" and any(
            isinstance(each, ast.Constant) and isinstance(each.value, str) for each in node.args
        )
        if called in FORBIDDEN_CALLS or (
            not is_disk and (opens or (owner and method in PATH_METHODS))
        ):
            yield f"line {node.lineno}: {called}"


@pytest.mark.parametrize("path", modules(*PARTS), ids=name_of)
def test_nothing_goes_around_the_machine(path: Path) -> None:
    used = {name.partition(".")[0] for name in imported(path)} & FORBIDDEN_MODULES
    assert not used, f"{name_of(path)} imports {used}: use turbopump.machine"
    found = list(ways_around(tree(path)))
    assert not found, f"{name_of(path)}: {found}: use turbopump.machine"


@pytest.mark.parametrize(
    "source",
    [
        "open('x')",
        "path.open('rb')",
        "(self.root / 'abort').exists()",
        "Path(text).read_text(encoding='utf-8')",
        "for each in directory.iterdir(): pass",
        "threading.Thread(target=run).start()",
        "await asyncio.to_thread(run)",
        "datetime.now()",
    ],
)
def test_ways_around_are_seen(source: str) -> None:
    assert list(ways_around(ast.parse(f"async def f():\n {source}")))


def test_the_disk_is_no_way_around_itself() -> None:
    text = "self._files.exists(path)\nfiles.rename(a, b)\nREAL_FILES.open(path)\nstore.open(x)"
    assert not list(ways_around(ast.parse(text)))
