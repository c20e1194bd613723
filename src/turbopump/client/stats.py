"""Consumption statistics per topic: rates and times over the last minute."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, replace

from turbopump.wire.bodies import ConsumeRates

SAMPLE_INTERVAL_MS = 10_000
_SAMPLES = 7
"""One more than fits into a minute: rates are differences."""


@dataclass(slots=True)
class Totals:
    """Totals since the start, for one topic."""

    consumed: int = 0
    failed: int = 0
    calls: int = 0
    calls_ms: int = 0
    pulled: int = 0
    pulls: int = 0
    pulls_ms: int = 0

    def minus(self, earlier: Totals) -> Totals:
        names = self.__slots__
        return Totals(*[getattr(self, name) - getattr(earlier, name) for name in names])


class ConsumerStats:
    """Counts by topic, and rates over the last minute or, before that, since the start."""

    def __init__(self) -> None:
        self._totals: defaultdict[str, Totals] = defaultdict(Totals)
        self._samples: deque[tuple[int, dict[str, Totals]]] = deque(maxlen=_SAMPLES)
        self._sampled_events = -1

    def called(self, topic: str, consumed: int, failed: int, spent_ms: int, calls: int = 1) -> None:
        """Count calls of the listener."""
        totals = self._totals[topic]
        totals.consumed += consumed
        totals.failed += failed
        totals.calls += calls
        totals.calls_ms += spent_ms

    def pulled(self, topic: str, messages: int, spent_ms: int) -> None:
        """Count a pull that returned messages."""
        totals = self._totals[topic]
        totals.pulled += messages
        totals.pulls += 1
        totals.pulls_ms += spent_ms

    def sample(self, now_ms: int) -> None:
        """Record the current counters; call every `SAMPLE_INTERVAL_MS`."""
        events = sum(each.calls + each.pulls for each in self._totals.values())
        if events == self._sampled_events:
            # Nothing has changed since the last one.
            self._samples.append((now_ms, self._samples[-1][1]))
            return
        copies = {topic: replace(each) for topic, each in self._totals.items()}
        self._samples.append((now_ms, copies))
        self._sampled_events = events

    def rates(self, topic: str, now_ms: int) -> ConsumeRates:
        """Return a topic's rates, as the protocol reports them."""
        since_ms, earlier = self._samples[0] if self._samples else (now_ms, {})
        totals = self._totals[topic]
        recent = totals.minus(earlier.get(topic, Totals()))
        seconds = max((now_ms - since_ms) / 1000, 1.0)
        return ConsumeRates(
            consume_failed_msgs=totals.failed,
            consume_failed_tps=recent.failed / seconds,
            consume_ok_tps=recent.consumed / seconds,
            consume_rt=recent.calls_ms / max(recent.calls, 1),
            pull_rt=recent.pulls_ms / max(recent.pulls, 1),
            pull_tps=recent.pulled / seconds,
        )
