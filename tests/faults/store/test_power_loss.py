"""The power fails: what was acknowledged in synchronous mode is there afterwards."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from turbopump.machine import Machine
from turbopump.store import FlushMode, Store
from unit.store.disks import PowerLossFiles
from unit.store.support import ManualClock, bodies, record, small_config

pytestmark = pytest.mark.slow

CONFIG = small_config(FlushMode.SYNC)
TOPIC_WEIGHTS = {"Common": 30} | {f"Rare{number}": 1 for number in range(6)}
"""Rare queues have no message in the replayed part: their files must be on disk, with names."""


def lose_power(tmp_path: Path, seed: int) -> None:
    chosen = random.Random(seed)
    root = tmp_path / f"running{seed}"
    root.mkdir()
    files = PowerLossFiles(root)
    clock = ManualClock()
    store = Store.open(root, CONFIG, machine=Machine(files=files, clock=clock))
    acknowledged: dict[str, list[bytes]] = {topic: [] for topic in TOPIC_WEIGHTS}
    keys: list[tuple[str, str]] = []
    for number in range(chosen.randrange(1, 120)):
        (topic,) = chosen.choices(list(TOPIC_WEIGHTS), list(TOPIC_WEIGHTS.values()))
        body = b"%d" % number * chosen.randrange(1, 200)
        store.append([record(body, topic=topic, KEYS=f"k{number}")]).durable.result()
        acknowledged[topic].append(body)
        keys.append((topic, f"k{number}"))
        clock.advance(chosen.choice((1, 600, 5000)))
        if chosen.random() < 0.01:
            # Somebody sets the clock back.
            clock.wall_ms -= 3_600_000
        if chosen.random() < 0.3:
            store.tick()
            store._flusher.wait_idle()
    store.append([record(b"never waited for")])
    found = tmp_path / f"found{seed}"
    store._flusher.wait_idle()
    files.after_power_loss(found, chosen)
    store.close()
    with Store.open(found, CONFIG, machine=Machine(clock=clock)) as again:
        assert again.recovered.crashed
        for topic, expected in acknowledged.items():
            assert bodies(again, topic)[: len(expected)] == expected
        for topic, key in keys:
            assert len(again.messages_by_key(topic, key, 64, 0, 1 << 60)) >= 1


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 24))]
)
def test_acknowledged_messages_survive(seed: int, tmp_path: Path) -> None:
    lose_power(tmp_path, seed)


@pytest.mark.long
def test_acknowledged_messages_survive_many_power_losses(tmp_path: Path) -> None:
    for seed in range(100, 600):
        lose_power(tmp_path, seed)
