from __future__ import annotations

import pytest

from turbopump.broker.stats import SAMPLE_INTERVAL_MS, Stats
from turbopump.testing import VirtualClock
from turbopump.wire.bodies import StatsWindow


class Counting:
    """Statistics and their clock."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.stats = Stats("DefaultCluster", self.clock)

    def wait(self, samples: int = 1) -> None:
        for _ in range(samples):
            self.clock.advance_ns(SAMPLE_INTERVAL_MS * 1_000_000)
            self.stats.sample()

    def windows(self, name: str, key: str) -> tuple[StatsWindow, StatsWindow, StatsWindow]:
        found = self.stats.view(name, key)
        assert found is not None
        return found.stats_minute, found.stats_hour, found.stats_day

    def minute(self, name: str, key: str) -> StatsWindow:
        return self.windows(name, key)[0]


@pytest.fixture
def counting() -> Counting:
    return Counting()


def test_a_minute_counts_sums_rates_and_sizes(counting: Counting) -> None:
    for _ in range(6):
        counting.stats.put("T", 0, 10, 1000)
        counting.wait()
    assert counting.minute("TOPIC_PUT_NUMS", "T") == StatsWindow(sum=60, tps=1.0, avgpt=10.0)
    assert counting.minute("TOPIC_PUT_SIZE", "T") == StatsWindow(sum=6000, tps=100.0, avgpt=1000.0)
    counting.wait(6)
    assert counting.minute("TOPIC_PUT_NUMS", "T") == StatsWindow()


def test_hours_and_days_are_sampled_more_rarely(counting: Counting) -> None:
    counting.stats.put("T", 0, 6, 1)
    counting.wait(59)
    assert counting.windows("TOPIC_PUT_NUMS", "T")[1] == StatsWindow()
    counting.wait(1)
    hour = counting.windows("TOPIC_PUT_NUMS", "T")[1]
    assert (hour.sum, hour.tps) == (6, 6 / 600)
    counting.wait(300)
    minute, hour, day = counting.windows("TOPIC_PUT_NUMS", "T")
    assert (minute.sum, hour.sum, day.sum) == (0, 6, 6)
    assert day.tps == 6 / 3600
    counting.wait(24 * 360)
    assert counting.windows("TOPIC_PUT_NUMS", "T") == (StatsWindow(), StatsWindow(), StatsWindow())


@pytest.mark.parametrize(
    ("name", "key", "total"),
    [
        ("TOPIC_PUT_NUMS", "T", 3),
        ("TOPIC_PUT_SIZE", "T", 30),
        ("QUEUE_PUT_NUMS", "T@0", 1),
        ("QUEUE_PUT_SIZE", "T@1", 20),
        ("GROUP_GET_NUMS", "T@g", 12),
        ("GROUP_GET_SIZE", "T@g", 120),
        ("QUEUE_GET_NUMS", "T@1@g", 8),
        ("QUEUE_GET_SIZE", "T@0@g", 40),
        ("SNDBCK_PUT_NUMS", "T@g", 2),
        ("SNDBCK_PUT_NUMS", "g", 3),
        ("BROKER_PUT_NUMS", "DefaultCluster", 3),
        ("BROKER_GET_NUMS", "DefaultCluster", 28),
    ],
)
def test_names_and_keys(counting: Counting, name: str, key: str, total: int) -> None:
    stats = counting.stats
    stats.put("T", 0, 1, 10)
    stats.put("T", 1, 2, 20)
    stats.get("g", "T", 0, 4, 40)
    stats.get("g", "T", 1, 8, 80)
    stats.get("h", "T", 0, 16, 160)
    stats.sent_back("g", "T")
    stats.sent_back("g", "T")
    stats.sent_back("g", "U")
    stats.sent_back("h", "T")
    counting.wait()
    assert counting.minute(name, key).sum == total


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("TOPIC_PUT_NUMS", "Nowhere"),
        ("NO_SUCH_NAME", "T"),
        ("QUEUE_PUT_NUMS", "T"),
        ("QUEUE_PUT_NUMS", "T@x"),
        ("GROUP_GET_NUMS", "T"),
        ("QUEUE_GET_NUMS", "T@g"),
        ("QUEUE_GET_NUMS", "T@x@g"),
        ("SNDBCK_PUT_NUMS", ""),
        ("SNDBCK_PUT_NUMS", "g"),
        ("SNDBCK_PUT_NUMS", "T"),
        ("BROKER_PUT_NUMS", "OtherCluster"),
    ],
)
def test_unknown_names_and_keys(counting: Counting, name: str, key: str) -> None:
    counting.stats.put("T", 0, 1, 10)
    counting.stats.get("g", "T", 0, 1, 10)
    counting.wait()
    assert counting.stats.view(name, key) is None


def test_rates_need_as_many_samples_as_their_time_is_long(counting: Counting) -> None:
    counting.stats.put("T", 0, 50, 1)
    assert counting.stats.message_rates(counting.stats.puts)[0] is None
    counting.wait()
    assert counting.stats.message_rates(counting.stats.puts) == (5.0, None, None)
    counting.wait(59)
    assert counting.stats.message_rates(counting.stats.puts) == (0.0, 0.0, 50 / 600)
    counting.wait(1)
    assert counting.stats.message_rates(counting.stats.puts)[2] == 0.0


def test_pulls_that_find_and_that_do_not(counting: Counting) -> None:
    counting.stats.get("g", "T", 0, 32, 1)
    for _ in range(3):
        counting.stats.misses.add()
    counting.stats.failures.add()
    counting.wait()
    assert counting.stats.request_rates(counting.stats.gets)[0] == 0.1
    assert counting.stats.request_rates(counting.stats.misses)[0] == 0.3
    assert counting.stats.message_rates(counting.stats.gets)[0] == 3.2
    assert counting.stats.failures.times == 1


def test_the_rate_of_a_group(counting: Counting) -> None:
    assert counting.stats.consume_tps("g", "T") == 0.0
    counting.stats.get("g", "T", 0, 20, 1)
    counting.stats.get("g", "T", 1, 20, 1)
    counting.wait()
    assert counting.stats.consume_tps("g", "T") == 4.0


def test_totals_at_midnight(counting: Counting) -> None:
    counting.stats.put("T", 0, 5, 1)
    counting.wait(8640)
    counting.stats.put("T", 0, 7, 1)
    assert [puts for puts, _ in counting.stats.days] == [0, 5, 12]
    counting.wait(8640)
    assert counting.stats.days == ((5, 0), (12, 0), (12, 0))


def test_removed_topics_and_groups_leave_no_counter_behind(counting: Counting) -> None:
    stats = counting.stats
    stats.put("Stays", 0, 1, 1)
    for number in range(1000):
        topic = f"T{number}"
        stats.put(topic, 0, 1, 1)
        stats.get("g", topic, 0, 1, 1)
        stats.sent_back("g", topic)
        counting.wait()
        stats.forget_topic(topic)
        assert stats.view("TOPIC_PUT_NUMS", topic) is None
        assert stats.view("GROUP_GET_NUMS", f"{topic}@g") is None
    stats.put("Stays", 0, 4, 1)
    counting.wait()
    assert len(stats._table._counters) < 200
    assert counting.minute("TOPIC_PUT_NUMS", "Stays").sum == 4
    assert counting.windows("TOPIC_PUT_NUMS", "Stays")[2].sum == 1
    assert stats.puts.messages == 1005


def test_a_new_topic_has_no_history_of_a_forgotten_one(counting: Counting) -> None:
    counting.stats.put("Old", 0, 10, 1)
    counting.wait(8)
    counting.stats.forget_topic("Old")
    counting.stats.put("New", 0, 3, 1)
    counting.wait()
    assert counting.minute("TOPIC_PUT_NUMS", "New").sum == 3


def test_a_group_can_be_forgotten(counting: Counting) -> None:
    counting.stats.get("g", "T", 0, 1, 1)
    counting.stats.get("h", "T", 0, 1, 1)
    counting.stats.sent_back("g", "T")
    counting.stats.forget_group("g")
    assert counting.stats.view("GROUP_GET_NUMS", "T@g") is None
    assert counting.stats.view("SNDBCK_PUT_NUMS", "T@g") is None
    assert counting.stats.view("GROUP_GET_NUMS", "T@h") is not None
