"""``benchmarks/run``: what it makes of results, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MACHINE = {"cpus": 2, "python": "3.11", "load_average": 0.5}


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("compare_report")


def result(rate: float, **others: float) -> dict[str, Any]:
    keys = ("bytes", "client_cpu_us", "watched_cpu_us", "p50_ms", "p99_ms")
    return {"messages_per_second": rate, **dict.fromkeys(keys), **others}


def sends(report: Any, system: str, *rates: float) -> Any:
    return report.Measured(report.Case("send", system, 1), [result(rate) for rate in rates])


def test_ratios_are_of_each_round(report: Any) -> None:
    bare = sends(report, "bare frames", 100, 1000, 100)
    ours = sends(report, "turbopump asyncio", 95, 900, 80)
    assert ours.ratio_to(bare) == 0.9
    value = ours.as_json([bare, ours])
    assert (value["median"], value["min"], value["max"]) == (95, 80, 900)
    assert value["to_bare_frames"] == 0.9


def test_targets_are_met_from_both_sides(report: Any) -> None:
    bare = sends(report, "bare frames", 100)
    ours, threads = sends(report, "turbopump asyncio", 90), sends(report, "turbopump threads", 74)
    case = report.Case("latency", "turbopump asyncio", 200)
    latency = report.Measured(case, [result(200, p50_ms=0.4, p99_ms=1.1)])
    found = {each.name: each.is_met for each in report.targets([bare, ours, threads, latency])}
    assert found == {
        "send, turbopump asyncio, 1 in flight, relative to bare frames": True,
        "send, turbopump threads, 1 in flight, relative to bare frames": False,
        "latency, turbopump asyncio, 200 per second, p50 ms": True,
        "latency, turbopump asyncio, 200 per second, p99 ms": False,
    }


def test_what_is_absent_is_printed(report: Any, capsys: pytest.CaptureFixture[str]) -> None:
    measured = [sends(report, "bare frames", 100)]
    report.print_report(measured, {"nats": "not installed: program nats-server"}, MACHINE)
    assert "absent: nats (not installed: program nats-server)\n" in capsys.readouterr().out


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "compare.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_unknown_work_is_refused() -> None:
    done = run("--only", "sending")
    assert done.returncode == 2
    known = "send,batch,batch32,drain,orderly,latency,recovery"
    assert f"expected some of {known}, got 'sending'" in done.stderr


def test_sizes_are_compared_with_the_same_size(report: Any) -> None:
    bare = [
        report.Measured(report.Case("send", "bare frames", 1, size), [result(rate)])
        for size, rate in ((128, 100), (1024, 50))
    ]
    ours = report.Measured(report.Case("send", "turbopump asyncio", 1, 1024), [result(40)])
    assert ours.as_json([*bare, ours])["to_bare_frames"] == 0.8
    assert ours.case.name == "send, turbopump asyncio, 1024 B, 1 in flight"
    assert report.targets([*bare, ours]) == []


@pytest.mark.slow
def test_a_short_run_writes_json_and_a_plot(tmp_path: Path) -> None:
    amounts = ("--rounds=1", "--seconds=0.05", "--warm-up=0", "--backlog=1000")
    files = (f"--json={tmp_path / 'out.json'}", f"--plot={tmp_path / 'out.svg'}")
    done = run("--only=batch,latency", "--peers=", *amounts, *files)
    assert done.returncode == 0, done.stderr
    value = json.loads((tmp_path / "out.json").read_text())
    assert value["absent"].keys() >= {"nats", "redis", "rabbitmq"}
    systems = {(case["work"], case["system"], case["level"]) for case in value["cases"]}
    assert systems >= {("batch", "bare frames", 8), ("latency", "turbopump threads", 200)}
    assert all(len(case["rounds"]) == 1 for case in value["cases"])
    assert all(case["rounds"][0]["client_cpu_us"] > 0 for case in value["cases"])
    assert {target["is_met"] for target in value["targets"]} <= {True, False}
    assert "absent: redis (left out with --peers)" in done.stdout
    assert (tmp_path / "out.svg").read_text().startswith("<?xml")
