"""The rows of a task that earlier attempts have stored, compared with the current ones. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from turbopump.errors import SparkError
from turbopump.spark.writing.row_converter import STAMP_PROPERTY, ConvertedRows, Origin
from turbopump.wire.record import MessageView


class SentRows:
    """Row numbers to skip, each with a digest of its content.

    A row is skipped by its number. If the input is not deterministic, another row may have that
    number now, and skipping it would lose it: so contents are compared before.
    """

    def __init__(self, origin: Origin, *, is_all: bool = False) -> None:
        self.is_all = is_all
        """Whether the write is complete: nothing is sent or compared."""
        self._origin = origin
        self._digests: dict[int, int] = {}

    @property
    def rows(self) -> Collection[int]:
        return self._digests.keys()

    def note(self, stored: MessageView) -> None:
        """Remember a stored message if it is a row of this task."""
        stamp = stored.properties.get(STAMP_PROPERTY, "")
        number = stamp.removeprefix(self._origin.prefix)
        # The id of a write may contain slashes: then the rest is not a number.
        if number != stamp and number.isdecimal():
            self._digests[int(number)] = _digest(stored.body, stored.tags, stored.keys)

    def has_any(self, first_row: int, count: int) -> bool:
        """Whether one of the rows with these numbers is stored."""
        if not self._digests:
            return False
        return any(row in self._digests for row in range(first_row, first_row + count))

    def require_same(self, rows: ConvertedRows) -> None:
        """Compare rows with the stored ones of the same number; raises SparkError."""
        for row, message in enumerate(rows.messages, rows.first_row):
            found = _digest(message.body, message.tags, message.keys)
            if self._digests.get(row, found) != found:
                raise SparkError(
                    f"row {row} of {self._task} differs from the row that an earlier attempt "
                    f"stored under this number; {_DETERMINISTIC}"
                )

    def require_no_more(self, count: int) -> None:
        """Check at the end that no row is stored beyond the last one; raises SparkError."""
        most = max(self._digests, default=-1)
        if most >= count:
            raise SparkError(
                f"{self._task} has {count} rows now, but an earlier attempt stored row {most}; "
                f"{_DETERMINISTIC}"
            )

    @property
    def _task(self) -> str:
        origin = self._origin
        return f"partition {origin.partition} of write {origin.query}, batch {origin.batch}"


_DETERMINISTIC = (
    "an idempotent write needs the same rows in the same order and partitions each time: sort "
    "within partitions by a unique column, or set idempotent to false for this run"
)


def _digest(body: bytes, tags: str | None, keys: Sequence[str]) -> int:
    # Of this process only: both sides are computed in one task.
    return hash((body, tags or None, tuple(keys)))
