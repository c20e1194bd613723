"""``turbopump bench`` against two brokers on real sockets; the figures are not checked."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from shells import GUIDE, Shell
from turbopump.admin import Admin

TOPIC = "bench"


@pytest.fixture(scope="module", autouse=True)
def topic(nameserver: str) -> None:
    with Admin(nameserver) as admin:
        admin.topics.create(TOPIC, queues=2)


def bench(shell: Shell, line: str) -> dict[str, Any]:
    """Return what a command measured; the guide documents all keys."""
    value: dict[str, Any] = json.loads(shell.ok(f"bench {line} --json"))
    section = GUIDE.read_text().partition("\n## `turbopump bench`\n")[2].partition("\n### ")[0]
    assert {key for key in value if f"`{key}`" not in section} == set()
    return value


def stored(shell: Shell) -> int:
    with Admin(shell.nameserver) as admin:
        return admin.topics.status(TOPIC).messages


@pytest.mark.parametrize("mode", ["asyncio", "threads"])
@pytest.mark.parametrize("batch", [1, 16])
def test_every_counted_message_is_stored(shell: Shell, mode: str, batch: int) -> None:
    before = stored(shell)
    options = f"--mode {mode} --batch {batch} --concurrency 4 --count 50 --size 64 --warm-up 0"
    found = bench(shell, f"produce {TOPIC} {options} --cpu-of {os.getpid()}")
    assert (found["messages"], found["bytes"]) == (50, 50 * 64)
    assert stored(shell) - before == 50
    assert 0 < found["p50_ms"] <= found["p99_ms"] <= found["max_ms"]
    assert found["messages_per_second"] == pytest.approx(50 / found["seconds"], rel=0.01)
    assert found["client_cpu_us"] > 0
    assert found["watched_cpu_us"] is not None


def test_producing_for_a_time_after_a_warm_up(shell: Shell) -> None:
    before = stored(shell)
    found = bench(shell, f"produce {TOPIC} --concurrency 2 --seconds 0.1 --warm-up 0.1")
    assert found["seconds"] >= 0.1
    assert 0 < found["messages"] < stored(shell) - before, "the warm-up is not counted"


@pytest.mark.parametrize("options", ["--mode asyncio", "--mode threads --batch 32", "--orderly"])
def test_a_backlog_is_consumed_once_by_a_group_that_is_deleted(shell: Shell, options: str) -> None:
    bench(shell, f"produce {TOPIC} --batch 16 --count 160 --warm-up 0")
    count = stored(shell)
    found = bench(shell, f"consume {TOPIC} --warm-up 0 {options}")
    assert found["messages"] == count
    with Admin(shell.nameserver) as admin:
        groups = [each.settings.group for each in admin.groups.list()]
    assert not [group for group in groups if "bench" in group]


def test_latency_of_each_message(shell: Shell) -> None:
    found = bench(shell, f"latency {TOPIC} --rate 100 --seconds 0.2 --warm-up 0.05")
    assert (found["messages"], found["rate"]) == (20, 100.0)
    assert 0 < found["p50_ms"] <= found["max_ms"]


def test_results_are_a_table_for_people(shell: Shell) -> None:
    printed = shell.ok(f"bench produce {TOPIC} --count 10 --warm-up 0 --concurrency 2")
    title, row, summary = printed.splitlines()
    assert title.split()[:3] == ["MESSAGES", "SECONDS", "MESSAGES/S"]
    assert row.split()[0] == "10"
    assert summary == (
        "produce bench: 1 client process, mode asyncio, concurrency 2, batch 1, size_bytes 128."
    )


@pytest.mark.slow
def test_several_processes_share_the_work(shell: Shell) -> None:
    before = stored(shell)
    found = bench(shell, f"produce {TOPIC} --processes 2 --batch 8 --count 64 --warm-up 0")
    assert (found["messages"], found["processes"]) == (64, 2)
    assert stored(shell) - before == 64
    found = bench(shell, f"consume {TOPIC} --processes 2 --warm-up 0")
    assert found["messages"] == stored(shell)


@pytest.mark.slow
def test_an_error_of_one_of_several_processes_is_reported(shell: Shell) -> None:
    size = 64 * 1024 * 1024
    failed = shell.run(f"bench produce {TOPIC} --processes 2 --size {size} --count 2 --warm-up 0.1")
    assert failed.exit_code != 0
    assert str(size) in failed.stderr


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("produce missing", "there is no topic 'missing'"),
        ("produce bench --seconds 1 --count 1", "specify --seconds or --count, not both"),
        ("produce bench --seconds 0", "seconds must be more than 0 and at most 86400, got 0.0"),
        ("produce bench --count 0", "count must be at least 1, got 0"),
        ("produce bench --warm-up -1", "warm-up must be 0–3600 seconds, got -1.0"),
        ("produce bench --concurrency 0", "concurrency must be 1–10000, got 0"),
        ("produce bench --batch 0", "batch must be 1–10000, got 0"),
        ("produce bench --size -1", "size must be at least 0, got -1"),
        ("produce bench --size 99999999 --count 1", "99999999"),
        ("produce bench --cpu-of 99999999", "no process has the id 99999999"),
        ("consume missing", "there is no topic 'missing'"),
        ("consume bench --processes 9", "--processes must be 1–4, got 9: bench has 4 queues"),
        ("consume empty", "topic empty has no messages"),
        ("latency bench --size 15", "size must be at least 16, got 15"),
        ("latency bench --rate 0", "rate must be more than 0 and at most 10000, got 0.0"),
    ],
)
def test_invalid_input_is_rejected_with_a_clear_message(
    shell: Shell, line: str, error: str
) -> None:
    if "empty" in line:
        shell.ok("topic create empty --queues 1")
    failed = shell.run(f"bench {line}")
    assert failed.exit_code in (1, 2), failed.output
    assert error in failed.stderr
    assert failed.stdout == ""
