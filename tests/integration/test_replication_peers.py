"""Slaves of Apache RocketMQ masters, as recorded, and of peers that are not masters at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from brokers import BROKER_HOST, running_broker
from turbopump.broker.broker import Broker
from turbopump.broker.config import IdentityConfig, ReplicationConfig, Role
from turbopump.broker.replication.frames import encode_header
from turbopump.broker.replication.slave import LinkState
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.testing import Disk, MemoryNetwork, virtual_loop, virtual_time, wait_until
from unit.store.support import record

PEER = "10.0.0.5"
SEGMENT = 8 * 1024 * 1024
SLAVE = IdentityConfig(
    broker_name="broker-a", broker_id=1, role=Role.SLAVE, bind_host=BROKER_HOST, port=10911
)


class ApacheMaster(asyncio.Protocol):
    """Sends its log from the position in the first report, after a heartbeat, as recorded."""

    def __init__(self, log: bytes, first: int = 0, raw: bytes = b"") -> None:
        self.log = log
        self.first = first
        self.raw = raw
        self.reports: list[int] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.reports.clear()

    def data_received(self, data: bytes) -> None:
        is_first = not self.reports
        self.reports += [int.from_bytes(data[at : at + 8], "big") for at in range(0, len(data), 8)]
        if self.raw:
            self.transport.write(self.raw)
        elif is_first:
            self._begin(self.reports[0])

    def _begin(self, report: int) -> None:
        end = self.first + len(self.log)
        position = report or max(self.first, end - end % SEGMENT)
        self.transport.write(encode_header(PhysicalOffset(position), 0))
        while self.first <= position < end:
            body = self.log[position - self.first :][: 32 * 1024]
            self.transport.write(encode_header(PhysicalOffset(position), len(body)) + body)
            position += len(body)
        self.position = position
        self._beat()

    def _beat(self) -> None:
        # Sent even if it has nothing for this slave, which is never notified.
        if not self.transport.is_closing():
            self.transport.write(encode_header(PhysicalOffset(self.position), 0))
            virtual_loop().call_later(5, self._beat)


def log_of(count: int, first: int = 0, offset: int = 0) -> bytes:
    log = b""
    for number in range(offset, offset + count):
        at = PhysicalOffset(first + len(log))
        log += record(b"%d" % number * 100).encode(QueueOffset(number), at, 1_700_000_000_000)
    return log


@asynccontextmanager
async def slave_of(peer: ApacheMaster, directory: Path) -> AsyncIterator[Broker]:
    """Run a slave that follows a peer."""
    network = MemoryNetwork()
    listener = await network.host(PEER).listen(PEER, 10912, lambda: peer)
    replication = ReplicationConfig(master_address=f"{PEER}:10912")
    settings = {"identity": SLAVE, "replication": replication}
    disk = Disk(virtual_loop())
    async with running_broker(directory, network, disk, **settings) as (slave, _):
        yield slave
    await listener.close()


def error_of(slave: Broker) -> str:
    status = slave.replication.master_link
    assert status is not None
    return status.last_error


def bytes_of(slave: Broker) -> bytes:
    found = slave.store.raw(slave.store.min_offset, 1 << 20)
    return bytes(found or b"")


@virtual_time()
async def test_a_master_of_apache_rocketmq_is_copied_from_its_first_byte(tmp_path: Path) -> None:
    peer = ApacheMaster(log_of(300))
    async with slave_of(peer, tmp_path) as slave:
        await wait_until(lambda: slave.store.written_end == len(peer.log))
        assert bytes_of(slave) == peer.log
        await wait_until(lambda: peer.reports[-1] == len(peer.log))
        # No report is beyond the master's end.
        assert max(peer.reports) == len(peer.log)
        # It grows while the link is cut.
        peer.transport.abort()
        peer.log += log_of(50, len(peer.log), 300)
        await wait_until(lambda: slave.store.written_end == len(peer.log), 20)
        assert bytes_of(slave) == peer.log
        assert slave.store.queue_range("Topic", 0) == (0, 350)


@virtual_time()
async def test_a_master_of_apache_rocketmq_without_its_first_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # It does not report where its log starts, but serves its last file to slaves that report 0.
    peer = ApacheMaster(log_of(20, SEGMENT), first=SEGMENT)
    async with slave_of(peer, tmp_path) as slave:
        await wait_until(lambda: slave.store.written_end == SEGMENT + len(peer.log), 60)
        assert slave.store.min_offset == SEGMENT
        assert bytes_of(slave) == peer.log
        assert "older messages are not copied" in caplog.text


@virtual_time()
async def test_a_master_of_apache_rocketmq_that_lost_its_end(tmp_path: Path) -> None:
    whole = log_of(300)
    peer = ApacheMaster(whole)
    async with slave_of(peer, tmp_path) as slave:
        await wait_until(lambda: slave.store.written_end == len(whole))
        shorter = log_of(290)
        peer.log = shorter
        peer.transport.abort()
        await wait_until(lambda: slave.store.written_end == len(shorter), 60)
        assert bytes_of(slave) == shorter
        status = slave.replication.master_link
        assert status is not None
        assert status.cut_bytes == len(whole) - len(shorter)


GOOD = log_of(1)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "expected 0 to 67108864 bytes"),
        (encode_header(PhysicalOffset(0), -5), "frame of -5 bytes"),
        (encode_header(PhysicalOffset(0), 2**31 - 1), "frame of 2147483647 bytes"),
        (encode_header(PhysicalOffset(77), 5) + b"x" * 5, "must start at a file boundary, got 77"),
        (encode_header(PhysicalOffset(0), 500) + b"x" * 500, "no record at 0"),
        (
            encode_header(PhysicalOffset(0), len(GOOD))
            + GOOD
            + encode_header(PhysicalOffset(5), 1)
            + b"x",
            f"bytes for position 5, expected {len(GOOD)}",
        ),
        (encode_header(PhysicalOffset(SEGMENT), SEGMENT + 1) + bytes(9), "no record at"),
    ],
    ids=["text", "negative", "huge", "not a file", "no records", "elsewhere", "across files"],
)
@virtual_time()
async def test_peers_that_are_not_masters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, raw: bytes, reason: str
) -> None:
    peer = ApacheMaster(b"", raw=raw)
    async with slave_of(peer, tmp_path) as slave:
        await wait_until(lambda: reason in error_of(slave))
        status = slave.replication.master_link
        assert status is not None
        assert status.state is LinkState.DISCONNECTED
        assert caplog.text.count("is interrupted") == 1
        # Only the valid part stays.
        assert slave.store.written_end in {0, len(GOOD)}
        await asyncio.sleep(120)
        assert caplog.text.count("is interrupted") <= 2
