"""The programs, commands and links in the documentation."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
]

NAMESERVER = "127.0.0.1:9876"
"""The name server's address in the documents; tests replace it with that of their own cluster."""

_FENCED = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_LINK = re.compile(r"\]\(([^)#:]+?)(?:#[^)]*)?\)")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page; ``reason`` says why no test runs it."""

    page: str
    number: int
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page}-{self.number}"

    @property
    def is_for_spark(self) -> bool:
        """Whether it needs Spark. Such programs share a session, which takes seconds to start."""
        return (
            self.page.startswith(("docs/guide/spark", "docs/tutorial/analyse"))
            or "turbopump.spark" in self.text
            or "pyspark" in self.text
        )

    @property
    def is_for_the_cpp_client(self) -> bool:
        return "rocketmq.client" in self.text

    @property
    def has_tests(self) -> bool:
        """Whether pytest has to run it, as its tests use the plugin's fixtures."""
        return bool(re.search(r"def test_\w+\(turbopump_", self.text))

    @property
    def waits(self) -> bool:
        """Whether it runs until a signal stops it."""
        return bool(
            re.search(
                r"^ *(consumer|worker)\.wait\(\)$|^run\(.*nameserver=", self.text, re.MULTILINE
            )
        )


def blocks(kind: str) -> list[Block]:
    found = []
    for path in DOCUMENTS:
        matches = _FENCED.finditer(path.read_text(encoding="utf-8"))
        of_kind = [match for match in matches if match["kind"] == kind]
        page = str(path.relative_to(ROOT))
        found += [
            Block(page, number, match["text"], match["reason"])
            for number, match in enumerate(of_kind)
        ]
    return found


def programs(wanted: Callable[[Block], bool]) -> list[Block]:
    """Return the selected Python programs that tests run."""
    return [block for block in blocks("python") if block.reason is None and wanted(block)]


def links(path: Path) -> list[str]:
    """Return a document's links to files."""
    return _LINK.findall(path.read_text(encoding="utf-8"))
