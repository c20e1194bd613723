"""``benchmarks/run``: that it runs, and how it reports results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from turbopump.testing.server import RunningServer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CORE_IS_CHOSEN = "TURBOPUMP_CORE" in os.environ
MACHINE = {"cpus": 2, "python": "3.11", "load_average": 0.5}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return a function that imports a benchmark module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module


@pytest.fixture
def report(benchmark: Callable[[str], Any]) -> Any:
    return benchmark("compare_report")


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
    assert (value["base"], value["to_base"]) == ("bare frames", 0.9)


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


def test_absent_peers_are_printed(report: Any, capsys: pytest.CaptureFixture[str]) -> None:
    measured = [sends(report, "bare frames", 100)]
    report.print_report(measured, {"nats": "not installed: program nats-server"}, MACHINE)
    assert "absent: nats (not installed: program nats-server)\n" in capsys.readouterr().out


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "compare.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_an_unknown_workload_is_rejected() -> None:
    done = run("--only", "sending")
    assert done.returncode == 2
    known = "send,batch,batch32,drain,orderly,latency,recovery,source,sink"
    assert f"expected some of {known}, got 'sending'" in done.stderr


def test_an_unknown_peer_is_rejected() -> None:
    done = run("--peers", "nats,kafka")
    assert done.returncode == 2
    assert "expected some of nats,redis,rabbitmq, got 'kafka'" in done.stderr


def test_sizes_are_compared_with_the_same_size(report: Any) -> None:
    bare = [
        report.Measured(report.Case("send", "bare frames", 1, size), [result(rate)])
        for size, rate in ((128, 100), (1024, 50))
    ]
    ours = report.Measured(report.Case("send", "turbopump asyncio", 1, 1024), [result(40)])
    assert ours.as_json([*bare, ours])["to_base"] == 0.8
    assert ours.case.name == "send, turbopump asyncio, 1024 B, 1 in flight"
    assert report.targets([*bare, ours]) == []


def test_cores_are_compared_with_the_same_core(report: Any) -> None:
    def measured(system: str, rate: float, core: str) -> Any:
        return report.Measured(report.Case("send", system, 1, 128, core), [result(rate)])

    every = [
        measured(system, rate, core)
        for system, rates in (("bare frames", (100, 20)), ("turbopump asyncio", (95, 10)))
        for rate, core in zip(rates, ("", "plain"), strict=True)
    ]
    assert [report.to_base(each, every) for each in every] == ["", "", "0.95", "0.50"]
    assert every[-1].case.name == "send, turbopump asyncio, plain core, 1 in flight"
    assert [target.found for target in report.targets(every)] == [0.95]
    assert report.from_json(report.as_json(every)) == every


def test_rows_of_spark_are_compared_with_what_its_interface_can_do(report: Any) -> None:
    rates = {
        "ready rows": 100,
        "turbopump": 70,
        "ready rows, 64 to 192 B": 200,
        "turbopump, 64 to 192 B": 100,
    }
    measured = [
        report.Measured(report.Case("source", system, 2), [result(rate)])
        for system, rate in rates.items()
    ]
    found = {each.name: (each.found, each.is_met) for each in report.targets(measured)}
    assert found == {
        "source, turbopump, 2 cores, relative to ready rows": (0.7, True),
        "source, turbopump, 64 to 192 B, 2 cores, relative to ready rows": (0.5, False),
    }


def test_a_spark_query_is_a_round_like_any_other(
    report: Any, benchmark: Callable[[str], Any]
) -> None:
    spark, queries = benchmark("compare_spark"), benchmark("spark_queries")
    asked = []

    class Spark:
        def measure(self, *request: object) -> Any:
            asked.append(request)
            return queries.Result(
                rows=1000, seconds=0.5, jvm_s=0.004, python_s=0.001, broker_s=0.002
            )

    bodies = queries.Bodies(128, 128)
    case = report.Case("source", "turbopump", 2)
    found = spark.SparkRun(case, Spark(), bodies, "topic").measure()
    assert asked == [("read", bodies, "topic")]
    assert found.keys() >= result(0).keys()
    assert (found["messages_per_second"], found["bytes"]) == (2000, 128_000)
    costs = (found["client_cpu_us"], found["jvm_cpu_us"], found["watched_cpu_us"])
    assert costs == (5, 4, 2)


def test_the_command_in_documents_names_no_files(
    benchmark: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = benchmark("compare")
    chosen = ["--rounds", "5", "--seconds", "1", "--only", "send,drain", "--peers", ""]
    monkeypatch.setattr(sys, "argv", ["run", *chosen, "--json", "results/out.json"])
    command = compare.command_of(compare.parsed())
    assert command == "benchmarks/run --rounds 5 --only send,drain --peers ''"


def test_growth_has_a_title_for_every_kind(benchmark: Callable[[str], Any]) -> None:
    growth = benchmark("growth")
    assert growth.TITLES.keys() == growth.ADDING.keys()
    sizes = [growth.Size(count, 20.0, 2.0 * count, 100) for count in (1, 10, 100)]
    assert growth.tables({"topics": sizes})["growth"].splitlines()[-1] == (
        "| topics | 1 · 100 | 20.0 · 20.0 | 0.00 | 1.00 |"
    )


def test_results_are_read_again(report: Any) -> None:
    measured = [sends(report, "bare frames", 100, 90), sends(report, "turbopump asyncio", 95, 80)]
    value = json.loads(json.dumps(report.as_json(measured)))
    assert report.from_json(value) == measured


def test_tables_are_written_into_the_documents(
    report: Any, benchmark: Callable[[str], Any], tmp_path: Path
) -> None:
    docs, measure = benchmark("compare_docs"), benchmark("measure")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "docs").mkdir()
    block = "<!-- figures: {} -->\n\nold\n\n<!-- end of figures -->\n"
    for name in measure.DOCUMENTS:
        (tmp_path / name).write_text("Before.\n")
    readme = tmp_path / "README.md"
    readme.write_text(f"Before.\n{block.format('sends')}Between.\n{block.format('drains')}After.\n")
    measured = [sends(report, "bare frames", 7982), sends(report, "turbopump asyncio", 7680)]
    texts = docs.blocks(measured, {"command": "benchmarks/run --only send"})
    assert measure.update_docs(texts, tmp_path) == [readme]
    assert readme.read_text() == (
        "Before.\n<!-- figures: sends -->\n\n"
        "| sends per second, waiting for each acknowledgement "
        "| 1 in flight | 8 in flight | 32 in flight | 512 in flight |\n"
        "|---|---:|---:|---:|---:|\n"
        "| Turbopump, asyncio | 7,680 |  |  |  |\n"
        "| bare frames, without client features | 7,982 |  |  |  |\n"
        f"\n<!-- end of figures -->\nBetween.\n{block.format('drains')}After.\n"
    )
    assert measure.update_docs(texts, tmp_path) == []


def test_the_chart_has_a_bar_for_each_measured_system(
    report: Any, benchmark: Callable[[str], Any], tmp_path: Path
) -> None:
    charts, path = benchmark("compare_chart"), tmp_path / "chart.svg"
    rates = {("send", "turbopump asyncio", 32): 2000.4, ("send", "nats", 32): 1000}
    measured = [report.Measured(report.Case(*case), [result(rates[case])]) for case in rates]
    charts.write_chart(measured, path)
    assert not path.exists(), "this run has no figures for one of the panels"
    drained = report.Case("drain", "turbopump asyncio", 1)
    charts.write_chart([*measured, report.Measured(drained, [result(5000)])], path)
    assert re.findall(r">([^<]+)</text>", path.read_text()) == [
        "sends per second, 32 in flight, each acknowledged",
        *("Turbopump", "2,000", "NATS JetStream", "1,000"),
        "consuming a backlog, messages per second, one per call",
        *("Turbopump", "5,000"),
    ]
    assert re.findall(r'class="(?:ours|other)" .* width="(\d+)"', path.read_text()) == [
        *("470", "235", "470")
    ]


def test_the_chart_of_the_readme_shows_the_figures_of_the_tables(
    benchmark: Callable[[str], Any],
) -> None:
    charts, report = benchmark("compare_chart"), benchmark("compare_report")
    tables = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([^|]+) \| ([\d,]+) \| [^|]*–", tables, re.MULTILINE))
    shown = re.findall(r'<text x="\d+" y="\d+">([\d,]+)<', charts.CHART.read_text())
    titles = ("send, 32 in flight", "draining, 1 per call")
    named = [f"{title}: {system}" for title in titles for system in charts.SYSTEMS.values()]
    assert shown == [rows[name] for name in named if name in rows]
    assert report.ASYNCIO in named[0]


def test_documents_have_every_table(benchmark: Callable[[str], Any]) -> None:
    documents = benchmark("measure").DOCUMENTS
    text = "".join((BENCHMARKS.parent / name).read_text() for name in documents)
    named = set(re.findall(r"<!-- figures: ([a-z-]+) -->", text))
    compared = {"command", "sends", "drains", "latency", "spark", "results", "targets"}
    assert named == compared | {"growth", "idle-memory", "broker-processes"}
    assert text.count("<!-- figures: ") == text.count("<!-- end of figures -->")


def test_rabbitmq_runs_as_the_caller_with_files_and_ports_of_its_own(
    benchmark: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = benchmark("peer_servers")
    # Debian's wrapper on the PATH switches to a user that may not write to our directory.
    for place in ("wrapper", "own"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "rabbitmq-server").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "wrapper"))
    monkeypatch.setattr(servers, "RABBITMQ_DIRECTORY", str(tmp_path / "own"))
    rabbitmq = servers.PEER_SERVERS["rabbitmq"]
    assert rabbitmq.command("/data", 5000) == [str(tmp_path / "own" / "rabbitmq-server")]
    settings = rabbitmq.environment("/data", 5000)
    assert {settings[f"RABBITMQ_{name}_BASE"] for name in ("MNESIA", "LOG")} == {"/data"}
    ports = {"RABBITMQ_NODE_PORT", "RABBITMQ_DIST_PORT", "ERL_EPMD_PORT"}
    assert len({settings[name] for name in ports}) == len(ports)
    assert settings["ERL_EPMD_PORT"] != "4369"


@pytest.mark.slow
def test_other_benchmarks_are_run_by_name() -> None:
    done = subprocess.run(
        [str(BENCHMARKS / "run"), "growth", "--help"], capture_output=True, text=True, check=False
    )
    assert "--backlog-gib" in done.stdout, done.stderr
    done = subprocess.run(
        [str(BENCHMARKS / "run"), "core", "--seconds=0", "--only=frames"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "| frames: cut, send headers read | " in done.stdout, done.stderr
    done = subprocess.run(
        [str(BENCHMARKS / "run"), "nothing"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "no benchmark is called nothing" in done.stderr


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
    cores = {"", "plain"} if value["machine"]["core"] == "compiled" else {""}
    assert {case["core"] for case in value["cases"]} == ({""} if CORE_IS_CHOSEN else cores)
    assert all(len(case["rounds"]) == 1 for case in value["cases"])
    assert all(case["rounds"][0]["client_cpu_us"] > 0 for case in value["cases"])
    assert {target["is_met"] for target in value["targets"]} <= {True, False}
    assert "absent: redis (left out with --peers)" in done.stdout
    assert (tmp_path / "out.svg").read_text().startswith("<?xml")


@pytest.mark.slow
def test_thousands_of_queues_are_measured_with_few(turbopump_server: RunningServer) -> None:
    # In a separate process: the sessions of Spark's readers live as long as their process.
    program = f"""
import json, os, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import spark_queues as many
from turbopump.net.loop import run
many.ROUNDS, many.SETTLED_S = 1, float("inf")
nameserver = {turbopump_server.nameserver!r}
run(many.create_topic(nameserver, "many", 20))
run(many.send_to_each(nameserver, "many", range(20), many.EACH))
asked = nameserver, os.getpid(), "many", 20
print(json.dumps([*many.read_results(*asked), *many.look_results(*asked, (0, 20))]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [what for what, _, _ in rows] == [
        "20 ranges of 2 messages in 1 tasks, µs a row",
        "20 ranges of 2 messages in 1 tasks, by tag, µs a row",
        "20 ranges of 2 messages in 1 tasks, by SQL, µs a row",
        "look at 20 queues, 0 with new messages, ms",
        "look at 20 queues, 20 with new messages, ms",
    ]
    assert all(float(here) > 0 for _, here, _ in rows)
