"""No error goes unnoticed, nothing leaks, and recovery gives the same result every time."""

from __future__ import annotations

from collections.abc import Iterator

from turbopump.testing.simulate.events import Reopened, Unexpected
from turbopump.testing.simulate.history import on
from turbopump.testing.simulate.ledger import Check


class NothingUnexpected(Check):
    """No task dies unnoticed; tasks, timers, connections and files end with their owners."""

    name = "nothing unexpected"

    @on(Unexpected)
    def _unexpected(self, event: Unexpected) -> Iterator[str]:
        yield event.what


class RecoveryIdempotent(Check):
    """Opening a store twice gives the same messages."""

    name = "recovery is idempotent"

    @on(Reopened)
    def _reopened(self, event: Reopened) -> Iterator[str]:
        yield from event.differences
