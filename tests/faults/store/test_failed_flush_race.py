"""Flushes fail while messages wait for the next one: writers of dropped messages get an error."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import threading
import time
from pathlib import Path

import pytest

from appending import append
from turbopump.errors import WriteFailed, WriteRefused
from turbopump.machine import Machine
from turbopump.store import Appended, Files, FlushConfig, FlushMode, Store, StoreConfig
from turbopump.wire.record import decode_record
from unit.store.support import ManualClock, bodies, record, small_config

pytestmark = pytest.mark.slow

SYNC = small_config(FlushMode.SYNC)
PATIENCE_S = 10.0


def _is_flusher() -> bool:
    return threading.current_thread().name.startswith("store-flusher")


def _path(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())


class StagedFiles(Files):
    """A disk whose flushes are controlled by a test."""

    def __init__(self) -> None:
        self.plan: list[tuple[threading.Event, bool]] = []
        """For each upcoming flush of the log: the event it waits for, and whether it fails."""
        self.reached = threading.Semaphore(0)
        self.queues_may_go_on = threading.Event()
        self.queues_may_go_on.set()

    def sync(self, fd: int) -> None:
        if _is_flusher():
            if "commitlog" in _path(fd) and self.plan:
                may_go_on, fails = self.plan.pop(0)
                self.reached.release()
                may_go_on.wait(PATIENCE_S)
                if fails:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            elif "consumequeue" in _path(fd):
                self.queues_may_go_on.wait(PATIENCE_S)
        super().sync(fd)


def test_a_group_commit_waiting_during_log_repair_fails(tmp_path: Path) -> None:
    """The owner repairs the log, dropping the group's messages, before the flusher gets to it."""
    files, clock = StagedFiles(), ManualClock()
    clock.elapsed_ms = 100_000
    with Store.open(tmp_path, SYNC, machine=Machine(files=files, clock=clock)) as store:
        append(store, [record(b"before")]).durable.result(PATIENCE_S)
        first, second = threading.Event(), threading.Event()
        files.plan = [(first, False), (second, True)]
        append(store, [record(b"flushed")])
        assert files.reached.acquire(timeout=PATIENCE_S)
        files.queues_may_go_on.clear()
        for _ in range(2):
            clock.advance(3000)
            store.tick()  # syncs queue files, which keeps the flusher busy
        doomed = append(store, [record(b"doomed")])
        first.set()
        assert files.reached.acquire(timeout=PATIENCE_S)
        waiting = append(store, [record(b"waiting")])
        second.set()
        with pytest.raises(WriteFailed):
            doomed.durable.result(PATIENCE_S)
        after = append(store, [record(b"after")])
        files.queues_may_go_on.set()
        after.durable.result(PATIENCE_S)
        with pytest.raises(WriteFailed):
            waiting.durable.result(PATIENCE_S)
        assert bodies(store) == [b"before", b"flushed", b"after"]
    with Store.open(tmp_path, SYNC) as store:
        assert bodies(store) == [b"before", b"flushed", b"after"]


class FlakyFiles(Files):
    """A slow disk that fails one flush of the log in ten."""

    def __init__(self) -> None:
        self._random = random.Random(1)
        self.is_flaky = False

    def sync(self, fd: int) -> None:
        if self.is_flaky and _is_flusher():
            time.sleep(0.002)
            if "commitlog" in _path(fd) and self._random.random() < 0.1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(fd)


def _send_for(store: Store, seconds: float) -> list[tuple[bytes, Appended]]:
    sent = []
    number = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        body = b"%d" % number
        with contextlib.suppress(WriteRefused):
            sent.append((body, append(store, [record(body, topic=f"T{number % 50}")])))
        number += 1
        time.sleep(0.0005)
        if number % 10 == 0:
            store.tick()
    return sent


def stress(root: Path, seconds: float, heal_interval_ms: int) -> None:
    flush = FlushConfig(
        mode=FlushMode.SYNC,
        heal_interval_ms=heal_interval_ms,
        interval_ms=10,
        queue_interval_ms=10,
    )
    config = StoreConfig(
        segment_bytes=1 << 20,
        queue_segment_units=1000,
        index_slots=100,
        index_entries=4000,
        flush=flush,
    )
    files = FlakyFiles()
    acknowledged = []
    with Store.open(root, config, machine=Machine(files=files)) as store:
        files.is_flaky = True
        for body, appended in _send_for(store, seconds):
            try:
                appended.durable.result(PATIENCE_S)
            except WriteRefused:
                continue
            acknowledged.append((body, appended))
        files.is_flaky = False
    assert acknowledged
    with Store.open(root, config) as store:
        for body, appended in acknowledged:
            message = store.message_at(appended.physical_offset)
            assert message is not None
            assert decode_record(message).stored_body == body


@pytest.mark.parametrize("heal_interval_ms", [1, 20])
def test_messages_acknowledged_on_a_flaky_disk_are_stored(
    heal_interval_ms: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    stress(tmp_path, 3.0, heal_interval_ms)


@pytest.mark.long
@pytest.mark.parametrize("heal_interval_ms", [1, 5, 20])
def test_messages_acknowledged_on_a_flaky_disk_are_stored_in_a_long_run(
    heal_interval_ms: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    stress(tmp_path, 12.0, heal_interval_ms)
