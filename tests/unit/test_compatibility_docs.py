"""The claims of docs/compatibility.md are backed by tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
CLIENTS = ROOT / "tests" / "compat" / "clients"

_TEST = re.compile(r"`(test_\w+)`")


def named_in(path: Path) -> set[str]:
    return set(
        re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    )


@pytest.mark.parametrize(("column", "name"), [(1, "test_cpp.py"), (2, "test_node.py")])
def test_table_of_features(column: int, name: str) -> None:
    table = TEXT.partition("| feature |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [line.strip("| ").split(" | ")[column] for line in table]
    told = {found[1] for cell in cells if (found := _TEST.fullmatch(cell))}
    assert told == named_in(CLIENTS / name)
    assert {cell for cell in cells if not _TEST.fullmatch(cell)} <= {"–", "not tested"}


def features(text: str, heading: str) -> dict[str, list[str]]:
    """Return the cells of a table by the first of each line."""
    table = text.partition(heading)[2].partition("\n\n")[0].splitlines()[2:]
    return {name: cells for name, *cells in (line.strip("| ").split(" | ") for line in table)}


def test_own_client_has_every_feature() -> None:
    files = (ROOT / "tests" / "unit" / "client").glob("test_*.py")
    there = {name for path in files for name in named_in(path)}
    told = {cells[2].strip("`") for cells in features(TEXT, "| feature |").values()}
    assert told <= there


def test_ticks_of_the_readme_are_those_of_the_tests() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ticks = features(readme, "| | Turbopump |")
    tests = features(TEXT, "| feature |")
    assert list(ticks) == list(tests)
    for name, (cpp, node, own) in tests.items():
        expected = ["✓" if _TEST.fullmatch(cell) else "–" for cell in (own, cpp, node)]
        assert ticks[name] == expected, name


def test_other_tests() -> None:
    told = set(_TEST.findall(TEXT.partition("\nIn `tests/compat/clients/test_servers.py`")[2]))
    kill = named_in(ROOT / "tests" / "faults" / "test_broker_kill.py")
    assert told == named_in(CLIENTS / "test_servers.py") | kill


def test_own_client() -> None:
    section = TEXT.partition("\n## Turbopump's client beside the others")[2].partition("\n## ")[0]
    own, mixed = CLIENTS / "test_own_client.py", CLIENTS / "test_mixed_group.py"
    assert set(_TEST.findall(section)) == named_in(own) | named_in(mixed)
