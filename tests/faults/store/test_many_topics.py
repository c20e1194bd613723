"""Thousands of topics: few open files, little memory, nothing mixed up."""

from __future__ import annotations

from pathlib import Path

import pytest

from appending import append_all
from store_work import open_file_count
from turbopump.machine import Machine
from turbopump.store import Store, StoreConfig
from unit.store.support import ManualClock, bodies, record

pytestmark = pytest.mark.slow


def fill_and_check(tmp_path: Path, topics: int) -> None:
    config = StoreConfig(
        segment_bytes=1 << 20, queue_segment_units=100, index_slots=100, index_entries=1000,
        open_files_max=50,
    )  # fmt: skip
    clock = ManualClock()
    names = [f"Topic-{number}" for number in range(topics)]
    with Store.open(tmp_path, config, machine=Machine(clock=clock)) as store:
        for round_ in range(2):
            for at in range(0, topics, 100):
                groups = [[record(f"{name}/{round_}".encode(), topic=name)] for name in names[at:]]
                append_all(store, groups[:100])
            clock.advance(2000)
            store.tick()
        assert len(store.queue_ids()) == topics
        assert open_file_count(store) <= 50
    (tmp_path / "abort").touch()
    with Store.open(tmp_path, config, machine=Machine(clock=clock)) as store:
        assert store.recovered.crashed
        for name in names[:: max(1, topics // 200)]:
            assert bodies(store, name) == [f"{name}/0".encode(), f"{name}/1".encode()]
        assert open_file_count(store) <= 50


def test_a_thousand_topics(tmp_path: Path) -> None:
    fill_and_check(tmp_path, 1000)


@pytest.mark.long
def test_ten_thousand_topics(tmp_path: Path) -> None:
    fill_and_check(tmp_path, 10_000)
