"""What ``turbopump worker`` runs: a module, a function or a worker."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import turbopump
from turbopump import aio
from turbopump.cli.source_files import SourceFiles
from turbopump.cli.worker_app import load
from turbopump.errors import ClientError, InvalidArgument
from turbopump.testing import Cluster

ADDRESS = "127.0.0.1:9876"
FUNCTIONS = """
from turbopump import Worker, aio, consumer
from turbopump.aio import consumer as same

@consumer("orders", group="billing")
def bill(order: dict) -> None: ...

@same("orders", group="shipping")
async def ship(order: dict) -> None: ...

also_bill = bill
"""
WORKERS = f"""{FUNCTIONS}
blocking = Worker(bill, nameserver="10.0.0.1:9876")
awaited = aio.Worker(ship, nameserver="10.0.0.1:9876")
number = 3
"""

_numbers = itertools.count()

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes a module to the current directory, and returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write_module(source: str) -> str:
        name = f"worker_app_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write_module


def test_all_functions_of_a_module_are_run_once(write: Write) -> None:
    assert load(write(FUNCTIONS), ADDRESS).groups == ["billing", "shipping"]


def test_functions_imported_by_a_module_are_run(write: Write) -> None:
    other = write(FUNCTIONS)
    assert load(write(f"from {other} import ship"), ADDRESS).groups == ["shipping"]


@pytest.mark.parametrize(
    ("name", "groups", "kind"),
    [
        ("bill", ["billing"], aio.Worker),
        ("blocking", ["billing"], turbopump.Worker),
        ("awaited", ["shipping"], aio.Worker),
    ],
)
def test_one_function_or_worker_is_named(
    write: Write, name: str, groups: list[str], kind: type
) -> None:
    found = load(f"{write(WORKERS)}:{name}", ADDRESS)
    assert isinstance(found, kind)
    assert found.groups == groups


@pytest.mark.parametrize(
    ("app", "error"),
    [
        ("{}", "has a worker: name it; use {0}:bill or .* or {0}:blocking or {0}:awaited"),
        ("{}:number", r"number must be a turbopump.Worker, .* got int; use {0}:bill or"),
        ("{}:bil", "{0} has no 'bil'; use {0}:bill or"),
        ("{}.py:bill", r"must be module or module:name, got '{0}.py:bill'; .* without .py"),
        ("{}:", "must be module or module:name, got '{0}:'"),
        ("./{}", "must be module or module:name"),
        ("", "must be module or module:name"),
        ("no_such_module", "no module 'no_such_module' in /"),
        ("no_such_package.module", "no module 'no_such_package' in /"),
        ("{}.inside", "no module '{0}.inside' in /"),
    ],
)
def test_wrong_names_are_explained(write: Write, app: str, error: str) -> None:
    module = write(WORKERS)
    with pytest.raises(InvalidArgument, match=error.format(module)):
        load(app.format(module))


def test_a_module_without_functions_is_refused(write: Write) -> None:
    with pytest.raises(InvalidArgument, match=r"has no functions decorated with @turbopump.cons"):
        load(write("def bill(order): ..."), ADDRESS)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("def fail():\n    1 / 0\nfail()", "ZeroDivisionError: division by zero"),
        ("import no_such_dependency", "ModuleNotFoundError: No module named 'no_such_dependency'"),
        ("import sys; sys.exit('usage')", "SystemExit: usage"),
        ("def", "SyntaxError"),
        (FUNCTIONS.replace('"orders"', '"two words"'), "InvalidArgument: topic must be"),
    ],
)
def test_an_exception_at_import_is_shown_with_its_place(
    write: Write, source: str, error: str
) -> None:
    module = write(source)
    with pytest.raises(ClientError, match=f"cannot import {module}:\n") as caught:
        load(module, ADDRESS)
    text = str(caught.value)
    assert error in text
    assert f'{module}.py", line' in text
    assert "importlib" not in text
    assert "worker_app.py" not in text


def test_another_name_server_is_used_by_the_worker(write: Write) -> None:
    found = load(f"{write(WORKERS)}:awaited")
    found.connect_to("10.0.0.2:9876")
    with pytest.raises(InvalidArgument, match=r"10.0.0.2"):
        found.connect_to("10.0.0.2")


async def test_a_running_worker_keeps_its_name_server(turbopump_cluster: Cluster) -> None:
    @aio.consumer("orders", group="billing")
    async def bill(order: bytes) -> None: ...

    worker = aio.Worker(bill, nameserver="10.0.0.1:9876")
    worker.connect_to(turbopump_cluster.nameserver)
    async with worker:
        with pytest.raises(ClientError, match="is running"):
            worker.connect_to(ADDRESS)


# --- watched files --------------------------------------------------------------------------------


def test_changes_of_python_files_are_found(tmp_path: Path) -> None:
    for name in ("app.py", "shop/orders.py", "notes.txt", "shop/old.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("1")
    files = SourceFiles(tmp_path)
    before = files.states()
    assert files.changed_since(before) == []
    status = (tmp_path / "app.py").stat()
    os.utime(tmp_path / "app.py", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    (tmp_path / "shop" / "old.py").unlink()
    (tmp_path / "shop" / "new.py").write_text("1")
    (tmp_path / "notes.txt").write_text("changed")
    assert files.changed_since(before) == ["app.py", "shop/new.py", "shop/old.py"]


def test_hidden_files_and_environments_are_not_watched(tmp_path: Path) -> None:
    for name in (".git/x.py", "__pycache__/x.py", "node_modules/x.py", "env/lib/x.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text("1")
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "dangling.py").symlink_to("nowhere")
    assert SourceFiles(tmp_path).states() == {}
