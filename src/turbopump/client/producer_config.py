"""Settings of producers."""

from __future__ import annotations

from dataclasses import dataclass, field

from turbopump.client.outgoing import MessageRules
from turbopump.durations import Duration, set_duration
from turbopump.net.limits import require_at_least


@dataclass(frozen=True, slots=True)
class ProducerConfig:
    """How a producer sends.

    ::

        ProducerConfig(send_timeout=1, retries_max=0)
    """

    send_timeout: Duration = 3
    """For one send, including all attempts."""

    retries_max: int = 2
    """Retries after a failure, each with another broker if possible.

    Attempts that no broker accepted (busy, restarting or unreachable) do not count.
    """

    wait_for_brokers: bool = True
    """Whether to wait, within the send's timeout, for a broker that is busy or unreachable."""

    retry_unless_ok: bool = False
    """Whether to also retry when a message was stored, but not flushed or copied in time."""

    avoid_slow_brokers: bool = False
    """Whether to avoid slow or unresponsive brokers for a while."""

    in_flight_max: int = 1000
    """Messages submitted with `Producer.submit` and not yet acknowledged; further ones wait."""

    messages: MessageRules = field(default_factory=MessageRules)

    send_timeout_ms: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        set_duration(self, "send_timeout")
        require_at_least("retries_max", self.retries_max, 0)
        require_at_least("in_flight_max", self.in_flight_max, 1)
