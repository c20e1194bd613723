"""Quotas: how much of a table the clients of one host may fill by using new names."""

from __future__ import annotations

from collections import Counter


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
        host = _host(address)
        count = self._counts[host]
        # A full table is reported elsewhere.
        if not host or free <= 0 or count < free:
            return None
        return f"clients at {host} have created {count} names; {free} are left for other hosts"

    def note(self, name: str, address: str) -> None:
        """Note a name that a client created."""
        host = _host(address)
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


def _host(address: str) -> str:
    return address.rpartition(":")[0]
