"""What a source file imports and calls, found without running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import turbopump

SOURCE = Path(turbopump.__file__).parent


def modules(*folders: str) -> list[Path]:
    """Return the source files of some folders of the package, all of them without a folder."""
    roots = [SOURCE / folder for folder in folders] or [SOURCE]
    return sorted(path for root in roots for path in root.rglob("*.py"))


def mentioning(names: Iterable[str], *folders: str) -> list[Path]:
    """Return the source files in which any of these names occurs: parsing all takes seconds."""
    spelled = (r"\s*\.\s*".join(map(re.escape, name.split("."))) for name in names)
    occurs = re.compile(rf"\b(?:{'|'.join(spelled)})\b")
    return [path for path in modules(*folders) if occurs.search(path.read_text())]


def name_of(path: Path) -> str:
    """Return a source file's place in the package, such as ``broker/send.py``."""
    return path.relative_to(SOURCE).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path) -> set[str]:
    """Return the full names of what a file imports, wherever in it: modules, and names in them."""
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{path}: imports are absolute"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@cache
def calls(path: Path) -> list[tuple[str, int]]:
    """Return what is called in a file, as `written` has it, and in which line."""
    return [
        (written(node.func), node.lineno)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
    ]


def written(called: ast.expr) -> str:
    """Return the names and dots of what is called; anything else in it is ``...``."""
    match called:
        case ast.Name(name):
            return name
        case ast.Attribute(owner, name):
            return f"{written(owner)}.{name}"
        case _:
            return "..."
