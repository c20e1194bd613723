"""The power fails: what was acknowledged in synchronous mode is there afterwards."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from turbopump.store import FlushMode, Store
from unit.store.disks import PowerLossFiles
from unit.store.support import ManualClock, bodies, record, small_config

CONFIG = small_config(FlushMode.SYNC)


def lose_power(tmp_path: Path, seed: int) -> None:
    chosen = random.Random(seed)
    root = tmp_path / f"running{seed}"
    root.mkdir()
    files = PowerLossFiles(root)
    clock = ManualClock()
    store = Store.open(root, CONFIG, clock=clock, files=files)
    acknowledged: list[bytes] = []
    for number in range(chosen.randrange(1, 80)):
        body = b"%d" % number * chosen.randrange(1, 60)
        appended = store.append([record(body, KEYS=f"k{number}")])
        if chosen.random() < 0.7:
            appended.durable.result()
            acknowledged = [*acknowledged, body]
        else:
            # Not waited for, but whoever waits later has this one too.
            acknowledged = [*acknowledged, body] if appended.durable.done() else acknowledged
            appended.durable.result()
            acknowledged = acknowledged if acknowledged[-1:] == [body] else [*acknowledged, body]
        clock.advance(chosen.choice((1, 600, 5000)))
        if chosen.random() < 0.3:
            store.tick()
            store._flusher.wait_idle()
    store.append([record(b"never waited for")])
    found = tmp_path / f"found{seed}"
    store._flusher.wait_idle()
    files.after_power_loss(found, chosen)
    store.close()
    with Store.open(found, CONFIG, clock=clock) as again:
        assert again.recovered.crashed
        assert bodies(again)[: len(acknowledged)] == acknowledged
        for number in range(len(acknowledged)):
            keyed = again.messages_by_key("Topic", f"k{number}", 64, 0, 1 << 60)
            assert len(keyed) >= 1


@pytest.mark.parametrize("seed", range(12))
def test_acknowledged_messages_survive(seed: int, tmp_path: Path) -> None:
    lose_power(tmp_path, seed)


@pytest.mark.long
def test_acknowledged_messages_survive_many_power_losses(tmp_path: Path) -> None:
    for seed in range(100, 600):
        lose_power(tmp_path, seed)
