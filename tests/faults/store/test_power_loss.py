"""The power fails: everything acknowledged in synchronous mode survives."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from appending import append
from store_work import wait_idle
from turbopump.machine import Machine
from turbopump.store import FlushMode, Store
from turbopump.testing import Disk
from unit.store.support import ManualClock, bodies, record, small_config

pytestmark = pytest.mark.slow

CONFIG = small_config(FlushMode.SYNC)
TOPIC_WEIGHTS = {"Common": 30} | {f"Rare{number}": 1 for number in range(6)}
"""Rare queues have no message in the replayed part: their files and names must be on disk."""


ROOT = Path("/store")


def lose_power(seed: int) -> None:
    chosen = random.Random(seed)
    disk, clock = Disk(random=chosen), ManualClock()
    machine = Machine(disk, disk.background, clock)
    store = Store.open(ROOT, CONFIG, machine)
    acknowledged: dict[str, list[bytes]] = {topic: [] for topic in TOPIC_WEIGHTS}
    keys: list[tuple[str, str]] = []
    for number in range(chosen.randrange(1, 120)):
        (topic,) = chosen.choices(list(TOPIC_WEIGHTS), list(TOPIC_WEIGHTS.values()))
        body = b"%d" % number * chosen.randrange(1, 200)
        append(store, [record(body, topic=topic, KEYS=f"k{number}")]).durable.result()
        acknowledged[topic].append(body)
        keys.append((topic, f"k{number}"))
        clock.advance(chosen.choice((1, 600, 5000)))
        if chosen.random() < 0.01:
            # The clock is set back.
            clock.wall_ms -= 3_600_000
        if chosen.random() < 0.3:
            store.tick()
            wait_idle(store)
    # The power fails before the next write is on disk, or after a part of it.
    operations_left = chosen.randrange(12)

    def fail_power(*_: object) -> None:
        nonlocal operations_left
        operations_left -= 1
        if operations_left == 0:
            disk.die()

    disk.on_operation = fail_power
    append(store, [record(b"never waited for")])
    store.tick()
    disk.die()
    store.close()
    disk.on_operation = None
    disk.lose_unsynced()
    disk.close_all()
    with Store.open(ROOT, CONFIG, machine) as again:
        assert again.recovered.crashed
        for topic, expected in acknowledged.items():
            assert bodies(again, topic)[: len(expected)] == expected
        for topic, key in keys:
            assert len(again.messages_by_key(topic, key, 64, 0, 1 << 60)) >= 1


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 24))]
)
def test_acknowledged_messages_survive(seed: int) -> None:
    lose_power(seed)


@pytest.mark.long
def test_acknowledged_messages_survive_many_power_losses() -> None:
    for seed in range(100, 600):
        lose_power(seed)
