"""The programs, commands and links in README.md and docs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
]

_FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#:]+?)(?:#[^)]*)?\)")

Block = tuple[str, str]
"""Where a block stands, and its text."""


def blocks(kind: str) -> list[Block]:
    found = []
    for path in DOCUMENTS:
        matches = _FENCED.finditer(path.read_text(encoding="utf-8"))
        texts = [match[2] for match in matches if match[1] == kind]
        found += [(f"{path.relative_to(ROOT)}-{n}", text) for n, text in enumerate(texts)]
    return found


def links(path: Path) -> list[str]:
    """Return the links of a document that lead to files."""
    return _LINK.findall(path.read_text(encoding="utf-8"))


def is_whole(program: str) -> bool:
    """Whether a program stands on its own: a sketch imports nothing."""
    return any(isinstance(node, ast.Import | ast.ImportFrom) for node in parsed(program).body)


def parsed(program: str) -> ast.Module:
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
    tree = compile(program, "document", "exec", flags)
    assert isinstance(tree, ast.Module)
    return tree


NAMESERVER = "127.0.0.1:9876"
"""What programs in the documents call the cluster; the tests put their own in its place."""


def is_for_spark(program: str) -> bool:
    """Whether a program needs Spark: those share one session, as it takes seconds to start."""
    return "turbopump.spark" in program or "pyspark" in program
