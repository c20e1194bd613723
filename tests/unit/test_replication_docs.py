"""The replication guide names a test for each guarantee, and each of them exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/guide/replication.md").read_text()
_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`|`(test_\w+)(\.py)?`")


def guarantees() -> list[str]:
    """Return the lines of the tables whose last column is a test."""
    lines, found = GUIDE.splitlines(), []
    for number, line in enumerate(lines):
        if line.startswith("|") and line.endswith("| test |"):
            rows = lines[number + 2 :]
            end = next((at for at, row in enumerate(rows) if not row.startswith("|")), len(rows))
            found += rows[:end]
    return found


def test_there_are_tables() -> None:
    assert len(guarantees()) > 40


@pytest.mark.parametrize("line", guarantees(), ids=lambda line: line.split("|")[1].strip()[:60])
def test_each_guarantee_has_tests_that_exist(line: str) -> None:
    named = _TEST.findall(line.split("|")[-2])
    if not named:
        assert "the other tests there" in line
        return
    file = ROOT
    for path, name, name_only, is_file in named:
        if is_file:
            file, name_only = file.parent / f"{name_only}.py", ""
        elif path:
            file = ROOT / path
        assert file.is_file(), file
        wanted = name or name_only
        assert not wanted or f"def {wanted}(" in file.read_text(), wanted
