"""Periodic maintenance: flush the log, write and sync what follows it."""

from __future__ import annotations

import logging

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


class Maintenance:
    """Decides what is due; the flusher runs what takes long."""

    def __init__(
        self,
        config: FlushConfig,
        clock: Clock,
        log: CommitLog,
        dispatcher: Dispatcher,
        flusher: Flusher,
        behind: WriteBehind,
        health: Health,
    ) -> None:
        self._config = config
        self._clock = clock
        self._log = log
        self._dispatcher = dispatcher
        self._flusher = flusher
        self._behind = behind
        self._health = health
        self._refuses = False
        self._looked_ms = self._flushed_ms = self._written_ms = clock.monotonic_ms()

    def run(self) -> None:
        now_ms = self._clock.monotonic_ms()
        self._health.is_writable()
        self._report(self._health.reason())
        self._log.close_unused()
        if now_ms - self._looked_ms >= self._config.interval_ms:
            self._looked_ms = now_ms
            self._flush_log(now_ms)
        if now_ms - self._written_ms >= self._config.queue_interval_ms:
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
        dirty = self._log.written - self._log.flushed
        overdue = now_ms - self._flushed_ms >= self._config.thorough_interval_ms
        sync_mode = self._config.mode is FlushMode.SYNC
        if sync_mode or dirty >= max(1, self._config.dirty_bytes_min) or (overdue and dirty):
            self._flushed_ms = now_ms
            self.flush()

    def flush(self) -> None:
        """Flush the log, then advance the checkpoint."""
        # The next start must find whole messages up to there; a slave may have part of one more.
        whole = Checkpoint(
            log_ms=self._dispatcher.followed_ms, log_end=self._dispatcher.followed_to
        )
        if self._log.written > self._log.flushed:
            self._flusher.join()
        elif self._behind.is_reached(whole):
            return
        self._flusher.submit(lambda: self._reach(whole))

    def _reach(self, whole: Checkpoint) -> None:
        """Runs on the flusher's thread."""
        if self._flusher.failure is None and self._log.flushed >= whole.log_end:
            self._behind.reach(whole)

    def _write_behind(self, now_ms: int) -> None:
        try:
            self._behind.write_waiting(now_ms - self._config.queue_interval_ms)
        except OSError as error:
            self._health.blocked(error)
            return
        job = self._behind.sync_job(self._dispatcher.store_timestamp_ms)
        if job.is_needed:
            self._flusher.submit(job)
