"""A table of named settings with a version, as topics and groups are."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

import msgspec

from turbopump.clock import Clock
from turbopump.errors import WriteFailed
from turbopump.tables import Table, TableFile, put_into
from turbopump.wire.bodies import DataVersion
from turbopump.wire.schema import Body

T = TypeVar("T")


def next_version(version: DataVersion, now_ms: int) -> DataVersion:
    """Return the version of a table after a change."""
    return DataVersion(counter=version.counter + 1, timestamp=now_ms)


class VersionedTable(Generic[T]):
    """Settings by name: each change counts immediately, and is saved soon or waited for."""

    def __init__(self, what: str, file: TableFile, clock: Clock, table: dict[str, T]) -> None:
        self._file = file
        self._clock = clock
        self._table = table
        self.data_version = DataVersion(counter=0, timestamp=clock.now_ms())
        self.saving = Table(what, file, lambda: msgspec.json.encode(self.snapshot))

    @property
    def table(self) -> Mapping[str, T]:
        """A live view of all of them."""
        return MappingProxyType(self._table)

    @property
    def snapshot(self) -> Body:
        """All of them and their version, as they are now; never changed afterwards."""
        raise NotImplementedError

    def _put(self, changes: Mapping[str, T | None]) -> None:
        """Put settings, or with None remove them, and have that saved soon."""
        put_into(self._table, changes)
        self._note_change(next_version(self.data_version, self._clock.now_ms()))

    def _note_change(self, version: DataVersion) -> None:
        self.data_version = version
        self.saving.changes += 1
        self.saving.save_soon()

    async def _change(self, name: str, changed: T | None) -> None:
        """Put settings, or with None remove them, once that is on disk."""
        before = self._table.get(name)
        self._put({name: changed})
        try:
            await self.saving.save()
        except WriteFailed:
            # Unless another request has changed it meanwhile.
            if self._table.get(name) is changed:
                self._put({name: before})
            raise
