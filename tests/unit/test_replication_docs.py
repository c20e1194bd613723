"""Each guarantee of the replication guide is backed by named tests, and each of them exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guide"
GUIDE = (GUIDES / "replication.md").read_text()
REFERENCE = (ROOT / "docs/reference/tested-guarantees.md").read_text()
_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`|`(test_\w+)(\.py)?`")


def rows(text: str, heading: str) -> list[str]:
    """Return the lines of all tables whose heading ends like this."""
    lines, found = text.splitlines(), []
    for number, line in enumerate(lines):
        if line.startswith("|") and line.endswith(heading):
            below = lines[number + 2 :]
            end = next((at for at, row in enumerate(below) if not row.startswith("|")), len(below))
            found += below[:end]
    return found


def names(text: str, heading: str) -> list[str]:
    """Return the first cells of such tables, without the targets of links."""
    return [re.sub(r"\]\([^)]*\)", "]", row).split("|")[1] for row in rows(text, heading)]


TESTED = rows(REFERENCE, "| test |")


def test_there_are_tables() -> None:
    assert len(TESTED) > 40


def test_each_guarantee_of_the_guide_is_tested() -> None:
    guaranteed = names(GUIDE, "| failure | guarantee |")
    assert len(guaranteed) > 20
    assert names(REFERENCE, "| failure | test |") == guaranteed
    cases = names(GUIDE, "| what can happen | what cannot |")
    assert len(cases) > 10
    assert names(REFERENCE, "| case | test |") == cases


def test_guides_name_no_tests() -> None:
    naming = [
        (path.name, line)
        for path in sorted(GUIDES.glob("*.md"))
        for line in path.read_text().splitlines()
        if re.search(r"`tests/|`test_\w+\.py", line)
    ]
    assert naming == []


@pytest.mark.parametrize("line", TESTED, ids=lambda line: line.split("|")[1].strip()[:60])
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
