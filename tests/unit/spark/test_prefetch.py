"""Requests sent ahead: how many a range takes, and how many responses are useless."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from example_counts import at_most
from turbopump.spark.reading.prefetch import Prefetch

SMALL, LARGE = 200, 1_200_000


@dataclass
class Broker:
    """Answers with as many messages as it may; a message larger than a response is sent alone."""

    sizes: Sequence[int]
    count_max: int
    bytes_max: int = 1 << 20
    requests: int = 0
    sent_bytes: int = 0

    def reach(self, offset: int, count: int) -> int:
        """Return where a response ends."""
        self.requests += 1
        size, at = self.sizes[offset], offset + 1
        while at < min(len(self.sizes), offset + min(count, self.count_max)):
            if size + self.sizes[at] > self.bytes_max:
                break
            size += self.sizes[at]
            at += 1
        self.sent_bytes += size
        return at

    def read(self, in_flight_max: int = 128, count_max: int = 1000) -> None:
        """Request everything, and read it in order."""
        first = self.reach(0, min(count_max, len(self.sizes)))
        ahead = Prefetch(
            first,
            len(self.sizes),
            first,
            self.reach,
            count_max=count_max,
            in_flight_max=in_flight_max,
        )
        while ahead.at < ahead.end:
            ahead.ask()
            assert ahead.asked[0].offset <= ahead.at, "a gap"
            ahead.take(ahead.asked[0].answer)

    @property
    def times_sent(self) -> float:
        return self.sent_bytes / sum(self.sizes)


@pytest.mark.parametrize("count_max", [32, 1000])
def test_uniform_responses_take_as_few_requests_as_possible(count_max: int) -> None:
    broker = Broker([SMALL] * 4000, count_max)
    broker.read()
    assert broker.requests == -(-4000 // count_max)
    assert broker.times_sent == 1


@pytest.mark.parametrize("in_flight_max", [128, 32, 2, 1])
@pytest.mark.parametrize("every", [5000, 2000, 500])
def test_a_message_larger_than_a_response_causes_no_duplicate_reads(
    every: int, in_flight_max: int
) -> None:
    sizes = [LARGE if n % every == every // 2 else SMALL for n in range(10_000)]
    broker = Broker(sizes, 1000)
    broker.read(in_flight_max)
    assert broker.times_sent < 1.1
    # Each large one takes three more: before it, itself, and after it.
    assert broker.requests < 10 + 4 * sizes.count(LARGE)


@pytest.mark.parametrize("large", [1, 10, 300])
def test_small_messages_after_large_ones_fill_responses_again(large: int) -> None:
    broker = Broker([LARGE] * large + [SMALL] * 10_000, 1000)
    broker.read()
    assert broker.times_sent < 1.3
    # Requests in flight when responses grow are still small ones.
    assert broker.requests < large + 10 + 2 * 128


@given(
    sizes=st.lists(st.sampled_from([10, 300, 2000]), min_size=1, max_size=120),
    count_max=st.integers(1, 40),
    in_flight_max=st.integers(1, 20),
)
@settings(max_examples=at_most(40), deadline=None)
def test_there_are_no_gaps(sizes: list[int], count_max: int, in_flight_max: int) -> None:
    broker = Broker(sizes, 16, bytes_max=1000)
    broker.read(in_flight_max, count_max)
    assert broker.sent_bytes >= sum(sizes)


def test_a_response_with_more_than_requested_advances_to_the_end_of_the_range() -> None:
    ahead = Prefetch(8, 10, 3, lambda *_: 0, count_max=3, in_flight_max=2)
    ahead.ask()
    ahead.take(12)
    assert ahead.at == ahead.end == 10
