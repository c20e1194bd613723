"""Objects that outlive a worker's first call are not scanned again."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from turbopump.spark.worker_process import Lasting


@pytest.fixture(autouse=True)
def nothing_set_aside() -> Iterator[None]:
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    yield
    gc.unfreeze()
    if was_frozen:
        gc.freeze()


def test_the_second_call_freezes_existing_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    lasting = Lasting()
    lasting.begin_call()
    assert gc.get_freeze_count() == 0
    lasting.begin_call()
    there = gc.get_freeze_count()
    assert there > 1000
    lasting.begin_call()
    assert gc.get_freeze_count() <= there


def test_other_processes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_REUSE_WORKER", raising=False)
    lasting = Lasting()
    for _ in range(3):
        lasting.begin_call()
    assert gc.get_freeze_count() == 0
