"""How pools connect, and when they try an address again that could not be reached."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from random import Random

from turbopump.clock import Clock
from turbopump.errors import ConnectFailed
from turbopump.net.limits import DEFAULT_LIMITS, ConnectionLimits, require_at_least
from turbopump.net.tls import ClientTls

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """How to connect, and how long to wait after a failure."""

    backoff_first_ms: int = 100
    """The pause after the first failure; it doubles with each further one."""

    backoff_max_ms: int = 10_000
    drain_timeout_ms: int = 3000
    """How long `ConnectionPool.close` waits for answers to requests in flight."""

    limits: ConnectionLimits = DEFAULT_LIMITS
    tls: ClientTls | None = None
    """None connects without TLS."""

    def __post_init__(self) -> None:
        require_at_least("backoff_first_ms", self.backoff_first_ms, 1)
        require_at_least("backoff_max_ms", self.backoff_max_ms, self.backoff_first_ms)
        require_at_least("drain_timeout_ms", self.drain_timeout_ms, 0)

    def pause_ms(self, failures: int, random: Random) -> int:
        """Return how long to wait after a number of failures in a row."""
        doublings = min(failures - 1, self.backoff_max_ms.bit_length())
        full_ms = min(self.backoff_first_ms << doublings, self.backoff_max_ms)
        # Up to half of it less, at random, or all clients would reconnect together.
        return full_ms - random.randrange(full_ms // 2 + 1)


class Backoff:
    """When one address may be tried again."""

    def __init__(self, config: PoolConfig, clock: Clock, random: Random) -> None:
        self._config = config
        self._clock = clock
        self._random = random
        self._failures = 0
        self._failed_ms = 0
        self._last_error = ""
        self.next_try_ms = 0

    def succeeded(self) -> None:
        """Start again with the first pause after the next failure."""
        self._failures = 0

    def failed(self, error: str) -> None:
        """Note a failure, and begin a pause that grows with each."""
        self._failures += 1
        pause_ms = self._config.pause_ms(self._failures, self._random)
        self._failed_ms = self._clock.monotonic_ms()
        self.next_try_ms = self._failed_ms + pause_ms
        self._last_error = error
        _log.info("%s; not connecting again for %d ms", error, pause_ms)

    def has_failed_within(self, time_ms: int) -> bool:
        return bool(self._last_error) and self._clock.monotonic_ms() - self._failed_ms < time_ms

    def require_over(self) -> None:
        """Raise the last failure while its pause lasts."""
        now_ms = self._clock.monotonic_ms()
        if now_ms < self.next_try_ms:
            raise self.failure(f" ({now_ms - self._failed_ms} ms ago)")

    def failure(self, when: str = "") -> ConnectFailed:
        """Return the last failure, which says how long the next attempt has to wait."""
        failure = ConnectFailed(f"{self._last_error}{when}")
        failure.retry_after = max(self.next_try_ms - self._clock.monotonic_ms(), 0) / 1000
        failure.last_failure = self._last_error
        return failure
