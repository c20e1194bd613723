"""Tests of the project's consumer; hours of retries take milliseconds."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from billing import GROUP, TOPIC, BankUnavailable, Billing, consumer

from turbopump import Message, Producer
from turbopump.aio import PushConsumer
from turbopump.testing import Cluster, RunningServer, failing


class FakeBank:
    """A bank that can be closed."""

    def __init__(self) -> None:
        self.is_open = True
        self.attempts: Counter[str] = Counter()
        self.charged: dict[str, int] = {}

    async def charge(self, order: str, cents: int) -> None:
        self.attempts[order] += 1
        if not self.is_open:
            raise BankUnavailable
        self.charged[order] = cents


@pytest.fixture
def bank() -> FakeBank:
    return FakeBank()


def order(number: int, cents: int = 500) -> Message:
    body = json.dumps({"number": f"A{number}", "cents": cents}).encode()
    return Message(TOPIC, body, tags="created", keys=[f"A{number}"])


async def test_every_order_is_charged(turbopump_cluster: Cluster, bank: FakeBank) -> None:
    async with consumer(bank, turbopump_cluster.nameserver):
        await turbopump_cluster.send(*(order(number) for number in range(20)))
        await turbopump_cluster.send(Message(TOPIC, b"{}", tags="cancelled"))
        await turbopump_cluster.until_consumed(GROUP)
    assert bank.charged == {f"A{number}": 500 for number in range(20)}


async def test_a_closed_bank_is_tried_until_it_opens(
    turbopump_cluster: Cluster, bank: FakeBank
) -> None:
    bank.is_open = False
    async with consumer(bank, turbopump_cluster.nameserver):
        await turbopump_cluster.send(order(1))
        await turbopump_cluster.advance(minutes=10)
        assert not bank.charged
        bank.is_open = True
        await turbopump_cluster.until(lambda: bank.charged, hours=1)
    assert 5 <= bank.attempts["A1"] <= 8
    assert not turbopump_cluster.dead_letters(GROUP)


async def test_after_sixteen_retries_an_order_is_a_dead_letter(
    turbopump_cluster: Cluster, bank: FakeBank
) -> None:
    bank.is_open = False
    await turbopump_cluster.make_topic(TOPIC, queues=1)
    start_ms = turbopump_cluster.clock.now_ms()
    async with consumer(bank, turbopump_cluster.nameserver):
        await turbopump_cluster.send(order(1))
        await turbopump_cluster.until(lambda: turbopump_cluster.dead_letters(GROUP), hours=5)
    assert bank.attempts["A1"] == 1 + 16
    assert [letter.keys for letter in turbopump_cluster.dead_letters(GROUP)] == [["A1"]]
    minutes = (turbopump_cluster.clock.now_ms() - start_ms) / 60_000
    assert minutes == pytest.approx(4 * 60 + 46, abs=1)


async def test_nonsense_is_not_tried_again(turbopump_cluster: Cluster, bank: FakeBank) -> None:
    async with consumer(bank, turbopump_cluster.nameserver):
        await turbopump_cluster.send(
            Message(TOPIC, b"what?", tags="created"), order(2, cents=-1), order(3)
        )
        await turbopump_cluster.until_consumed(GROUP)
    assert len(turbopump_cluster.dead_letters(GROUP)) == 2
    assert bank.charged == {"A3": 500}


async def test_a_crash_of_the_broker_loses_no_order(
    turbopump_cluster: Cluster, bank: FakeBank
) -> None:
    async with consumer(bank, turbopump_cluster.nameserver):
        await turbopump_cluster.send(order(1))
        await turbopump_cluster.until(lambda: bank.charged)
        turbopump_cluster.cut(GROUP)
        await turbopump_cluster.send(order(2))
        await turbopump_cluster.crash()
        await turbopump_cluster.advance(minutes=3)
        await turbopump_cluster.start_broker()
        await turbopump_cluster.until_consumed(GROUP)
    assert bank.charged == {"A1": 500, "A2": 500}


async def test_a_mistake_in_the_listener_is_survived(
    turbopump_cluster: Cluster, bank: FakeBank
) -> None:
    async with PushConsumer(
        GROUP,
        failing(Billing(bank), times=2),
        nameserver=turbopump_cluster.nameserver,
        subscriptions={TOPIC: "created"},
        start_from="first",
    ):
        await turbopump_cluster.send(order(1))
        await turbopump_cluster.until_consumed(GROUP)
    assert bank.attempts == {"A1": 1}


def test_a_shop_in_real_time(turbopump_server: RunningServer) -> None:
    """For blocking programs, other languages and other processes."""
    with Producer("shop", nameserver=turbopump_server.nameserver) as shop:
        shop.send(order(1))
    assert [message.keys for message in turbopump_server.messages(TOPIC)] == [["A1"]]
