"""Throughput: counters, and their change over the last minute, hour and day.

Counting is a lookup and a few additions. Every ten seconds all counters are copied into an array; a
window is the difference between its last and its first copy.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from turbopump.clock import Clock
from turbopump.wire.bodies import BrokerStats, StatsWindow

SAMPLE_INTERVAL_MS = 10_000
_HOUR_SAMPLE_MS = 10 * 60_000
_DAY_SAMPLE_MS = 3_600_000
_RATES_OVER_MS = (10_000, 60_000, 600_000)

_MESSAGES, _BYTES, _TIMES = range(3)
_COLUMNS = 3

_Sample: TypeAlias = "array[int]"
"""The numbers of all counters in sequence; a numpy array takes longer to build."""
Rates: TypeAlias = tuple[float | None, ...]
"""Events per second over the last 10 s, minute and ten minutes; None before enough time."""
K = TypeVar("K")


@dataclass(slots=True, eq=False)
class Counter:
    """A counter of messages, their bytes, and the requests that they came in."""

    row: int
    messages: int = 0
    bytes: int = 0
    times: int = 0

    def add(self, messages: int = 0, size: int = 0) -> None:
        self.messages += messages
        self.bytes += size
        self.times += 1


class Stats:
    """All counters of a broker.

    Forget topics and groups that are deleted, so that their counters do not pile up.
    """

    def __init__(self, cluster: str, clock: Clock) -> None:
        self._cluster = cluster
        self._clock = clock
        self._table = _Table()
        self.puts = self._table.counter()
        """All messages stored."""
        self.gets = self._table.counter()
        """All messages delivered; ``times`` counts the pulls that found some."""
        self.misses = self._table.counter()
        """Pulls that found nothing."""
        self.failures = self._table.counter()
        """Sends that could not be stored."""
        self._put: dict[tuple[str, int], Counter] = {}
        self._get: dict[tuple[str, str, int], Counter] = {}
        self._sent_back: dict[tuple[str, str], Counter] = {}
        self._puts_of: dict[str, list[Counter]] = {}
        """By topic: of all its queues."""
        self._gets_of: dict[tuple[str, str], list[Counter]] = {}
        """By topic and group: of all queues."""
        self._day_ms = _local_day_ms(clock.now_ms())
        self._midnights = ((0, 0), (0, 0))
        """Messages stored and delivered at the last two midnights of local time."""
        self._table.sample(clock.monotonic_ms())

    # --- counting ---------------------------------------------------------------------------------

    def put(self, topic: str, queue_id: int, messages: int, size: int) -> None:
        """Count the messages stored by one send."""
        counter = self._put.get((topic, queue_id))
        if counter is None:
            counter = self._put[topic, queue_id] = self._table.counter()
            self._puts_of.setdefault(topic, []).append(counter)
        # Without calls, as it is done for each message.
        counter.messages += messages
        counter.bytes += size
        counter.times += 1
        total = self.puts
        total.messages += messages
        total.bytes += size
        total.times += 1

    def get(self, group: str, topic: str, queue_id: int, messages: int, size: int) -> None:
        """Count messages that were delivered by one pull."""
        counter = self._get.get((topic, group, queue_id))
        if counter is None:
            counter = self._get[topic, group, queue_id] = self._table.counter()
            self._gets_of.setdefault((topic, group), []).append(counter)
        counter.add(messages, size)
        self.gets.add(messages, size)

    def sent_back(self, group: str, topic: str) -> None:
        """Count a message that a group has sent back, since it failed."""
        counter = self._sent_back.get((topic, group))
        if counter is None:
            counter = self._sent_back[topic, group] = self._table.counter()
        counter.add(1, 0)

    def forget_topic(self, topic: str) -> None:
        """Drop the counters of a topic that was deleted."""
        self._forget(self._put, lambda key: key[0] == topic)
        self._forget(self._get, lambda key: key[0] == topic)
        self._forget(self._sent_back, lambda key: key[0] == topic)
        self._puts_of.pop(topic, None)
        self._gets_of = {key: found for key, found in self._gets_of.items() if key[0] != topic}

    def forget_group(self, group: str) -> None:
        """Drop the counters of a group that was deleted."""
        self._forget(self._get, lambda key: key[1] == group)
        self._forget(self._sent_back, lambda key: key[1] == group)
        self._gets_of = {key: found for key, found in self._gets_of.items() if key[1] != group}

    def sample(self) -> None:
        """Sample all counters; call it every `SAMPLE_INTERVAL_MS`."""
        self._table.sample(self._clock.monotonic_ms())
        begin_ms, end_ms = self._day_ms
        now_ms = self._clock.now_ms()
        if not begin_ms <= now_ms < end_ms:
            self._day_ms = _local_day_ms(now_ms)
            self._midnights = self._midnights[1], (self.puts.messages, self.gets.messages)

    # --- reading ----------------------------------------------------------------------------------

    def view(self, name: str, key: str) -> BrokerStats | None:
        """Return one statistic by its protocol name; None if nothing of it was counted."""
        counters = self._counters(name, key)
        if not counters:
            return None
        column = _BYTES if name.endswith("_SIZE") else _MESSAGES
        minute, hour, day = (
            _window(*history.change(counters), column) for history in self._table.histories
        )
        return BrokerStats(stats_minute=minute, stats_hour=hour, stats_day=day)

    def consume_tps(self, group: str, topic: str) -> float:
        """Return the messages per second that a group got of a topic in the last minute."""
        seen = self.view("GROUP_GET_NUMS", f"{topic}@{group}")
        return 0.0 if seen is None else seen.stats_minute.tps

    def message_rates(self, counter: Counter) -> Rates:
        """Return the rates of a total's messages."""
        return self._table.rates(counter, _MESSAGES)

    def request_rates(self, counter: Counter) -> Rates:
        """Return the rates of the requests of a total."""
        return self._table.rates(counter, _TIMES)

    @property
    def days(self) -> tuple[tuple[int, int], ...]:
        """Messages stored and delivered since the start: at the last two midnights, and now."""
        return *self._midnights, (self.puts.messages, self.gets.messages)

    def _counters(self, name: str, key: str) -> list[Counter]:
        """Return the counters of a statistic by its protocol name and its key."""
        topic, _, last = key.rpartition("@")
        match name:
            case "TOPIC_PUT_NUMS" | "TOPIC_PUT_SIZE":
                return self._puts_of.get(key, [])
            case "QUEUE_PUT_NUMS" | "QUEUE_PUT_SIZE":
                found = self._put.get((topic, _number(last)))
            case "GROUP_GET_NUMS" | "GROUP_GET_SIZE":
                return self._gets_of.get((topic, last), [])
            case "QUEUE_GET_NUMS" | "QUEUE_GET_SIZE":
                topic, _, queue_id = topic.rpartition("@")
                found = self._get.get((topic, last, _number(queue_id)))
            case "SNDBCK_PUT_NUMS" if not topic:
                # A group alone, which Apache RocketMQ does not have: of all its topics.
                return [each for (_, group), each in self._sent_back.items() if group == last]
            case "SNDBCK_PUT_NUMS":
                found = self._sent_back.get((topic, last))
            case "BROKER_PUT_NUMS" | "BROKER_GET_NUMS":
                total = self.puts if name == "BROKER_PUT_NUMS" else self.gets
                found = total if key == self._cluster else None
            case _:
                found = None
        return [] if found is None else [found]

    def _forget(self, counters: dict[K, Counter], unwanted: Callable[[K], bool]) -> None:
        self._table.forget([counters.pop(key) for key in list(counters) if unwanted(key)])


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else -1


def _window(change: Sequence[int], span_ms: int, column: int) -> StatsWindow:
    times = change[_TIMES]
    return StatsWindow(
        sum=change[column],
        tps=change[column] * 1000 / span_ms if span_ms else 0.0,
        avgpt=change[column] / times if times else 0.0,
    )


class _History:
    """Samples of all counters at fixed intervals; the oldest are dropped."""

    def __init__(self, interval_ms: int, keep: int) -> None:
        self.interval_ms = interval_ms
        self.samples: deque[tuple[int, _Sample]] = deque(maxlen=keep)

    def offer(self, now_ms: int, sample: _Sample) -> None:
        """Take a sample, if one is due."""
        # Samples come a little early or late: half of their interval is tolerated.
        slack_ms = SAMPLE_INTERVAL_MS // 2
        if not self.samples or now_ms - self.samples[-1][0] >= self.interval_ms - slack_ms:
            self.samples.append((now_ms, sample))

    def change(self, counters: Iterable[Counter]) -> tuple[Sequence[int], int]:
        """Return how much counters grew from the first sample to the last, and the time between."""
        if not self.samples:
            return [0] * _COLUMNS, 0
        rows = _rows(counters)
        (start_ms, first), (end_ms, last) = self.samples[0], self.samples[-1]
        added: list[int] = (_sum(last, rows) - _sum(first, rows)).tolist()
        return added, end_ms - start_ms


def _rows(counters: Iterable[Counter]) -> NDArray[np.int64]:
    return np.array([counter.row for counter in counters], np.int64)


def _table(sample: _Sample) -> NDArray[np.int64]:
    """Return the numbers of a sample, a row for each counter; changes them in place."""
    return np.frombuffer(sample, np.int64).reshape(-1, _COLUMNS)


def _sum(sample: _Sample, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    table = _table(sample)
    # A counter that is younger than the sample was zero then.
    total: NDArray[np.int64] = table[rows[rows < len(table)]].sum(axis=0)
    return total


class _Table:
    """The counters, each with its row in the samples."""

    def __init__(self) -> None:
        self._counters: list[Counter] = []
        self._free_rows: list[int] = []
        self._recent = _History(SAMPLE_INTERVAL_MS, _RATES_OVER_MS[-1] // SAMPLE_INTERVAL_MS + 1)
        self.histories = (
            _History(SAMPLE_INTERVAL_MS, 7),
            _History(_HOUR_SAMPLE_MS, 7),
            _History(_DAY_SAMPLE_MS, 25),
        )
        """Of a minute, an hour and a day."""

    def counter(self) -> Counter:
        if self._free_rows:
            return self._counters[self._free_rows.pop()]
        self._counters.append(Counter(len(self._counters)))
        return self._counters[-1]

    def forget(self, counters: Sequence[Counter]) -> None:
        """Give the rows of counters to the next new ones, with an empty history."""
        rows = _rows(counters)
        for history in self.histories:
            for _, sample in history.samples:
                table = _table(sample)
                table[rows[rows < len(table)]] = 0
        for counter in counters:
            self._counters[counter.row] = Counter(counter.row)
            self._free_rows.append(counter.row)

    def sample(self, now_ms: int) -> None:
        sample = array("q", [n for c in self._counters for n in (c.messages, c.bytes, c.times)])
        for history in self.histories:
            history.offer(now_ms, sample)
        self._recent.offer(now_ms, sample[: _FIXED_ROWS * _COLUMNS])

    def rates(self, counter: Counter, column: int) -> Rates:
        """Return the events per second of a counter over the newest samples."""
        at = counter.row * _COLUMNS + column
        return tuple(self._rate(at, over_ms) for over_ms in _RATES_OVER_MS)

    def _rate(self, at: int, over_ms: int) -> float | None:
        steps = over_ms // SAMPLE_INTERVAL_MS
        samples = self._recent.samples
        if len(samples) <= steps:
            return None
        (start_ms, first), (end_ms, last) = samples[-1 - steps], samples[-1]
        return (last[at] - first[at]) * 1000 / (end_ms - start_ms)


_FIXED_ROWS = 4
"""The totals come first in the table and are never forgotten; only they have rates."""


def _local_day_ms(epoch_ms: int) -> tuple[int, int]:
    """Return the start and end of the local day of a timestamp."""
    # People read these numbers against the clock on their wall.
    day = datetime.fromtimestamp(epoch_ms / 1000).date()  # noqa: DTZ006 - the local day
    begin, end = (datetime.combine(each, time()) for each in (day, day + timedelta(days=1)))
    return round(begin.timestamp() * 1000), round(end.timestamp() * 1000)
