"""What the documents show is run: programs, commands with their output, the demo, links."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from commands import ready_addresses, started
from documents import DOCUMENTS, NAMESERVER, ROOT, Block, blocks, is_for_spark, is_whole, links
from filter_processes import require_sandbox
from servers import standalone

PROGRAMS = [
    (place, program)
    for place, program in blocks("python")
    if NAMESERVER not in program and not is_for_spark(program)
]
FOR_A_CLUSTER = [
    (place, program)
    for place, program in blocks("python")
    if NAMESERVER in program
    and "rocketmq.client" not in program
    and is_whole(program)
    and not is_for_spark(program)
]
FOR_THE_CPP_CLIENT = [block for block in blocks("python") if "rocketmq.client" in block[1]]


def quick_for_readme(programs: list[Block]) -> list[ParameterSet]:
    """Leave all but the README's to the slow tests: each is a process."""
    return [
        pytest.param(
            place, program, id=place, marks=[] if place.startswith("README") else pytest.mark.slow
        )
        for place, program in programs
    ]


@pytest.mark.parametrize(("place", "program"), quick_for_readme(PROGRAMS))
def test_programs_run(place: str, program: str, tmp_path: Path) -> None:
    if not is_whole(program):
        # A sketch of a few lines: its names are those of whole programs and of the tests.
        return
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{place}: {done.stderr}"


@pytest.fixture(scope="module")
def nameserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    # With a filter server, for the programs that filter by code.
    directory = tmp_path_factory.mktemp("documents")
    with standalone(directory, {"filterServerNums": "1"}) as server:
        yield server.nameserver


@pytest.mark.parametrize(("place", "program"), quick_for_readme(FOR_A_CLUSTER))
def test_programs_for_a_cluster_run(
    place: str, program: str, nameserver: str, tmp_path: Path
) -> None:
    if "CodeFilter" in program:
        require_sandbox()
    # A file, as code filters are sent by their source.
    file = tmp_path / "program.py"
    file.write_text(program.replace(NAMESERVER, nameserver), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{place}: {done.stderr}"


def test_first_example_consumes_what_it_sends(tmp_path: Path) -> None:
    """It is what people copy: on a fresh cluster, and once more on one that knows its group."""
    program = next(text for place, text in blocks("python") if place.startswith("README.md"))
    assert len(program.splitlines()) < 25
    with standalone(tmp_path) as server:
        for _ in range(2):
            done = subprocess.run(
                [
                    sys.executable,
                    "-W",
                    "error",
                    "-c",
                    program.replace(NAMESERVER, server.nameserver),
                ],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            stored, consumed = done.stdout.splitlines()
            assert stored.startswith("stored in orders@")
            assert consumed == """created ['42'] b'{"order": 42}'"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [text for _, text in FOR_THE_CPP_CLIENT])
def test_programs_for_the_cpp_client_run(program: str, tmp_path: Path) -> None:
    options = ("--dir", str(tmp_path), "--nameserver-port", "0", "--broker-port", "0")
    with started(tmp_path, "standalone", *options) as process:
        nameserver = ready_addresses(process)["nameserver"]
        done = subprocess.run(
            [sys.executable, "-c", program.replace(NAMESERVER, nameserver)],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "HOME": str(tmp_path)},
            check=False,
        )
        process.terminate()
    assert done.returncode == 0, done.stderr
    assert "OK" in done.stdout or "0" in done.stdout.split()


def shown_commands() -> list[tuple[str, str, str]]:
    """Return place, command and output of the commands that a document shows with their output."""
    found = []
    for place, text in blocks("console"):
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            if "python -m turbopump.wire" in command and "…" not in command:
                found.append((place, command, output))
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
        timeout=60,
        check=False,
    )
    assert done.stdout + done.stderr == output, place


@pytest.mark.parametrize("path", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_links_lead_somewhere(path: Path) -> None:
    broken = [link for link in links(path) if not (path.parent / link).exists()]
    assert not broken


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(path: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_dependency_is_justified() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = project[project.index("dependencies = [") : project.index("[tool.")]
    names = set(re.findall(r'"([a-z0-9-]+)(?:\[[a-z,]+\])?[><=;,! ]', section))
    missing = {name for name in names if not re.search(rf"\b{re.escape(name)}\b", text)}
    assert names
    assert not missing
