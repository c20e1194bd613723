"""The chart of a run that the README shows: sends and consumption beside other systems."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from compare_report import ASYNCIO, Measured, find
from measure import ROOT

CHART = ROOT / "docs" / "images" / "comparison.svg"
SYSTEMS = {
    "Turbopump": ASYNCIO,
    "C++ client, Python binding": "C++ client",
    "NATS JetStream": "nats",
    "Redis Streams": "redis",
    "RabbitMQ": "rabbitmq",
}
PANELS = (
    ("sends per second, 32 in flight, each acknowledged", "send", 32),
    ("consuming a backlog, messages per second, one per call", "drain", 1),
)
WIDTH, LEFT, LONGEST = 760, 200, 470
ROW, GAP = 26, 12
STYLE = (
    "text{font:14px sans-serif;fill:#222}.title{font-weight:bold}"
    ".ours{fill:#2563a8}.other{fill:#b8bcc2}"
)


def chart(every: Sequence[Measured]) -> str:
    """Return an SVG with a bar for each system, or nothing unless both panels have figures."""
    lines: list[str] = []
    top = 24
    for title, work, level in PANELS:
        rates = dict(_rates(every, work, level))
        if not rates:
            return ""
        lines.append(f'<text class="title" x="16" y="{top + 4}">{title}</text>')
        for place, (name, rate) in enumerate(rates.items()):
            lines += _bar(name, rate, LONGEST / max(rates.values()), top + GAP + ROW * place)
        top += GAP + ROW * len(rates) + 2 * GAP
    height = top - GAP
    frame = f'<rect width="{WIDTH}" height="{height}" rx="4" fill="white"/>'
    view = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {view}>'
    return "\n".join([head, f"<style>{STYLE}</style>", frame, *lines, "</svg>\n"])


def write_chart(every: Sequence[Measured], path: Path = CHART) -> None:
    """Replace the chart, if this run has figures for it."""
    if text := chart(every):
        path.write_text(text, encoding="utf-8")


def _rates(every: Sequence[Measured], work: str, level: int) -> Iterator[tuple[str, float]]:
    """Yield each measured system with its median."""
    for name, system in SYSTEMS.items():
        measured = find(every, work, system, level)
        rate = None if measured is None else measured.median("messages_per_second")
        if rate is not None:
            yield name, rate


def _bar(name: str, rate: float, scale: float, top: int) -> list[str]:
    kind = "ours" if name == "Turbopump" else "other"
    width = round(rate * scale)
    return [
        f'<text x="{LEFT - 8}" y="{top + 16}" text-anchor="end">{name}</text>',
        f'<rect class="{kind}" x="{LEFT}" y="{top + 2}" width="{width}" height="{ROW - 6}"/>',
        f'<text x="{LEFT + width + 8}" y="{top + 16}">{rate:,.0f}</text>',
    ]
