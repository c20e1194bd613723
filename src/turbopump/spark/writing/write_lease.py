"""A lease for one sending attempt per task: it sends heartbeats, and the next attempt waits.

Brokers cannot fence off a sender. So an attempt stores a beat at each broker every second, and
sends rows only while the last beat is recent. The next attempt starts when no beat was stored for
longer than that.
"""

from __future__ import annotations

import asyncio
import logging
import uuid

from turbopump.client.concurrent_calls import gather_by_key
from turbopump.client.session import Session
from turbopump.errors import SparkError, TurbopumpError
from turbopump.spark.writing.write_marks import MarkLog
from turbopump.supervisor import Supervisor

_log = logging.getLogger(__name__)

BEAT_EVERY_S = 1.0
FRESH_MS = 5000
"""How long after a beat an attempt may send."""
SILENT_S = 8.0
"""Without a beat for this long, an attempt is over. The difference is for its last requests."""
_WAIT_MAX_MS = 600_000


class WriteLease:
    """The right to send the rows of one partition; belongs to the event loop of its session."""

    def __init__(self, session: Session, log: MarkLog, name: str) -> None:
        self.attempt = uuid.uuid4().hex
        self._clock = session.clock
        self._log = log
        self._name = name
        self._brokers: list[str] = []
        self._fresh_from_ms = self._clock.monotonic_ms()
        self._is_lost = False
        self._work = Supervisor()

    async def start(self, brokers: list[str]) -> None:
        self._brokers = brokers
        self._fresh_from_ms = self._clock.monotonic_ms()
        await self._beat()
        self._work.start(self._keep())

    async def wait_for(self, broker: str, attempts: set[str]) -> None:
        """Wait until attempts are over; then everything they stored at the broker can be read.

        Raises SparkError after 10 minutes.
        """
        end_ms = self._clock.monotonic_ms() + _WAIT_MAX_MS
        if attempts:
            _log.warning(
                "%s was started before: waiting at broker %s until earlier attempts have sent no "
                "heartbeat for %g s",
                self._name,
                broker,
                SILENT_S,
            )
        while attempts:
            if self._clock.monotonic_ms() >= end_ms:
                raise SparkError(
                    f"an earlier attempt of {self._name} is still sending to broker {broker} after "
                    f"{_WAIT_MAX_MS // 1000} s"
                )
            first = await self._log.beat(broker, self.attempt)
            await asyncio.sleep(SILENT_S)
            # Brokers make messages readable in the order in which they store them: once this beat
            # can be read, so can everything that earlier attempts have stored.
            last = await self._log.beat(broker, self.attempt)
            attempts = attempts & await self._log.beats(broker, first, last + 1)

    def require(self) -> None:
        """Raise SparkError unless no other attempt can have started; called before each send."""
        if self._is_lost or self._age_ms() > FRESH_MS:
            self._is_lost = True
            raise SparkError(
                f"{self._name}: no heartbeat could be stored for {FRESH_MS} ms, so another attempt "
                "may have started; Spark has to retry the task"
            )

    async def stop(self) -> None:
        await self._work.stop()

    async def _keep(self) -> None:
        while not self._is_lost:
            await asyncio.sleep(BEAT_EVERY_S)
            try:
                await self._beat()
            except TurbopumpError as error:
                _log.info("%s: no heartbeat: %s", self._name, error)

    async def _beat(self) -> None:
        start_ms = self._clock.monotonic_ms()
        await gather_by_key(self._brokers, lambda broker: self._log.beat(broker, self.attempt))
        # Too late: other attempts may have noticed the silence.
        self._is_lost = self._is_lost or self._age_ms() > FRESH_MS
        self._fresh_from_ms = start_ms

    def _age_ms(self) -> int:
        return self._clock.monotonic_ms() - self._fresh_from_ms
