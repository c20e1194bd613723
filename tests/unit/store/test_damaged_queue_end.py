"""Noise over the last units of a queue: messages in the log are served, at their own offsets."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from appending import append
from turbopump.message import QueueOffset
from turbopump.store import Found, Store
from unit.store.support import record, small_config

COUNT, QUEUES, UNIT_BYTES = 90, 3, 20
CONFIG = small_config()
NOISES = [(seed, first, last) for seed in (4, 6, 10) for first, last in ((1, 9), (1, 2), (4, 20))]
"""The noise; and which units are overwritten, counted from the last."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole") / "store"
    with Store.open(root, CONFIG) as store:
        for number in range(COUNT):
            append(store, [record(b"%03d" % number, queue_id=number % QUEUES)])
    return root


def bodies(store: Store, queue_id: int) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    offset, end = store.queue_range("Topic", queue_id)
    for _ in range(10 * COUNT):
        if offset >= end:
            return found
        outcome = store.read("Topic", queue_id, offset, 32)
        if isinstance(outcome, Found):
            messages = map(bytes, outcome.messages)
            found += zip(outcome.queue_offsets, messages, strict=True)
        offset = outcome.next_offset
    raise AssertionError(f"queue {queue_id} stands still at {offset}")


def make_noise(root: Path, seed: int, first: int, last: int) -> None:
    """Overwrite units of queue 0, counted from the last, which is 1."""
    chance = random.Random(seed)
    files = sorted((root / "consumequeue" / "Topic" / "0").iterdir())
    size = files[0].stat().st_size
    for back in range(first, last + 1):
        at = (COUNT // QUEUES - back) * UNIT_BYTES
        with (files[0].parent / f"{at // size * size:020d}").open("r+b") as file:
            file.seek(at % size)
            file.write(chance.randbytes(UNIT_BYTES))


@pytest.mark.parametrize("crashed", [False, True])
@pytest.mark.parametrize(("seed", "first", "last"), NOISES)
def test_a_queue_is_complete_after_noise_over_its_end(
    seed: int, first: int, last: int, crashed: bool, whole: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(whole, tmp_path / "store"))
    with Store.open(shutil.copytree(whole, tmp_path / "other"), CONFIG) as store:
        expected = bodies(store, 0)
    assert len(expected) == COUNT // QUEUES
    make_noise(root, seed, first, last)
    if crashed:
        (root / "abort").touch()
    with Store.open(root, CONFIG) as store:
        assert bodies(store, 0) == expected
        appended = append(store, [record(b"new")])
        assert appended.queue_offset == QueueOffset(len(expected))
