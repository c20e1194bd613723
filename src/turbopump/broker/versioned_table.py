"""A table of named settings with a version, as of topics and groups, with quotas by host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

import msgspec

from turbopump.errors import WriteFailed
from turbopump.net.network import host_text
from turbopump.tables import Table, TableFile
from turbopump.wire.bodies import DataVersion

T = TypeVar("T")


class CreationQuota:
    """The names that clients created by using them, by host.

    A host may create names while it has created fewer than there are free places. So one host can
    take half of a table, the next one half of the rest, and some is always left for others. Names
    that operators create, or that existed at the start, count for no host.
    """

    def __init__(self) -> None:
        self._creators: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    def refusal(self, address: str, free: int) -> str | None:
        """Return why a client must not create another name, or None."""
        host = host_text(address)
        count = self._counts[host]
        # A full table is reported elsewhere.
        if not host or free <= 0 or count < free:
            return None
        return f"clients at {host} have created {count} names; {free} are left for other hosts"

    def note(self, name: str, address: str) -> None:
        """Note a name that a client created."""
        host = host_text(address)
        if host:
            self._creators[name] = host
            self._counts[host] += 1

    def forget(self, name: str) -> None:
        """Release the place of a deleted name."""
        host = self._creators.pop(name, None)
        if host is not None:
            self._counts[host] -= 1
            if not self._counts[host]:
                del self._counts[host]


class VersionedTable(Generic[T]):
    """Settings by name: each change counts immediately, and is saved soon or waited for."""

    def __init__(self, what: str, file: TableFile, member: str, table: dict[str, T]) -> None:
        self._file = file
        self._table = table
        self._quota = CreationQuota()
        self.saving = Table(what, file, lambda: msgspec.json.encode({member: self._table}))

    @property
    def data_version(self) -> DataVersion:
        """Changes with the table; name servers and slaves compare it."""
        return self.saving.version

    @property
    def table(self) -> Mapping[str, T]:
        """A live view of all of them."""
        return MappingProxyType(self._table)

    async def delete(self, name: str) -> bool:
        """Delete settings; return whether they were known. On WriteFailed nothing has changed."""
        if name not in self._table:
            return False
        await self._change(name, None)
        self._quota.forget(name)
        return True

    def _put(self, changes: Mapping[str, T | None]) -> None:
        """Put settings, or with None remove them, and have that saved soon."""
        for name, value in changes.items():
            if value is None:
                self._table.pop(name, None)
            else:
                self._table[name] = value
        self.saving.changes += 1
        self.saving.save_soon()

    def _adopt(self, table: dict[str, T], version: DataVersion) -> None:
        """Replace all settings by a master's."""
        self._table = table
        self.saving.change_to(version)
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
