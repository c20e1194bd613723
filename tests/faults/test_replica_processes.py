"""Masters and slaves as processes, killed, cut off, slowed down and out of space under load.

At the end of each test, the slave has everything, and both logs are the same byte for byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from replica_processes import (
    MASTER,
    SLAVE,
    Link,
    ReplicaProcesses,
    check_replicas,
    loaded,
    numbers_at,
    runtime_info,
    until,
)
from torture.mounts import NotPermitted, fill, small_disk
from turbopump.net.loop import run
from turbopump.wire.codes import ResponseCode

pytestmark = pytest.mark.slow

HEADER_CUT, DATA_CUT = 6, 50_001
"""Positions in a connection's stream: within the first frame's header, and within a later body."""
SLOW_BYTES_PER_S = 4000


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[ReplicaProcesses]:
    with ReplicaProcesses(tmp_path) as made:
        yield made


def test_a_slave_is_killed_and_restarted_under_load(processes: ReplicaProcesses) -> None:
    async def work() -> None:
        processes.start(MASTER)
        processes.start(SLAVE)
        async with loaded(processes.addresses[MASTER]) as load:
            for _ in range(2):
                await load.until_answered(ResponseCode.SUCCESS)
                processes.kill(SLAVE)
                await load.until_answered(ResponseCode.SLAVE_NOT_AVAILABLE)
                await asyncio.to_thread(processes.start, SLAVE)
            await load.until_answered(ResponseCode.SUCCESS)
        await check_replicas(processes, load)

    run(work())


def test_a_master_is_killed_under_load(processes: ReplicaProcesses) -> None:
    async def work() -> None:
        processes.start(MASTER)
        processes.start(SLAVE)
        info = await runtime_info(processes.addresses[SLAVE])
        async with loaded(processes.addresses[MASTER]) as load:
            await load.until_answered(ResponseCode.SUCCESS, 100)
            processes.kill(MASTER)
            # Everything acknowledged is on the other machine.
            found = await numbers_at(processes.addresses[SLAVE])
            assert load.acknowledged <= found
            ha_port = info["replicationMaster"].rpartition(":")[2]
            await asyncio.to_thread(processes.start, MASTER, {"haListenPort": ha_port})
            await load.until_answered(ResponseCode.SUCCESS)
        await check_replicas(processes, load)

    run(work())


async def behind_a_link(processes: ReplicaProcesses) -> Link:
    """Start both to learn the master's HA address, and return a link to it."""
    processes.start(MASTER)
    processes.start(SLAVE)
    # Known before it is ready: a slave registers first, and the answer has its master's address.
    info = await runtime_info(processes.addresses[SLAVE])
    processes.stop(SLAVE)
    return Link(info["replicationMaster"])


def test_a_link_is_cut_in_the_middle_of_a_frame(processes: ReplicaProcesses) -> None:
    async def work() -> None:
        link = await behind_a_link(processes)
        async with link.open() as address:
            async with loaded(processes.addresses[MASTER]) as load:
                link.cut_after = HEADER_CUT
                await asyncio.to_thread(processes.start, SLAVE, {"haMasterAddress": address})
                await until(lambda: link.cuts == 1)
                link.cut_after = DATA_CUT
                await until(lambda: link.cuts == 2)
                await load.until_answered(ResponseCode.SUCCESS)
            await check_replicas(processes, load)

    run(work())


def test_a_slow_slave(processes: ReplicaProcesses) -> None:
    async def work() -> None:
        link = await behind_a_link(processes)
        async with link.open() as address:
            async with loaded(processes.addresses[MASTER]) as load:
                link.bytes_per_s = SLOW_BYTES_PER_S
                await asyncio.to_thread(processes.start, SLAVE, {"haMasterAddress": address})
                await load.until_answered(ResponseCode.FLUSH_SLAVE_TIMEOUT)
                link.bytes_per_s = None
                await load.until_answered(ResponseCode.SUCCESS)
            await check_replicas(processes, load)

    run(work())


def test_a_new_slave_while_messages_are_sent(processes: ReplicaProcesses) -> None:
    async def work() -> None:
        processes.start(MASTER)
        async with loaded(processes.addresses[MASTER]) as load:
            # More than one file of the log.
            await load.until_answered(ResponseCode.SLAVE_NOT_AVAILABLE, 800)
            await asyncio.to_thread(processes.start, SLAVE)
            await load.until_answered(ResponseCode.SUCCESS)
        await check_replicas(processes, load)

    run(work())


def test_a_full_disk_of_the_slave(processes: ReplicaProcesses, tmp_path: Path) -> None:
    async def work(disk: Path) -> None:
        processes.stores[SLAVE] = disk / "store"
        processes.start(MASTER)
        processes.start(SLAVE)
        async with loaded(processes.addresses[MASTER]) as load:
            await load.until_answered(ResponseCode.SUCCESS)
            fill(disk / "filler")
            await load.until_answered(ResponseCode.SLAVE_NOT_AVAILABLE)
            (disk / "filler").unlink()
            await load.until_answered(ResponseCode.SUCCESS)
        await check_replicas(processes, load)

    disk = tmp_path / "disk"
    try:
        with small_disk(disk, 64 * 1024 * 1024):
            run(work(disk))
    except NotPermitted as error:
        pytest.skip(str(error))
