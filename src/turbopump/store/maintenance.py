"""Periodic maintenance: flush the log, write and sync what follows it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from turbopump.clock import Clock
from turbopump.errors import WriteRefused
from turbopump.store.checkpoint import Checkpoint
from turbopump.store.commit_log import CommitLog
from turbopump.store.config import FlushConfig, FlushMode
from turbopump.store.dispatch import Dispatcher
from turbopump.store.flush import Flusher
from turbopump.store.health import Health
from turbopump.store.write_behind import WriteBehind

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Maintenance:
    """Decides what is due; the flusher runs what takes long."""

    config: FlushConfig
    clock: Clock
    log: CommitLog
    dispatcher: Dispatcher
    flusher: Flusher
    behind: WriteBehind
    health: Health

    def __post_init__(self) -> None:
        self._refuses = False
        self._looked_ms = self._flushed_ms = self._written_ms = self.clock.monotonic_ms()

    def run(self) -> None:
        now_ms = self.clock.monotonic_ms()
        self.health.is_writable()
        self._report(self.health.reason())
        self.log.close_unused()
        if now_ms - self._looked_ms >= self.config.interval_ms:
            self._looked_ms = now_ms
            self._flush_log(now_ms)
        if now_ms - self._written_ms >= self.config.queue_interval_ms:
            self._written_ms = now_ms
            self._write_behind(now_ms)

    def _report(self, refusal: WriteRefused | None) -> None:
        """Log when messages start to be refused, and when they are accepted again."""
        if refusal is not None and not self._refuses:
            _log.error("messages are refused: %s", refusal)
        elif refusal is None and self._refuses:
            _log.warning("messages are accepted again")
        self._refuses = refusal is not None

    def _flush_log(self, now_ms: int) -> None:
        dirty = self.log.written - self.log.flushed
        overdue = now_ms - self._flushed_ms >= self.config.thorough_interval_ms
        sync_mode = self.config.mode is FlushMode.SYNC
        if sync_mode or dirty >= max(1, self.config.dirty_bytes_min) or (overdue and dirty):
            self._flushed_ms = now_ms
            self.flush()

    def flush(self) -> None:
        """Flush the log, then advance the checkpoint."""
        # The next start must find whole messages up to there; a slave may have part of one more.
        whole = Checkpoint(log_ms=self.dispatcher.followed_ms, log_end=self.dispatcher.followed_to)
        if self.log.written > self.log.flushed:
            self.flusher.join()
        elif self.behind.is_reached(whole):
            return
        self.flusher.submit(lambda: self._reach(whole))

    def _reach(self, whole: Checkpoint) -> None:
        """Runs on the flusher's thread."""
        if self.flusher.failure is None and self.log.flushed >= whole.log_end:
            self.behind.reach(whole)

    def _write_behind(self, now_ms: int) -> None:
        try:
            self.behind.write_waiting(now_ms - self.config.queue_interval_ms)
        except OSError as error:
            self.health.blocked(error)
            return
        entered_ms = self.dispatcher.store_timestamp_ms
        if self.behind.needs_sync(entered_ms):
            self.flusher.submit(self.behind.sync_job(entered_ms))
