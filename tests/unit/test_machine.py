"""Store, broker, name server and client reach the operating system through the machine only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from imports import SOURCE, imported, modules, name_of, nodes, tree, written

PARTS = ("store", "broker", "nameserver", "client")

FORBIDDEN_MODULES = {
    "_thread",
    "builtins",
    "ctypes",
    "fcntl",
    "importlib",
    "io",
    "mmap",
    "multiprocessing",
    "os",
    "resource",
    "secrets",
    "shutil",
    "subprocess",
    "tempfile",
    "time",
}
FORBIDDEN_NAMES = {
    "__import__",
    "asyncio.to_thread",
    "concurrent.futures.ProcessPoolExecutor",
    "concurrent.futures.ThreadPoolExecutor",
    "datetime.date.today",
    "datetime.datetime.now",
    "datetime.datetime.today",
    "datetime.datetime.utcnow",
    "open",
    "pathlib.Path.cwd",
    "pathlib.Path.home",
    "random.SystemRandom",
    "threading.Thread",
    "threading.Timer",
    "uuid.uuid1",
    "uuid.uuid4",
}
"""Names in full, as they are imported; used in any way, except as a type."""

READY_MADE = {"Machine", "REAL_FILES", "SYSTEM_CLOCK", "SystemClock", "Threads"}
"""The real machine and its parts: only defaults for callers that pass none."""

PATH_METHODS = {
    "absolute",
    "chmod",
    "exists",
    "expanduser",
    "glob",
    "hardlink_to",
    "is_dir",
    "is_file",
    "is_mount",
    "is_symlink",
    "iterdir",
    "lchmod",
    "lstat",
    "mkdir",
    "open",
    "read_bytes",
    "read_text",
    "readlink",
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
"""Methods of paths that access the disk; the disk's own methods of these names are permitted."""

DISKS = {"files", "REAL_FILES"}
OPENED = {"Store", "offsets", "syncer"}
"""Modules with their own function ``open``; each gets the machine's files."""

ALLOWED = {
    ("client/background.py", "turbopump.clock.SYSTEM_CLOCK"): (
        "blocking calls wait in the caller's thread, which virtual time does not reach"
    ),
    ("client/blocking.py", "turbopump.clock.SYSTEM_CLOCK"): (
        "the end of the process waits for what is being sent, in the main thread"
    ),
    ("client/offsets.py", "pathlib.Path.home"): (
        "a default for users, as in Apache RocketMQ; only builds a path"
    ),
    ("client/selectors.py", "random.choice"): (
        "a default for users, who may pass their own generator"
    ),
    ("store/__main__.py", "turbopump.machine.files.REAL_FILES"): "a command of its own",
}
"""The remaining exceptions, and why."""


def ways_around(source: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield what a source file takes directly from the operating system, and the lines."""
    names, types, defaults = _imported_names(source), _types(source), _defaults(source)
    for node in nodes(source):
        if isinstance(node, ast.Name | ast.Attribute) and node not in types:
            name = _full_name(node, names)
            is_ready_made = name.startswith("turbopump.") and name.split(".")[-1] in READY_MADE
            is_passed_around = is_ready_made and node not in defaults
            if name in FORBIDDEN_NAMES or is_passed_around or _is_global_chance(name):
                yield name, node.lineno
        if isinstance(node, ast.Call):
            called = _called_around(node, names)
            if called:
                yield called, node.lineno


def _imported_names(source: ast.Module) -> dict[str, str]:
    """Return the full names of a file's imported names."""
    found: dict[str, str] = {}
    for node in nodes(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                found[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def _full_name(node: ast.expr, names: dict[str, str]) -> str:
    """Return the full name of something imported or built in; empty for anything else."""
    first, _, rest = written(node).partition(".")
    full = names.get(first, first if first in FORBIDDEN_NAMES else "")
    return ".".join(filter(None, (full, rest))) if full else ""


def _is_global_chance(name: str) -> bool:
    """Whether it is a function of the process-wide random generator."""
    module, _, function = name.partition(".")
    return module == "random" and function[:1].islower()


def _called_around(node: ast.Call, names: dict[str, str]) -> str:
    """Return what a call requests from the operating system; empty if nothing."""
    called = written(node.func)
    owner, _, method = called.rpartition(".")
    owned_by = owner.rpartition(".")[2].lstrip("_")
    if not owner:
        # A generator without a seed.
        is_unseeded = _full_name(node.func, names) == "random.Random" and not node.args
        return called if is_unseeded else ""
    if method == "Random" and _full_name(node.func, names) == "random.Random" and not node.args:
        return called
    if method == "run_in_executor" and node.args:
        # The threads of asyncio itself.
        executor = node.args[0]
        return called if isinstance(executor, ast.Constant) and executor.value is None else ""
    if method == "replace":
        # Not of texts, which takes two, nor of structs and tables.
        return called if len(node.args) == 1 and not node.keywords else ""
    is_own = owned_by in DISKS or (method == "open" and owned_by in OPENED)
    return called if method in PATH_METHODS and not is_own else ""


def _types(source: ast.Module) -> set[ast.AST]:
    """Return the nodes of annotations."""
    found: list[ast.expr | None] = []
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(node.returns)
        elif isinstance(node, ast.arg | ast.AnnAssign):
            found.append(node.annotation)
    return {node for each in found if each is not None for node in ast.walk(each)}


def _defaults(source: ast.Module) -> set[ast.AST]:
    """Return the nodes of defaults, and of fallbacks for arguments that were not passed."""
    found: list[ast.expr | None] = []
    for node in nodes(source):
        match node:
            case ast.arguments():
                found += [*node.defaults, *node.kw_defaults]
            case ast.ClassDef():
                found += [each.value for each in node.body if isinstance(each, ast.AnnAssign)]
            case ast.BoolOp(ast.Or(), [ast.Name(), last]):
                found.append(last)
    return {node for each in found if each is not None for node in ast.walk(each)}


def used_modules(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)} & FORBIDDEN_MODULES


@pytest.mark.parametrize("part", PARTS)
def test_no_module_bypasses_the_machine(part: str) -> None:
    paths = modules(part)
    assert paths
    for path in paths:
        check_module(path)


def check_module(path: Path) -> None:
    used = used_modules(path)
    assert not used, f"{name_of(path)} imports {used}: use turbopump.machine"
    found = [
        f"line {line}: {what}"
        for what, line in ways_around(tree(path))
        if (name_of(path), what) not in ALLOWED
    ]
    assert not found, f"{name_of(path)}: {found}: use turbopump.machine"


def test_every_allowed_exception_is_used() -> None:
    for name, what in ALLOWED:
        assert what in {found for found, _ in ways_around(tree(SOURCE / name))}, (name, what)


@pytest.mark.parametrize(
    "source",
    [
        "open('x')",
        "path.open('rb')",
        "path.open()",
        "self._path.open(mode)",
        "(self.root / 'abort').exists()",
        "Path(text).read_text(encoding='utf-8')",
        "for each in directory.iterdir(): pass",
        "path.replace(other)",
        "(root / 'a').replace(root / 'b')",
        "path.chmod(0o600)",
        "path.is_symlink()",
        "path.readlink()",
        "from pathlib import Path; Path.home()",
        "from pathlib import Path; directory or Path.cwd()",
        "import pathlib; pathlib.Path.home()",
        "import threading; threading.Thread(target=run).start()",
        "import threading; threading.Timer(1, run).start()",
        "import threading\n class W(threading.Thread): pass",
        "from threading import Thread as T; T(target=run)",
        "import threading as t; t.Thread(target=run)",
        "from threading import Thread; kind = Thread",
        "from concurrent.futures import ThreadPoolExecutor; ThreadPoolExecutor()",
        "import concurrent.futures; concurrent.futures.ThreadPoolExecutor(1)",
        "import asyncio; await asyncio.to_thread(run)",
        "from asyncio import to_thread; await to_thread(run)",
        "await loop.run_in_executor(None, run)",
        "from datetime import datetime; datetime.now()",
        "from datetime import datetime as d; d.now(tz)",
        "import datetime; datetime.datetime.now()",
        "from datetime import datetime; datetime.utcnow()",
        "from datetime import datetime; datetime.today()",
        "from datetime import date; date.today()",
        "from datetime import datetime\n def g(now=datetime.now): pass",
        "from turbopump.clock import SYSTEM_CLOCK; SYSTEM_CLOCK.now_ms()",
        "from turbopump.clock import SYSTEM_CLOCK; self.clock = SYSTEM_CLOCK",
        "from turbopump import clock; clock.SYSTEM_CLOCK.now_ms()",
        "from turbopump.machine.files import REAL_FILES; REAL_FILES.exists(path)",
        "from turbopump.machine.files import REAL_FILES; read_file(REAL_FILES, path)",
        "from turbopump.machine import Machine; self.machine = Machine()",
        "from random import Random; Random()",
        "import random; random.Random()",
        "import random; random.random()",
        "from random import choice; choice(queues)",
        "import random; pick = random.choice",
        "from uuid import uuid4; uuid4()",
        "import uuid; uuid.uuid4().hex",
        "__import__('os').remove(path)",
    ],
)
def test_bypasses_are_detected(source: str) -> None:
    assert list(ways_around(ast.parse(f"async def f():\n {source}")))


@pytest.mark.parametrize(
    "source",
    ["import _thread", "from os import path", "import importlib", "import os.path as p"],
)
def test_forbidden_imports_are_detected(source: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert used_modules(path)


@pytest.mark.parametrize(
    "source",
    [
        "self._files.exists(path)",
        "files.rename(a, b)",
        "files.open(path)",
        "store = Store.open(x)",
        "text.replace('a', 'b')",
        "import dataclasses; dataclasses.replace(config, port=1)",
        "from msgspec import structs; structs.replace(header, flag=1)",
        "await loop.run_in_executor(self._threads, run)",
        "from random import Random; Random(seed)",
        "from random import Random; def_ = lambda random: random.choice([1])",
        "def g(random: Random): return random.choice([1])",
        "import threading; lock = threading.Lock()",
        "import threading; thread: threading.Thread | None = None",
        "from datetime import datetime; datetime.fromtimestamp(0)",
        "from turbopump.clock import SYSTEM_CLOCK\n def g(clock=SYSTEM_CLOCK): pass",
        "from turbopump.clock import SYSTEM_CLOCK\n def g(*, clock=SYSTEM_CLOCK): pass",
        "from turbopump.machine.files import REAL_FILES; self._files = files or REAL_FILES",
        "from turbopump.machine import Machine; machine = machine or Machine()",
        "from turbopump.machine.files import REAL_FILES\n class C:\n  files: Files = REAL_FILES",
    ],
)
def test_injected_objects_are_not_bypasses(source: str) -> None:
    assert not list(ways_around(ast.parse(f"async def f():\n {source}")))
