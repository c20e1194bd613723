"""Types of bodies that tests share."""

from __future__ import annotations

from typing import Any


class Validated:
    """A class that validates itself, like Pydantic models."""

    def __init__(self, number: int) -> None:
        self.number = number

    @classmethod
    def model_validate(cls, value: Any) -> Validated:
        if value["number"] < 0:
            raise ValueError("number must be 0 or more")
        return cls(value["number"])

    def model_dump(self, mode: str) -> dict[str, int]:
        return {"number": self.number}
