"""From which position of the log on the key index knows every message.

The index files cannot tell: what was stored while the index was off lies between two entries like
messages without keys. So the position is kept in a file of ours. A broker that runs without index
removes it, and another broker, which does not know the file, is recognized by its checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from turbopump.machine.files import Files
from turbopump.machine.text_files import backup_of
from turbopump.message import PhysicalOffset
from turbopump.store.commit_log import CommitLog, scan
from turbopump.store.config_files import load_json, save_json
from turbopump.store.deferred_steps import DeferredSteps
from turbopump.store.key_index import KeyIndex, has_keys
from turbopump.wire.record import RecordEntry

_KEY = "completeFrom"
_LOOKED_AT_MAX = 10_000
"""Messages without keys that are passed over in search of the next one with keys."""


class IndexCoverage:
    """The position, kept on disk beside the index."""

    def __init__(self, path: Path, files: Files, deferred: DeferredSteps) -> None:
        self._path = path
        self._files = files
        self._deferred = deferred

    def settle(self, index: KeyIndex | None, log: CommitLog, *, is_ours: bool) -> PhysicalOffset:
        """Find the position when a store opens, before it takes messages, and keep it.

        ``is_ours`` tells whether no other broker has written to the store since.
        """
        if index is None:
            self._forget()
            return log.written
        kept = load_json(self._files, self._path)
        before = kept.get(_KEY) if isinstance(kept, dict) and is_ours else None
        found = complete_from(before if isinstance(before, int) else None, index, log)
        if found != before:
            # Forgotten first: what a full disk keeps from being written must not be read again.
            self._forget()
            kept = {_KEY: found}
            self._deferred.attempt(lambda: save_json(self._files, self._path, kept))
        return found

    def _forget(self) -> None:
        paths = [self._path, backup_of(self._path)]
        paths = [path for path in paths if self._files.exists(path)]
        for path in paths:
            self._files.remove(path)
        if paths:
            self._files.sync_directory(self._path.parent)


def complete_from(before: int | None, index: KeyIndex, log: CommitLog) -> PhysicalOffset:
    """Return from where on the index has every key, if it had from ``before`` on.

    Index files may have been deleted: each has to begin with the first key behind the one before.
    """
    if log.written == log.min_offset:
        return log.min_offset
    if before is None:
        return log.written
    found, reached = before, int(log.min_offset)
    for header in (file.header for file in index.good_files if file.header.count > 1):
        if header.begin_offset > _next_with_keys(log, reached):
            found = max(found, header.begin_offset)
        last = log.entry_at(PhysicalOffset(header.end_offset))
        reached = max(reached, header.end_offset + (0 if last is None else last.size))
    return log.written if _next_with_keys(log, reached) < log.written else PhysicalOffset(found)


def _next_with_keys(log: CommitLog, start: int) -> int:
    """Return the first message from a position on that has keys; the end if there is none.

    Where the log cannot be read there may be any, so that it counts as one.
    """
    for looked_at, entry in enumerate(
        scan(log, PhysicalOffset(start), check_crc=False, end=log.written)
    ):
        if not isinstance(entry, RecordEntry):
            return entry
        if has_keys(entry) or looked_at == _LOOKED_AT_MAX:
            return entry.physical_offset
    return log.written
