"""Background jobs in virtual time."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path

import pytest

from turbopump.machine.files import make_directory_durable, sync_path, write_file
from turbopump.testing import Disk, virtual_loop, virtual_time

FILE = Path("/file")


def slow_disk(sync_ms: int) -> Disk:
    disk = Disk(virtual_loop())
    make_directory_durable(disk, FILE.parent)
    write_file(disk, FILE, b"1")
    disk.sync_time = sync_ms / 1000
    return disk


@virtual_time()
async def test_jobs_run_on_the_loop_in_the_order_of_submission() -> None:
    disk, seen = Disk(virtual_loop()), list[object]()
    worker = disk.background.worker("w")
    here = threading.get_ident()
    jobs = [
        worker.submit(partial(lambda each: seen.append((each, threading.get_ident())), number))
        for number in range(3)
    ]
    assert not seen, "not before the next loop iteration"
    await asyncio.wrap_future(jobs[-1])
    assert seen == [(0, here), (1, here), (2, here)]


@virtual_time()
async def test_an_error_of_a_job_is_its_futures() -> None:
    worker = Disk(virtual_loop()).background.worker("w")
    failing, following = worker.submit(lambda: 1 // 0), worker.submit(lambda: "done")
    with pytest.raises(ZeroDivisionError):
        await asyncio.wrap_future(failing)
    assert await asyncio.wrap_future(following) == "done"


@virtual_time()
async def test_a_job_waits_for_a_slow_disk_and_others_continue() -> None:
    loop, disk = virtual_loop(), slow_disk(200)
    job = disk.background.worker("w").submit(lambda: sync_path(disk, FILE))
    for _ in range(3):
        await asyncio.sleep(0.05)
        assert not job.done()
        assert disk.is_waiting
    await asyncio.wrap_future(job)
    assert loop.time() == pytest.approx(0.2)
    assert not disk.is_waiting


@virtual_time()
async def test_writes_during_a_sync_are_not_covered_by_it() -> None:
    disk = slow_disk(200)
    job = disk.background.worker("w").submit(lambda: sync_path(disk, FILE))
    await asyncio.sleep(0.1)
    fd = disk.open(FILE)
    disk.write(fd, b"2", 0)
    await asyncio.wrap_future(job)
    disk.sync_directory(FILE.parent)
    disk.lose_unsynced()
    assert disk.read(disk.open(FILE), 1, 0) == b"1"


@virtual_time()
async def test_power_may_fail_during_a_sync() -> None:
    disk = slow_disk(200)
    disk.sync_directory(FILE.parent)
    job = disk.background.worker("w").submit(lambda: sync_path(disk, FILE))
    await asyncio.sleep(0.1)
    disk.lose_unsynced()
    await asyncio.wrap_future(job)
    assert disk.file_size(FILE) == 0


@virtual_time()
async def test_jobs_wait_for_a_stalled_disk_until_it_recovers() -> None:
    disk = slow_disk(0)
    disk.stall()
    worker = disk.background.worker("w")
    jobs = [worker.submit(lambda: sync_path(disk, FILE)) for _ in range(2)]
    await asyncio.sleep(1000)
    assert not any(job.done() for job in jobs)
    disk.heal()
    await asyncio.wrap_future(jobs[1])
    assert virtual_loop().time() == 1000


@virtual_time()
async def test_a_caller_that_cannot_wait_on_the_loop_advances_the_clock() -> None:
    disk = slow_disk(300)
    worker = disk.background.worker("w")
    jobs = [worker.submit(lambda: sync_path(disk, FILE)) for _ in range(2)]
    await asyncio.sleep(0.1)
    worker.wait_idle()
    assert all(job.done() for job in jobs)
    assert virtual_loop().time() == pytest.approx(0.6)
    disk.stall()
    stuck = worker.submit(lambda: sync_path(disk, FILE))
    await asyncio.sleep(5)
    worker.close()
    assert stuck.done(), "nothing else could heal it"
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit(lambda: None)


@virtual_time()
async def test_a_lock_hurries_the_job_that_holds_it() -> None:
    disk = slow_disk(300)
    lock = disk.background.lock()

    def hold() -> str:
        with lock:
            sync_path(disk, FILE)
        return "held"

    job = disk.background.worker("w").submit(hold)
    await asyncio.sleep(0.1)
    with lock:
        assert job.done()
        assert virtual_loop().time() == pytest.approx(0.3)


def test_without_a_loop_jobs_run_immediately() -> None:
    disk = Disk()
    worker = disk.background.worker("w")
    assert worker.submit(lambda: 7).result(0) == 7
    worker.close()
