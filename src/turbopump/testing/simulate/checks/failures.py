"""No error goes unnoticed, nothing is left over, and recovery gives the same every time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from turbopump.testing.simulate.events import Event, Reopened, Unexpected
from turbopump.testing.simulate.history import Handler


class NothingUnexpected:
    """No task dies unnoticed; tasks, timers, connections and files end with their owners."""

    name = "nothing unexpected"

    def handlers(self) -> Mapping[type[Event], Handler]:
        return {Unexpected: self._unexpected}

    def _unexpected(self, event: Unexpected) -> Iterator[str]:
        yield event.what


class RecoveryIdempotent:
    """Opening a store twice gives the same messages."""

    name = "recovery is idempotent"

    def handlers(self) -> Mapping[type[Event], Handler]:
        return {Reopened: self._reopened}

    def _reopened(self, event: Reopened) -> Iterator[str]:
        yield from event.differences
