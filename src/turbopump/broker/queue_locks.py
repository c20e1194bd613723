"""Which client of a group may consume a queue in order: locks that expire unless renewed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

from msgspec import Struct
from msgspec.structs import replace

from turbopump.message import MessageQueue

TRUST_MS = 30_000
"""How long clients consume under a lock after its last renewal."""


class _Lock(Struct, frozen=True):
    client_id: str
    renewed_ms: int
    is_remembered: bool = False
    """Held before a restart, and not renewed since, nor was its client seen."""
    change: int = 0
    """The value of `QueueLocks.changes` when it was granted."""


class QueueLocks:
    """Locks by group and queue. Times are monotonic."""

    def __init__(self, expiry_ms: int = 60_000) -> None:
        self.expiry_ms = expiry_ms
        self._groups: dict[str, dict[MessageQueue, _Lock]] = {}
        self.changes = 0
        """How often any queue has changed its holder, or become free."""
        self._saved_changes = 0
        self._withheld_until_ms = 0

    def withhold(self, now_ms: int) -> None:
        """Grant no lock while clients may still consume under those of another broker."""
        self._withheld_until_ms = now_ms + TRUST_MS

    def withheld_ms(self, now_ms: int) -> int:
        """Return for how many ms no lock is granted; 0 if locks are."""
        return max(0, self._withheld_until_ms - now_ms)

    def lock(
        self, group: str, client_id: str, queues: Iterable[MessageQueue], now_ms: int
    ) -> list[MessageQueue]:
        """Lock or renew for a client; return the queues that it now holds."""
        granted: dict[MessageQueue, _Lock] = {}
        held = self._groups.get(group, {})
        for queue in queues:
            lock = held.get(queue)
            if lock is None or self._is_over(lock, now_ms):
                self.changes += 1
                granted[queue] = _Lock(client_id, now_ms, change=self.changes)
            elif lock.client_id == client_id:
                granted[queue] = _Lock(client_id, now_ms, change=lock.change)
        if granted:
            self._groups.setdefault(group, held).update(granted)
        return list(granted)

    def saved(self, group: str, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Return the queues whose locks would survive a crash; `note_saved` reports it."""
        held = self._groups.get(group, {})
        return [
            queue
            for queue in queues
            if (lock := held.get(queue)) is not None and lock.change <= self._saved_changes
        ]

    def note_saved(self, changes: int) -> None:
        """Note that everything up to a value of `changes` is on disk."""
        self._saved_changes = max(self._saved_changes, changes)

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Release a client's own locks; those of others stay."""
        held = self._groups.get(group, {})
        for queue in queues:
            lock = held.get(queue)
            if lock is not None and lock.client_id == client_id:
                del held[queue]
                self.changes += 1
        self._drop_if_empty(group)

    def remember(
        self, group: str, client_id: str, queues: Iterable[MessageQueue], since_ms: int
    ) -> None:
        """Restore the locks that a client had before a restart, as if it had renewed them then."""
        lock = _Lock(client_id, since_ms, is_remembered=True)
        self._groups.setdefault(group, {}).update(dict.fromkeys(queues, lock))
        self._drop_if_empty(group)

    @property
    def remembered(self) -> dict[tuple[str, str], int]:
        """Group and client of the locks from before a restart, and since when it is awaited."""
        return {
            (group, lock.client_id): lock.renewed_ms
            for group, held in self._groups.items()
            for lock in held.values()
            if lock.is_remembered
        }

    def awaited(self, group: str) -> dict[str, int]:
        """Return since when clients are awaited that have renewed none of their locks."""
        locks = self._groups.get(group, {}).values()
        renewed = {lock.client_id for lock in locks if not lock.is_remembered}
        return {lock.client_id: lock.renewed_ms for lock in locks if lock.client_id not in renewed}

    def note_seen(self, group: str, client_ids: AbstractSet[str]) -> None:
        """Let the locks that clients held before a restart expire as all others do."""
        held = self._groups.get(group, {})
        for queue, lock in held.items():
            if lock.is_remembered and lock.client_id in client_ids:
                held[queue] = replace(lock, is_remembered=False)

    def forget_remembered(self, group: str, client_id: str) -> None:
        """Free the queues that a client held before a restart and has not locked since."""
        held = self._groups.get(group, {})
        for queue, lock in tuple(held.items()):
            if lock.is_remembered and lock.client_id == client_id:
                del held[queue]
                self.changes += 1
        self._drop_if_empty(group)

    @property
    def groups(self) -> Mapping[str, object]:
        """Groups that have locked queues, or had some until recently."""
        return self._groups

    def held(self, group: str, now_ms: int) -> dict[str, list[MessageQueue]]:
        """Return the locked queues of a group by client."""
        found: dict[str, list[MessageQueue]] = {}
        for queue, lock in self._groups.get(group, {}).items():
            if not self._is_over(lock, now_ms):
                found.setdefault(lock.client_id, []).append(queue)
        return found

    def forget_expired(self, now_ms: int) -> None:
        """Drop expired locks, so that groups that are gone leave nothing behind."""
        for group, held in tuple(self._groups.items()):
            for queue, lock in tuple(held.items()):
                if self._is_over(lock, now_ms):
                    del held[queue]
                    self.changes += 1
            self._drop_if_empty(group)

    def _is_over(self, lock: _Lock, now_ms: int) -> bool:
        return now_ms - lock.renewed_ms > self.expiry_ms

    def _drop_if_empty(self, group: str) -> None:
        if not self._groups.get(group):
            self._groups.pop(group, None)
