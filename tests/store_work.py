"""What a store does beside its owner's thread, and what it is made of, for tests of its parts."""

from __future__ import annotations

from turbopump.store.checkpoint import Checkpoint
from turbopump.store.commit_log import CommitLog
from turbopump.store.queues import Queues
from turbopump.store.store import Store


def wait_idle(store: Store) -> None:
    """Wait until nothing that the store has handed to its flusher is left."""
    store._flusher.wait_idle()


def sync_log(store: Store) -> None:
    """Flush the log here and now, as the flusher would."""
    store._log.sync()


def write_tables(store: Store) -> None:
    """Write queues and index here and now."""
    store._behind.write_all()


def sync_tables(store: Store) -> None:
    """Flush queues, index and checkpoint here and now, as the flusher would."""
    store._behind.sync_job(0)()


def checkpoint_of(store: Store) -> Checkpoint:
    return store._behind.checkpoint


def table_failure(store: Store) -> OSError | None:
    """Return why queues or index cannot be written."""
    return store._behind.failure


def log_of(store: Store) -> CommitLog:
    return store._log


def queues_of(store: Store) -> Queues:
    return store._queues


def open_file_count(store: Store) -> int:
    return len(store._open_files._fds)


def close_files(store: Store) -> None:
    """Close the files; the next use opens them again."""
    store._open_files.close_all()
