"""Loads the golden data."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"

Vector = dict[str, Any]


@contextmanager
def case(name: object) -> Iterator[None]:
    """Name a case in whatever it raises; a test of its own for each of hundreds costs more."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {name}")
        raise


@cache
def frames() -> list[Vector]:
    with (DATA / "frames.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@cache
def load(name: str) -> Vector:
    loaded: Vector = json.loads((DATA / name).read_text(encoding="utf-8"))
    return loaded


def frame(name: str) -> bytes:
    """Return the bytes of the frame with this name."""
    return next(bytes.fromhex(vector["hex"]) for vector in frames() if vector["name"] == name)


@cache
def logs() -> list[tuple[int, bytes]]:
    """Return the position and the bytes of each file of the recorded commit logs."""
    found: list[tuple[int, bytes]] = []
    for archive in sorted((DATA / "store").glob("*.tar.gz")):
        with tarfile.open(archive) as tar:
            found += (
                (int(Path(member.name).name), file.read())
                for member in tar.getmembers()
                if "/commitlog/" in member.name and (file := tar.extractfile(member)) is not None
            )
    return found
