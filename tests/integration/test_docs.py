"""Checks everything the documentation shows: programs, commands with their output, links."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from commands import ready_addresses, started
from documents import DOCUMENTS, NAMESERVER, ROOT, Block, blocks, links, programs
from filter_processes import require_sandbox
from servers import standalone
from shells import wait_for

DEADLINE_S = 600
"""Much longer than any program takes, except on a busy machine."""

NOT_RUN = {
    "docs/adr/0010-conditions-on-properties-are-written-as-sql.md": 1,
    "docs/guide/django.md": 4,
    "docs/guide/spark-pipelines.md": 3,
    "docs/guide/spark-source.md": 1,
    "docs/guide/spark.md": 1,
    "docs/guide/transactions.md": 1,
}
"""How many programs of a page carry ``<!-- not run: reason -->``."""

FILES_OF_READERS = {
    *("shop.py", "billing.py", "test_billing.py", "conf.py", "manage.py"),
    *("shop/messages.py", "shop/management/commands/consume_orders.py"),
}
"""The files that tutorials and guides tell readers to write."""


def is_special(block: Block) -> bool:
    """Whether another test runs it: `tests/spark`, `test_pytest_plugin.py`, or one below."""
    return block.is_for_spark or block.is_for_the_cpp_client or block.has_tests or block.waits


def quick_for_readme(programs: list[Block]) -> list[ParameterSet]:
    """Mark all programs except the README's as slow: each is a process."""
    return [
        pytest.param(
            block,
            id=str(block),
            marks=[] if block.page == "README.md" else pytest.mark.slow,
        )
        for block in programs
    ]


@pytest.fixture(scope="module")
def nameserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    # With a filter server, for the programs that filter by code.
    directory = tmp_path_factory.mktemp("documents")
    with standalone(directory, {"filterServerNums": "1"}) as server:
        yield server.nameserver


def written(block: Block, directory: Path, nameserver: str) -> Path:
    """Write a program to a file, since code filters are sent by their source."""
    file = directory / "test_program.py"
    file.write_text(block.text.replace(NAMESERVER, nameserver), encoding="utf-8")
    return file


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "HOME": str(directory)},
        check=False,
    )


def test_programs_that_are_not_run_say_why() -> None:
    found: dict[str, int] = {}
    for block in blocks("python"):
        if block.reason is not None:
            assert len(block.reason.split()) > 2, f"{block}: {block.reason!r} is too short a reason"
            found[block.page] = found.get(block.page, 0) + 1
    assert found == NOT_RUN


@pytest.mark.parametrize("block", quick_for_readme(programs(lambda block: not is_special(block))))
def test_programs_run(block: Block, nameserver: str, tmp_path: Path) -> None:
    if "CodeFilter" in block.text:
        require_sandbox()
    done = run(tmp_path, "-W", "error", str(written(block, tmp_path, nameserver)))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("block", programs(lambda block: block.waits), ids=str)
def test_programs_that_wait_end_by_a_signal(block: Block, nameserver: str, tmp_path: Path) -> None:
    file = written(block, tmp_path, nameserver)
    with subprocess.Popen([sys.executable, "-W", "error", file], cwd=tmp_path) as process:
        try:
            wait_for(lambda: catches(process.pid, signal.SIGTERM))
            process.terminate()
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    (mask,) = re.findall(r"^SigCgt:\t([0-9a-f]+)$", status, re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.slow
@pytest.mark.parametrize("block", programs(lambda block: block.is_for_the_cpp_client), ids=str)
def test_programs_for_the_cpp_client_run(block: Block, tmp_path: Path) -> None:
    options = ("--dir", str(tmp_path), "--nameserver-port", "0", "--broker-port", "0")
    with started(tmp_path, "standalone", *options) as process:
        nameserver = ready_addresses(process)["nameserver"]
        done = run(tmp_path, str(written(block, tmp_path, nameserver)))
        process.terminate()
    assert done.returncode == 0, done.stderr
    assert "OK" in done.stdout or "0" in done.stdout.split()


@pytest.mark.slow
def test_first_example_consumes_what_it_sends(tmp_path: Path) -> None:
    """It is what users copy: run on a fresh cluster, then again when its group exists."""
    block = programs(lambda block: block.page == "README.md")[0]
    assert len(block.text.splitlines()) < 25
    with standalone(tmp_path) as server:
        for _ in range(2):
            done = run(tmp_path, "-W", "error", str(written(block, tmp_path, server.nameserver)))
            assert done.returncode == 0, done.stderr
            stored, consumed = done.stdout.splitlines()
            assert stored.startswith("stored in orders@")
            assert consumed == """created ['42'] b'{"order": 42}'"""


def shown_commands() -> list[tuple[str, str, str]]:
    """Return location, command and output of the commands that a document shows with output."""
    found = []
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            if re.search(r"python -m turbopump\.(wire|filters)", command) and "…" not in command:
                found.append((str(block), command, output))
    return found


COMMANDS = shown_commands()


@pytest.mark.parametrize(("place", "command", "output"), COMMANDS, ids=[c[0] for c in COMMANDS])
def test_commands_print_what_is_shown(place: str, command: str, output: str) -> None:
    typed, _, program = command.partition(" | ")
    shown = shlex.split(typed)[1:]
    arguments = shlex.split(program)[1:]
    done = subprocess.run(
        [sys.executable, *arguments],
        input=" ".join(shown) + "\n",
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.stdout + done.stderr == output, place


def test_links_lead_somewhere() -> None:
    found = [(path, link) for path in DOCUMENTS for link in links(path)]
    assert found
    assert not [(path, link) for path, link in found if not (path.parent / link).exists()]


def test_modules_that_are_named_exist() -> None:
    """Pages name modules by the end of their path, so a rename must update them."""
    existing = {part for source in sources() for part in ends_of(source)}
    for path in DOCUMENTS:
        named = set(re.findall(r"\b([a-z_0-9/]+\.py)\b", path.read_text(encoding="utf-8")))
        assert not named - existing - FILES_OF_READERS, path


def test_tests_that_are_named_exist() -> None:
    """A guarantee names the tests behind it: a file's, then others of the same file by name."""
    missing, count = [], 0
    for path in DOCUMENTS:
        for line in path.read_text(encoding="utf-8").splitlines():
            file = ""
            for named, name in re.findall(r"`(?:([\w/]+\.py)(?:::)?)?(test_\w+)?`", line):
                file = named or file
                count += bool(name)
                if file and name and f"def {name}(" not in text_of_test(file):
                    missing.append((path.name, file, name))
    assert count
    assert not missing


@cache
def text_of_test(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def ends_of(path: str) -> Iterator[str]:
    """Yield the file's name, and each longer end of its path."""
    parts = path.split("/")
    return ("/".join(parts[at:]) for at in range(1, len(parts)))


@cache
def sources() -> list[str]:
    folders = ("src", "tests", "benchmarks", "examples")
    files = (file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return [*map(str, files), str(ROOT / "hatch_build.py")]


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(path: Path, tmp_path: Path) -> None:
    done = run(tmp_path, str(path))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_diagrams_are_drawn_while_the_site_is_built(tmp_path: Path) -> None:
    drawn = blocks("mermaid")
    pages = "\n".join(f"```mermaid\n{block.text}```\n" for block in drawn)
    (tmp_path / "index.md").write_text(f"# Diagrams\n\n{pages}", encoding="utf-8")
    options = ("--fail-on-warning", "--quiet", "--conf-dir", str(ROOT / "docs"))
    done = run(tmp_path, "-m", "sphinx", *options, str(tmp_path), str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert page.count('<figure class="diagram"><svg') == len(drawn) > 0
    assert not re.findall(r"<(?:script|link|img)[^>]+https?://[^>]*>", page), "needs a network"


@pytest.mark.parametrize(
    "path",
    [*sorted((ROOT / "docs").rglob("*.svg")), *sorted((ROOT / "docs").rglob("*.css"))],
    ids=lambda p: p.name,
)
def test_pictures_and_styles_need_no_network(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.findall(r"""(?:url\(|href=|src=|@import)\s*["']?(?:https?:)?//[^"')]*""", text)


def test_every_dependency_is_justified() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = project[project.index("dependencies = [") : project.index("[tool.")]
    names = set(re.findall(r'"([a-z0-9-]+)(?:\[[a-z,]+\])?[><=;,! ]', section))
    missing = {name for name in names if not re.search(rf"\b{re.escape(name)}\b", text)}
    assert names
    assert not missing
