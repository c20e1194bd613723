"""Choosing the queue of the next message: in turn, avoiding failed or slow brokers. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random

from turbopump.message import MessageQueue

FAILURE_LATENCY_MS = 30_000
"""A failed send counts as having taken this long."""

_LATENCIES_MS = (50, 100, 550, 1000, 2000, 3000, 15_000)
_AVOIDED_FOR_MS = (0, 0, 30_000, 60_000, 120_000, 180_000, 600_000)


def avoided_for_ms(latency_ms: int) -> int:
    """Return how long to avoid a broker after a send of this duration."""
    place = bisect_right(_LATENCIES_MS, latency_ms)
    return _AVOIDED_FOR_MS[place - 1] if place else 0


@dataclass(frozen=True, slots=True)
class Fault:
    """The response time of a broker, and the deadline until which it is avoided."""

    latency_ms: int
    until_ms: int


class BrokerFaults:
    """The latest response times of brokers."""

    def __init__(self) -> None:
        self._faults: dict[str, Fault] = {}

    def note(self, broker: str, latency_ms: int, now_ms: int) -> None:
        self._faults[broker] = Fault(latency_ms, now_ms + avoided_for_ms(latency_ms))

    def is_available(self, broker: str, now_ms: int) -> bool:
        fault = self._faults.get(broker)
        return fault is None or now_ms >= fault.until_ms

    def better_half(self, brokers: Sequence[str], now_ms: int) -> list[str]:
        """Return the brokers least likely to fail: available, faster, sooner back."""

        def badness(broker: str) -> tuple[bool, int, int]:
            fault = self._faults.get(broker, Fault(0, 0))
            return not self.is_available(broker, now_ms), fault.latency_ms, fault.until_ms

        ranked = sorted(brokers, key=badness)
        return ranked[: max(1, len(ranked) // 2)]


class QueueChoice:
    """Takes the queues of each topic in turn, from a random start."""

    def __init__(self, random: Random, faults: BrokerFaults | None = None) -> None:
        self._random = random
        self._faults = faults
        # Iterators advance atomically, and threads share a producer.
        self._counters: dict[str, Iterator[int]] = {}

    def next(
        self, queues: Sequence[MessageQueue], avoided: Collection[str] = (), now_ms: int = 0
    ) -> MessageQueue:
        """Return the next queue, avoiding some brokers if there are others."""
        assert queues, "a route to send has queues"
        if self._faults is not None:
            return self._next_available(queues, self._faults, now_ms)
        # Same as `_advance`, without a call per message.
        counter = self._counters.get(queues[0].topic)
        queue = self._advance(queues) if counter is None else queues[next(counter) % len(queues)]
        if not avoided or queue.broker not in avoided:
            return queue
        for _ in range(len(queues) - 1):
            other = self._advance(queues)
            if other.broker not in avoided:
                return other
        return queue

    def _next_available(
        self, queues: Sequence[MessageQueue], faults: BrokerFaults, now_ms: int
    ) -> MessageQueue:
        for _ in queues:
            queue = self._advance(queues)
            if faults.is_available(queue.broker, now_ms):
                return queue
        brokers = list(dict.fromkeys(queue.broker for queue in queues))
        broker = self._random.choice(faults.better_half(brokers, now_ms))
        return self._advance([queue for queue in queues if queue.broker == broker])

    def _advance(self, queues: Sequence[MessageQueue]) -> MessageQueue:
        topic = queues[0].topic
        counter = self._counters.get(topic)
        if counter is None:
            counter = self._counters.setdefault(topic, count(self._random.randrange(1 << 16)))
        return queues[next(counter) % len(queues)]
