"""Loads the golden data."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"

Vector = dict[str, Any]


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
