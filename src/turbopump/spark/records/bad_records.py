"""Records that cannot be decoded: what is known of one, and how a read handles it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from turbopump.errors import DamagedMessage

_log = logging.getLogger(__name__)

_LOGGED_MAX = 20
"""Bad records that a task logs individually; the others are counted in one line."""


class OnBadRecord(StrEnum):
    """How to handle a record that cannot be decoded."""

    FAIL = "fail"
    NULL = "null"
    """Its row has what can be decoded, null for the rest, and the column decodeError."""
    SKIP = "skip"
    DEAD_LETTER = "deadLetter"


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot be decoded, with its stored bytes."""

    topic: str
    broker: str
    queue_id: int
    offset: int
    reason: str
    raw: bytes

    def __str__(self) -> str:
        return (
            f"topic {self.topic}, broker {self.broker}, queue {self.queue_id}, offset "
            f"{self.offset}: {self.reason}"
        )


class BadRecords:
    """Handles the bad records of one task: fails, or logs them and sends them to a topic."""

    def __init__(
        self,
        mode: OnBadRecord,
        send: Callable[[Sequence[BadRecord]], None] | None = None,
        *,
        keeps_rows: bool = False,
        remedies: str = "null, skip or deadLetter",
    ) -> None:
        self.keeps_rows = keeps_rows
        """Whether a bad record is a row, with the column decodeError."""
        self.count = 0
        self._mode = mode
        self._send = send
        self._remedies = remedies

    def take(self, bad: Sequence[BadRecord]) -> None:
        """Handle bad records before rows around them are passed on; raises DamagedMessage."""
        if self._mode is OnBadRecord.FAIL:
            first = bad[0]
            reason = f"{first.reason}; to read on, set onBadRecord to {self._remedies}"
            raise DamagedMessage(first.topic, first.broker, first.queue_id, first.offset, reason)
        if self._send is not None:
            self._send(bad)
        for each in bad[: max(0, _LOGGED_MAX - self.count)]:
            _log.warning("bad record, onBadRecord=%s: %s", self._mode, each)
        self.count += len(bad)

    def close(self) -> None:
        """Log how many bad records were not logged individually."""
        if self.count > _LOGGED_MAX:
            _log.warning(
                "%d more bad records, onBadRecord=%s", self.count - _LOGGED_MAX, self._mode
            )
