"""Which client of a group may consume a queue in order: locks that end unless they are renewed."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from turbopump.message import MessageQueue


class _Lock(Struct, frozen=True):
    client_id: str
    renewed_ms: int


class QueueLocks:
    """Locks by group and queue, in memory only. Times are of a clock that never goes back."""

    def __init__(self, expiry_ms: int = 60_000) -> None:
        self.expiry_ms = expiry_ms
        self._groups: dict[str, dict[MessageQueue, _Lock]] = {}

    def lock(
        self, group: str, client_id: str, queues: Iterable[MessageQueue], now_ms: int
    ) -> list[MessageQueue]:
        """Lock or renew for a client; return those queues that it now has."""
        free = (None, client_id)
        granted = [queue for queue in queues if self.holder(group, queue, now_ms) in free]
        if granted:
            lock = _Lock(client_id, now_ms)
            self._groups.setdefault(group, {}).update(dict.fromkeys(granted, lock))
        return granted

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Give up a client's own locks; those of others stay."""
        held = self._groups.get(group, {})
        for queue in queues:
            lock = held.get(queue)
            if lock is not None and lock.client_id == client_id:
                del held[queue]
        self._drop_if_empty(group)

    def holder(self, group: str, queue: MessageQueue, now_ms: int) -> str | None:
        """Return the client that has a queue."""
        lock = self._groups.get(group, {}).get(queue)
        return None if lock is None or self._is_over(lock, now_ms) else lock.client_id

    def forget_expired(self, now_ms: int) -> None:
        """Drop locks that are free again, so that groups that are gone leave nothing behind."""
        for group, held in tuple(self._groups.items()):
            for queue, lock in tuple(held.items()):
                if self._is_over(lock, now_ms):
                    del held[queue]
            self._drop_if_empty(group)

    def _is_over(self, lock: _Lock, now_ms: int) -> bool:
        return now_ms - lock.renewed_ms > self.expiry_ms

    def _drop_if_empty(self, group: str) -> None:
        if not self._groups.get(group):
            self._groups.pop(group, None)
