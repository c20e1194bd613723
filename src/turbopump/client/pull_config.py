"""Settings of pull consumers."""

from __future__ import annotations

from dataclasses import dataclass, field

from turbopump.durations import Duration, milliseconds, set_duration
from turbopump.net.limits import require_at_least

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class PullTimes:
    """Timeouts of pulls.

    ::

        PullTimes(hold=5, held_timeout=8)
    """

    timeout: Duration = 10
    """For a pull that is answered immediately."""

    hold: Duration = 20
    """How long a broker may wait for a message to arrive."""

    held_timeout: Duration = 30
    """For a pull that the broker may hold; longer than the hold time."""

    timeout_ms: int = field(init=False, repr=False, compare=False)
    hold_ms: int = field(init=False, repr=False, compare=False)
    held_timeout_ms: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        set_duration(self, "timeout")
        set_duration(self, "held_timeout", set_duration(self, "hold") + 1)

    def of(self, timeout: Duration) -> PullTimes:
        """Return the times of a pull with this response timeout or hold time."""
        margin_ms = self.held_timeout_ms - self.hold_ms
        limit_ms = milliseconds("timeout", timeout)
        return PullTimes(timeout, timeout, (limit_ms + margin_ms) / 1000)


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """How much may be fetched ahead; beyond it, fetching waits until messages are taken.

    ::

        FetchLimits(messages_per_queue=100, messages_of_all=500)
    """

    messages_per_queue: int = 1000
    bytes_per_queue: int = 100 * _MIB
    messages_of_all: int = 10_000

    def __post_init__(self) -> None:
        for name in ("messages_per_queue", "bytes_per_queue", "messages_of_all"):
            require_at_least(name, getattr(self, name), 1)


@dataclass(frozen=True, slots=True)
class PullConfig:
    """How a pull consumer reads.

    ::

        PullConfig(count_max=100, max_attempts=3)
    """

    count_max: int = 32
    """Maximum messages per pull; brokers return up to 32 unless configured for more."""

    max_attempts: int | None = None
    """How often a message that is sent back is retried before it is dead-lettered; None means the
    limit of the group."""

    times: PullTimes = field(default_factory=PullTimes)

    def __post_init__(self) -> None:
        require_at_least("count_max", self.count_max, 1)
        if self.max_attempts is not None:
            require_at_least("max_attempts", self.max_attempts, 0)


@dataclass(frozen=True, slots=True)
class LitePullConfig:
    """How a lite pull consumer reads.

    ::

        LitePullConfig(auto_commit=False, poll_count_max=100)
    """

    auto_commit: bool = True
    """Whether polling commits, at an interval, messages delivered by earlier polls."""

    commit_interval: Duration = 5
    poll_timeout: Duration = 5
    """How long a poll waits for the first message."""

    poll_count_max: int = 32
    """Maximum messages per poll."""

    fetch_count_max: int = 32
    """Maximum messages per request to a broker."""

    ahead: FetchLimits = field(default_factory=FetchLimits)
    times: PullTimes = field(default_factory=PullTimes)

    commit_interval_ms: int = field(init=False, repr=False, compare=False)
    poll_timeout_ms: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        set_duration(self, "commit_interval", 1000)
        set_duration(self, "poll_timeout", 0)
        require_at_least("poll_count_max", self.poll_count_max, 1)
        require_at_least("fetch_count_max", self.fetch_count_max, 1)
