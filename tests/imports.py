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
    """Return the source files in these folders of the package; all files if none is given."""
    roots = [SOURCE / folder for folder in folders] or [SOURCE]
    return sorted(path for root in roots for path in root.rglob("*.py"))


def mentioning(names: Iterable[str], *folders: str) -> list[Path]:
    """Return the source files that mention any of these names: parsing all files takes seconds."""
    spelled = (r"\s*\.\s*".join(map(re.escape, name.split("."))) for name in names)
    occurs = re.compile(rf"\b(?:{'|'.join(spelled)})\b")
    return [path for path in modules(*folders) if occurs.search(path.read_text())]


def name_of(path: Path) -> str:
    """Return a source file's path in the package, such as ``broker/send.py``."""
    return path.relative_to(SOURCE).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(source: ast.Module) -> list[ast.AST]:
    """Return all nodes of a file: walking the tree takes longer than what is looked for in it."""
    return list(ast.walk(source))


def imported(path: Path) -> set[str]:
    """Return the full names of all imports anywhere in a file: modules, and names in them."""
    found: set[str] = set()
    for node in nodes(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{path}: imports are absolute"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@cache
def calls(path: Path) -> list[tuple[str, int]]:
    """Return each call in a file, as formatted by `written`, and its line."""
    return [
        (written(node.func), node.lineno)
        for node in nodes(tree(path))
        if isinstance(node, ast.Call)
    ]


def written(called: ast.expr) -> str:
    """Return the dotted name of a callee; anything else in it becomes ``...``."""
    match called:
        case ast.Name(name):
            return name
        case ast.Attribute(owner, name):
            return f"{written(owner)}.{name}"
        case _:
            return "..."
