"""The tables of a run, as shown in the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compare_report import (
    ASYNCIO,
    BARE,
    LEVEL,
    TARGET_COLUMNS,
    THREADS,
    TWO,
    USUAL_BYTES,
    Case,
    Measured,
    find,
    number,
    rate,
    spread,
    target_rows,
    to_base,
)
from measure import table

SENDERS = {
    "Turbopump, asyncio": ASYNCIO,
    "Turbopump, blocking, as many threads": THREADS,
    "C++ client with its Python binding, threads": "C++ client",
    "NATS JetStream, asyncio": "nats",
    "Redis Streams, asyncio": "redis",
    "RabbitMQ, asyncio": "rabbitmq",
    "bare frames, without client features": BARE,
}
CONSUMERS = {
    "Turbopump, asyncio": ASYNCIO,
    "Turbopump, threads": THREADS,
    "Turbopump, asyncio, 2 processes of a group": TWO,
    "NATS JetStream, each message acknowledged": "nats",
    "Redis Streams, each message acknowledged": "redis",
    "RabbitMQ, each message acknowledged": "rabbitmq",
}
TITLES = {"batch": "batches of 16", "batch32": "batches of 32", "drain": "draining"}
TITLES |= {"orderly": "draining in order", "source": "Spark source", "sink": "Spark sink"}


def blocks(every: Sequence[Measured], machine: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each block for which this run has figures."""
    found = {
        "command": f"```console\n$ {machine['command']}\n```",
        "sends": _by_level(every, "send", SENDERS, (1, 8, 32, 512)),
        "drains": _by_level(every, "drain", CONSUMERS, (1, 32)),
        "latency": _latency(every),
        "spark": _spark(every),
        "results": _results(every),
        "targets": table(TARGET_COLUMNS, target_rows(every)) if target_rows(every) else "",
    }
    return {name: text for name, text in found.items() if text}


def _by_level(
    every: Sequence[Measured], work: str, systems: Mapping[str, str], levels: Sequence[int]
) -> str:
    """Return messages per second, by system and level."""
    rows = []
    for title, system in systems.items():
        cells = [find(every, work, system, level) for level in levels]
        if any(cells):
            rows.append([title, *("" if each is None else rate(each) for each in cells)])
    if not rows:
        return ""
    titles = {
        "send": ("sends per second, waiting for each acknowledgement", "in flight"),
        "drain": ("consuming a backlog, messages per second", "per call"),
    }
    title, unit = titles[work]
    return table([title, *(f"{level} {unit}" for level in levels)], rows)


def _latency(every: Sequence[Measured]) -> str:
    parts = [
        f"p50 {number(each.median('p50_ms'), 2)} ms, p99 {number(each.median('p99_ms'), 2)} ms "
        f"({each.case.system.removeprefix('turbopump ')})"
        for each in every
        if each.case.work == "latency" and each.case.size == USUAL_BYTES and not each.case.core
    ]
    text = "From send to listener at 200 messages per second: "
    return text + "; ".join(parts) + "." if parts else ""


def _spark(every: Sequence[Measured]) -> str:
    rows = [
        [_named(each.case), rate(each), spread(each), *_costs(each), to_base(each, every)]
        for each in every
        if each.case.work in {"source", "sink"}
    ]
    columns = ["Spark, 2 cores shared with the broker", "rows/s", "spread", "JVM µs", "Python µs"]
    return table([*columns, "broker µs", "of ready rows or counting"], rows) if rows else ""


def _costs(measured: Measured) -> list[str]:
    keys = ("jvm_cpu_us", "python_cpu_us", "watched_cpu_us")
    return [number(measured.median(key), 2) for key in keys]


def _results(every: Sequence[Measured]) -> str:
    columns = ["", "messages/s", "spread", "client CPU µs", "server CPU µs", "of bare frames"]
    rows = [
        [
            _named(each.case),
            rate(each),
            spread(each),
            *(number(each.median(key), 1) for key in ("client_cpu_us", "watched_cpu_us")),
            to_base(each, every),
        ]
        for each in every
        if each.case.work not in {"latency", "source", "sink"}
    ]
    return table(columns, rows) if rows else ""


def _named(case: Case) -> str:
    """Return a title such as ``send, 8 in flight: bare frames``."""
    unit = "per call" if LEVEL[case.work] == "batch" else LEVEL[case.work]
    title = TITLES.get(case.work, case.work)
    size = "" if case.size == USUAL_BYTES else f", {case.size} B"
    return f"{title}, {case.level} {unit}{size}: {case.system_and_core}"
