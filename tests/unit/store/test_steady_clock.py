"""Ages of messages while the wall clock is set: by elapsed time."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from appending import append
from turbopump.machine import Machine
from turbopump.message import PhysicalOffset
from turbopump.store import FlushMode, Store
from turbopump.store.steady_clock import SteadyClock
from unit.store.support import FaultyFiles, ManualClock, record, small_config

HOUR_MS = 3_600_000


def at(position: int) -> PhysicalOffset:
    return PhysicalOffset(position)


def test_many_steps_make_old_messages_younger_and_none_older() -> None:
    clock = ManualClock()
    steady_clock = SteadyClock(clock)
    steady_clock.begin(at(1000))
    stored: list[tuple[int, int]] = []
    for number in range(200):
        clock.wall_ms += (-1) ** number * (number + 1) * 1000
        steady_clock.check(at(1000 + number), clock.now_ms())
        stored.append((clock.now_ms(), steady_clock.now_ms()))
        clock.advance(100)
    found = [
        steady_clock.stored_ms(at(1000 + number), wall) for number, (wall, _) in enumerate(stored)
    ]
    true = [time_ms for _, time_ms in stored]
    assert all(ours >= right for ours, right in zip(found, true, strict=True))
    assert found[-60:] == true[-60:]
    walls = np.array([wall for wall, _ in stored])
    assert (walls - steady_clock.shifts_ms(np.arange(1000, 1200))).tolist() == found


def test_small_steps_are_ignored_until_they_are_large() -> None:
    clock = ManualClock()
    steady_clock = SteadyClock(clock)
    for _ in range(3):
        clock.wall_ms += 40
        steady_clock.check(at(10), clock.now_ms())
    assert steady_clock.shift_ms == 120


def test_a_wall_clock_that_lags_by_less_than_a_step_makes_nothing_early() -> None:
    clock = ManualClock()
    steady_clock = SteadyClock(clock)
    # Rounded differently from the time since boot, or slowed down.
    clock.wall_ms -= 1
    clock.advance(1000)
    assert steady_clock.now_ms() == clock.now_ms()
    clock.wall_ms += 2
    assert steady_clock.now_ms() == clock.now_ms() - 1


@pytest.mark.parametrize("set_by_ms", [-HOUR_MS, -150, -100, 100, 150, HOUR_MS])
@pytest.mark.parametrize("since_tick_ms", [0, 60, 99, 500])
def test_the_first_message_after_a_step_counts_with_the_new_time(
    tmp_path: Path, set_by_ms: int, since_tick_ms: int
) -> None:
    clock = ManualClock()
    with Store.open(tmp_path, small_config(), machine=Machine(clock=clock)) as store:
        append(store, [record(b"before")])
        clock.advance(since_tick_ms)
        clock.wall_ms += set_by_ms
        appended = append(store, [record(b"after")])
        time_ms = store.steady_clock.stored_ms(
            appended.physical_offset, appended.store_timestamp_ms
        )
        assert time_ms == store.steady_clock.now_ms()
        assert store.steady_clock.stored_ms(at(0), 5) == 5


def test_positions_of_a_truncated_log_apply_to_messages_stored_there_later(
    tmp_path: Path,
) -> None:
    clock, files = ManualClock(), FaultyFiles()
    with Store.open(
        tmp_path, small_config(FlushMode.SYNC), machine=Machine(files=files, clock=clock)
    ) as store:
        append(store, [record(b"kept")]).durable.result()
        files.sync_error = errno.EIO
        lost = append(store, [record(b"lost" * 20)])
        assert lost.durable.exception() is not None
        clock.wall_ms += HOUR_MS
        store.steady_clock.check(store.written_end, clock.now_ms())
        files.sync_error = None
        clock.advance(5000)
        store.tick()
        appended = append(store, [record(b"new")])
        assert appended.physical_offset == lost.physical_offset
        time_ms = store.steady_clock.stored_ms(
            appended.physical_offset, appended.store_timestamp_ms
        )
        assert time_ms == store.steady_clock.now_ms()
