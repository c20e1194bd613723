"""What can be set about producers."""

from __future__ import annotations

from dataclasses import dataclass, field

from turbopump.client.outgoing import MessageRules
from turbopump.net.limits import require_at_least


@dataclass(frozen=True, slots=True)
class ProducerConfig:
    """How a producer sends.

    ::

        ProducerConfig(send_timeout_ms=1000, retries_max=0)
    """

    send_timeout_ms: int = 3000
    """For one send with all its tries."""

    retries_max: int = 2
    """Further tries after a failure, each with another broker if there is one.

    Tries that no broker took, as it was busy, restarting or not reachable, do not count.
    """

    wait_for_brokers: bool = True
    """Whether to wait within the send's timeout for a broker that is busy or not reachable."""

    retry_unless_ok: bool = False
    """Whether to try again too when a message was stored, but not flushed or copied in time."""

    avoid_slow_brokers: bool = False
    """Whether brokers that answered slowly or not at all are left alone for a while."""

    in_flight_max: int = 1000
    """Messages that `Producer.submit` has taken and that have no answer yet; more wait."""

    messages: MessageRules = field(default_factory=MessageRules)

    def __post_init__(self) -> None:
        require_at_least("send_timeout_ms", self.send_timeout_ms, 1)
        require_at_least("retries_max", self.retries_max, 0)
        require_at_least("in_flight_max", self.in_flight_max, 1)
