"""Name servers keep what they have acknowledged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from turbopump.testing.simulate.events import Event, KeyValuesRead, KeyValueStored
from turbopump.testing.simulate.history import Handler


class KeyValuesKept:
    """A value that a name server has acknowledged is there after a crash and a loss of power."""

    name = "name servers keep values"

    def __init__(self) -> None:
        self._stored: defaultdict[str, set[str]] = defaultdict(set)

    def handlers(self) -> Mapping[type[Event], Handler]:
        return {KeyValueStored: self._note, KeyValuesRead: self._compare}

    def _note(self, event: KeyValueStored) -> None:
        self._stored[event.server].add(event.key)

    def _compare(self, event: KeyValuesRead) -> Iterator[str]:
        lost = sorted(self._stored[event.server].difference(event.keys))
        if lost:
            yield f"{event.server} has acknowledged {', '.join(lost)}, which it no longer has"
