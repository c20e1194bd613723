"""Both versions of the core have the same names, and each name is used by some test here."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from cores import VERSIONS, needs_both
from turbopump.core import reference

CLASSES = [name for name in reference.__all__ if inspect.isclass(getattr(reference, name))]


def public(kind: Any) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@needs_both
def test_versions_export_the_same_names() -> None:
    compiled = VERSIONS[1]
    missing = [name for name in reference.__all__ if not hasattr(compiled, name)]
    assert not missing


@needs_both
@pytest.mark.parametrize("name", CLASSES)
def test_classes_have_the_same_members(name: str) -> None:
    plain, compiled = (getattr(core, name) for core in VERSIONS)
    # What msgspec and sequences add is not used.
    extra = {"index", "count"}
    hidden = {"typed_requests", "typed_responses", "frame_bytes_max", "code"}
    assert public(plain) - extra - hidden == public(compiled) - extra - hidden


def test_every_export_is_tested() -> None:
    directory = Path(__file__).parent
    text = "".join(
        path.read_text(encoding="utf-8")
        for path in directory.glob("test_*.py")
        if path != Path(__file__)
    )
    # These are compared by what returns them.
    returned = {"RecordEntry", "RecordTable", "Records", "TakenUnits", "TypedFrame"}
    returned |= {"Maps", "Texts", "Times"}
    names = set(reference.__all__) - returned
    assert not {name for name in names if not re.search(rf"\b{name}\b", text)}
