"""What a store does beside its owner's thread."""

from __future__ import annotations

from turbopump.store.store import Store


def wait_idle(store: Store) -> None:
    """Wait until nothing that the store has handed to its flusher is left."""
    store._flusher.wait_idle()


def sync_log(store: Store) -> None:
    """Flush the log here and now, as the flusher would."""
    store._log.sync()
