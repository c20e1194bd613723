"""Medians, spreads, ratios and targets of a comparison, as tables, JSON and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import panels, print_table

BARE = "bare frames"
ASYNCIO, THREADS = "turbopump asyncio", "turbopump threads"
TWO = "turbopump asyncio, 2 processes"
PEERS = ("nats", "redis", "rabbitmq")
LEVEL = {
    "send": "in flight",
    "batch": "in flight",
    "batch32": "in flight",
    "drain": "batch",
    "orderly": "batch",
    "latency": "per second",
    "recovery": "MiB",
    "source": "cores",
    "sink": "cores",
}
SPARK_WORKS = ("source", "sink")
BASES = {"source": "ready rows", "sink": "counting sink"}
"""The baseline of a kind of work, if not bare frames."""
TARGET_COLUMNS = ("target", "wanted", "found", "result")
USUAL_BYTES = 128
"""The body size that targets apply to."""


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of work, done by one system, at one level of concurrency or batch size."""

    work: str
    system: str
    level: int
    size: int = USUAL_BYTES
    core: str = ""
    """That of servers and clients, if it is not the usual one."""

    @property
    def name(self) -> str:
        return f"{self.work}, {self.label} {LEVEL[self.work]}"

    @property
    def label(self) -> str:
        """The name within its kind of work."""
        size = "" if self.size == USUAL_BYTES else f", {self.size} B"
        return f"{self.system_and_core}{size}, {self.level}"

    @property
    def system_and_core(self) -> str:
        return f"{self.system}, {self.core} core" if self.core else self.system


@dataclass(frozen=True, slots=True)
class Measured:
    """A case and the results of each round."""

    case: Case
    rounds: Sequence[dict[str, Any]]

    def values(self, key: str) -> list[float]:
        return [each[key] for each in self.rounds if each[key] is not None]

    def median(self, key: str) -> float | None:
        values = self.values(key)
        return statistics.median(values) if values else None

    def ratio_to(self, base: Measured, key: str = "messages_per_second") -> float:
        """Return the median of the per-round ratios, which other work disturbs least."""
        pairs = zip(self.values(key), base.values(key), strict=True)
        return statistics.median(own / other for own, other in pairs)

    def as_json(self, every: Sequence[Measured]) -> dict[str, Any]:
        rates, base = self.values("messages_per_second"), base_of(every, self.case)
        return {
            "work": self.case.work,
            "system": self.case.system,
            "level": self.case.level,
            "size": self.case.size,
            "core": self.case.core,
            "median": statistics.median(rates),
            "min": min(rates),
            "max": max(rates),
            "base": None if base is None else base.case.system,
            "to_base": None if base is None else round(self.ratio_to(base), 3),
            "rounds": list(self.rounds),
        }


@dataclass(frozen=True, slots=True)
class Target:
    """The target for a figure, and its actual value."""

    name: str
    wanted: float
    found: float
    is_limit: bool = False
    """Whether less is better."""

    @property
    def is_met(self) -> bool:
        return self.found <= self.wanted if self.is_limit else self.found >= self.wanted

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "wanted": self.wanted,
            "found": round(self.found, 3),
            "is_limit": self.is_limit,
            "is_met": self.is_met,
        }


def find(
    every: Iterable[Measured],
    work: str,
    system: str,
    level: int,
    size: int = USUAL_BYTES,
    core: str = "",
) -> Measured | None:
    case = Case(work, system, level, size, core)
    return next((each for each in every if each.case == case), None)


def base_of(every: Iterable[Measured], case: Case) -> Measured | None:
    """Return the baseline at the same level, if it was measured."""
    base = BASES.get(case.work, BARE)
    if case.work in BASES:
        _, comma, bodies = case.system.partition(", ")
        base += comma + bodies
    return find(every, case.work, base, case.level, case.size, case.core)


def targets(every: Sequence[Measured]) -> list[Target]:
    """Return the targets of all measured cases, with the actual values."""
    return [*_ratios(every), *_costs(every), *_latencies(every), *_spark_ratios(every)]


def _ratios(every: Sequence[Measured]) -> Iterable[Target]:
    wanted: list[tuple[tuple[str, str, int], tuple[str, str, int], float]] = [
        *(
            (("send", THREADS, level), ("send", BARE, level), ratio)
            for level, ratio in ((1, 0.75), (8, 0.7), (32, 0.6))
        ),
        *((("send", ASYNCIO, level), ("send", BARE, level), 0.9) for level in (1, 8, 32, 512)),
        *(
            ((work, ASYNCIO, level), (work, BARE, level), 0.8)
            for work in ("batch", "batch32")
            for level in (1, 8)
        ),
        *((("drain", TWO, batch), ("drain", ASYNCIO, batch), 1.7) for batch in (1, 32)),
        *(
            (("send", ASYNCIO, level), ("send", peer, level), 1.3)
            for peer in PEERS
            for level in (1, 8, 32, 512)
        ),
        *((("drain", ASYNCIO, 1), ("drain", peer, 1), 1.3) for peer in PEERS),
    ]
    for own, base, ratio in wanted:
        ours, theirs = find(every, *own), find(every, *base)
        if ours is not None and theirs is not None:
            name = f"{ours.case.name}, relative to {theirs.case.system}"
            yield Target(name, ratio, ours.ratio_to(theirs))


def _costs(every: Sequence[Measured]) -> Iterable[Target]:
    wanted = [
        ("send", BARE, 64, "watched_cpu_us", "broker CPU µs", 12.0),
        ("batch", BARE, 8, "watched_cpu_us", "broker CPU µs", 3.0),
        ("batch32", BARE, 8, "watched_cpu_us", "broker CPU µs", 3.0),
        *(
            ("drain", system, batch, "client_cpu_us", "client CPU µs", limit)
            for system in (ASYNCIO, THREADS)
            for batch, limit in ((1, 5.0), (32, 3.0))
        ),
    ]
    for work, system, level, key, title, limit in wanted:
        found = find(every, work, system, level)
        value = None if found is None else found.median(key)
        if found is not None and value is not None:
            yield Target(f"{found.case.name}, {title}", limit, value, is_limit=True)


def _latencies(every: Sequence[Measured]) -> Iterable[Target]:
    for measured in every:
        is_usual = measured.case.size == USUAL_BYTES and not measured.case.core
        if measured.case.work == "latency" and is_usual:
            for key, limit in (("p50_ms", 0.45), ("p99_ms", 1.0)):
                value = measured.median(key)
                if value is not None:
                    name = f"{measured.case.name}, {key.replace('_', ' ')}"
                    yield Target(name, limit, value, is_limit=True)


def _spark_ratios(every: Sequence[Measured]) -> Iterable[Target]:
    wanted = {"source": 0.6, "sink": 0.5}
    for measured in every:
        base = base_of(every, measured.case)
        if measured.case.work in wanted and base is not None and base is not measured:
            name = f"{measured.case.name}, relative to {BASES[measured.case.work]}"
            yield Target(name, wanted[measured.case.work], measured.ratio_to(base))


def as_json(every: Sequence[Measured]) -> dict[str, Any]:
    """Return all cases and targets, as `from_json` reads them."""
    return {
        "cases": [each.as_json(every) for each in every],
        "targets": [each.as_json() for each in targets(every)],
    }


def from_json(value: dict[str, Any]) -> list[Measured]:
    return [Measured(_case_from(each), each["rounds"]) for each in value["cases"]]


def _case_from(value: dict[str, Any]) -> Case:
    work, system, level, size = (value[key] for key in ("work", "system", "level", "size"))
    # Earlier runs had one core.
    return Case(work, system, level, size, value.get("core", ""))


def target_rows(every: Sequence[Measured]) -> list[list[str]]:
    return [
        [
            each.name,
            f"{'at most' if each.is_limit else 'at least'} {each.wanted:g}",
            f"{each.found:.2f}",
            "met" if each.is_met else "missed",
        ]
        for each in targets(every)
    ]


def print_report(
    every: Sequence[Measured], absent: dict[str, str], machine: dict[str, Any]
) -> None:
    """Print targets first, then all figures."""
    about = (
        f"{machine['cpus']} CPUs, Python {machine['python']}, load {machine['load_average']:.1f}"
    )
    print(f"{about}, {machine['core']} core" if "core" in machine else about)
    for name, why in absent.items():
        print(f"absent: {name} ({why})")
    print("\nTargets, in this run\n")
    print_table(TARGET_COLUMNS, target_rows(every))
    for work in dict.fromkeys(each.case.work for each in every):
        print(f"\n{work}: medians, and the spread of all rounds\n")
        print_table(
            [
                f"system, {LEVEL[work]}",
                *(title for title, _ in _CELLS),
                f"of {BASES.get(work, BARE)}",
            ],
            [_row(each, every) for each in every if each.case.work == work],
        )


def rate(measured: Measured) -> str:
    return number(measured.median("messages_per_second"), 0)


def _mebibytes(measured: Measured) -> str:
    sent = measured.median("bytes")
    return number(None if sent is None else sent / 2**20, 1)


def spread(measured: Measured) -> str:
    rates = measured.values("messages_per_second")
    return f"{min(rates):,.0f}–{max(rates):,.0f}"


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


_CELLS: tuple[tuple[str, Callable[[Measured], str]], ...] = (
    ("messages/s", rate),
    ("spread", spread),
    ("MiB", _mebibytes),
    ("client CPU µs", lambda each: number(each.median("client_cpu_us"), 1)),
    ("server CPU µs", lambda each: number(each.median("watched_cpu_us"), 1)),
    ("p50 ms", lambda each: number(each.median("p50_ms"), 2)),
    ("p99 ms", lambda each: number(each.median("p99_ms"), 2)),
)


def _row(measured: Measured, every: Sequence[Measured]) -> list[str]:
    cells = [cell(measured) for _, cell in _CELLS]
    return [measured.case.label, *cells, to_base(measured, every)]


def to_base(measured: Measured, every: Sequence[Measured]) -> str:
    """Return the ratio to the baseline; empty for the baseline itself."""
    base = base_of(every, measured.case)
    return "" if base in (None, measured) else f"{measured.ratio_to(base):.2f}"


def write_plot(every: Sequence[Measured], path: Path) -> None:
    """Plot a panel for each kind of work: medians as bars, the spread of all rounds as lines."""
    works = list(dict.fromkeys(each.case.work for each in every))
    sizes = [sum(each.case.work == work for each in every) for work in works]
    inches = (9, 1.2 * len(works) + 0.25 * sum(sizes))
    figure, rows = panels(len(works), 1, inches, height_ratios=sizes)
    for work, (panel,) in zip(works, rows, strict=True):
        key = "p50_ms" if work == "latency" else "messages_per_second"
        drawn = [each for each in every if each.case.work == work]
        names = [each.case.label for each in drawn]
        medians = [statistics.median(each.values(key)) for each in drawn]
        below = [m - min(each.values(key)) for m, each in zip(medians, drawn, strict=True)]
        above = [max(each.values(key)) - m for m, each in zip(medians, drawn, strict=True)]
        ours = ["C0" if name.startswith("turbopump") else "0.7" for name in names]
        panel.barh(names, medians, xerr=[below, above], color=ours)
        panel.invert_yaxis()
        panel.set_title(f"{work}: {key.replace('_', ' ')} ({LEVEL[work]})", loc="left")
    figure.savefig(path)
