"""Delayed messages and retries are never delivered early."""

from __future__ import annotations

from collections.abc import Iterator

from turbopump.testing.simulate.events import (
    US_PER_MS,
    US_PER_S,
    BrokerUp,
    ClockJumped,
    ConsumeEnded,
    Readable,
    Result,
)
from turbopump.testing.simulate.history import on
from turbopump.testing.simulate.ledger import Check, Ledger
from turbopump.testing.simulate.plan import DELAYS_S, FateKind
from turbopump.wire.names import RETRY_PREFIX

_FIRST_RETRY_LEVEL = 3
_ROUNDING_US = 2 * US_PER_MS
"""Brokers count in whole milliseconds."""


class NeverEarly(Check):
    """No delayed message is readable in its own topic before its delay, and no retry before its.

    Except for a broker that restarted since a clock was set forward: it has only times of day.
    """

    name = "delays are not cut short"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._failed_us: dict[tuple[str, str, int], int] = {}
        """When a group's listener first failed on a message after a number of retries."""
        self._jumps: list[ClockJumped] = []
        self._started_us: dict[str, int] = {}

    @on(Readable)
    def _readable(self, event: Readable) -> Iterator[str]:
        key = event.message.key
        due = None if key is None else self._due(event, key)
        if due is None:
            return
        begin_us, delay_us = due
        due_us = begin_us + delay_us - self._forward_us(event.queue.broker, begin_us)
        if event.at_us < due_us - _ROUNDING_US:
            yield (
                f"{key} is readable in {event.queue} after "
                f"{(event.at_us - begin_us) / US_PER_S:.3f} s, its delay is {delay_us / US_PER_S} s"
            )

    def _due(self, event: Readable, key: str) -> tuple[int, int] | None:
        """Return since when a message waits, and how long."""
        topic, times = event.queue.topic, event.message.times
        if self._ledger.is_own(topic):
            send = self._ledger.sends.get(key)
            return None if send is None else (send.at_us, send.delay_us)
        group = self._ledger.groups.get(topic.removeprefix(RETRY_PREFIX))
        if not topic.startswith(RETRY_PREFIX) or group is None or times < 1:
            return None
        fate = group.fates.get(key)
        if fate is None or fate.kind is FateKind.HANGS:
            return None
        failed_us = self._failed_us.get((group.name, key, times - 1))
        if failed_us is None:
            return None
        level = min(_FIRST_RETRY_LEVEL + times - 1, len(DELAYS_S))
        return failed_us, DELAYS_S[level - 1] * US_PER_S

    @on(ConsumeEnded)
    def _ended(self, event: ConsumeEnded) -> None:
        if event.result is not Result.SUCCESS:
            place = (event.group, event.key, event.times)
            self._failed_us.setdefault(place, event.at_us)

    def _forward_us(self, broker: str, since_us: int) -> int:
        """Return by how much a clock was set forward before the broker's last start."""
        started_us = self._started_us.get(broker, 0)
        machines = ("", self._ledger.masters[broker])
        jumps = [
            jump.by_us
            for jump in self._jumps
            if since_us <= jump.at_us <= started_us and jump.machine in machines
        ]
        return sum(by_us for by_us in jumps if by_us > 0)

    @on(ClockJumped)
    def _jumped(self, event: ClockJumped) -> None:
        self._jumps.append(event)

    @on(BrokerUp)
    def _started(self, event: BrokerUp) -> None:
        self._started_us[event.broker] = event.at_us
