"""Name servers retain what they have acknowledged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from turbopump.testing.simulate.checks.check import Check
from turbopump.testing.simulate.events import KeyValuesRead, KeyValueStored
from turbopump.testing.simulate.history import on
from turbopump.testing.simulate.ledger import Ledger


class KeyValuesKept(Check):
    """A value that a name server has acknowledged survives a crash and a power loss."""

    name = "name servers keep values"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._stored: defaultdict[str, set[str]] = defaultdict(set)

    @on(KeyValueStored)
    def _note(self, event: KeyValueStored) -> None:
        self._stored[event.server].add(event.key)

    @on(KeyValuesRead)
    def _compare(self, event: KeyValuesRead) -> Iterator[str]:
        lost = sorted(self._stored[event.server].difference(event.keys))
        if lost:
            yield f"{event.server} has acknowledged {', '.join(lost)}, which it no longer has"
