"""Objects that outlive a worker's first call are not scanned again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import count

import pytest

from turbopump.spark import worker_process
from turbopump.spark.worker_process import begin_call


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
    monkeypatch.setattr(worker_process, "_calls", count(1))
    begin_call()
    assert gc.get_freeze_count() == 0
    begin_call()
    there = gc.get_freeze_count()
    assert there > 1000
    begin_call()
    assert gc.get_freeze_count() <= there


def test_other_processes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_REUSE_WORKER", raising=False)
    monkeypatch.setattr(worker_process, "_calls", count(1))
    for _ in range(3):
        begin_call()
    assert gc.get_freeze_count() == 0
