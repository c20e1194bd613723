"""The HA port's bytes, as recorded from Apache RocketMQ, and invalid ones."""

from __future__ import annotations

import asyncio
import random
import weakref
from typing import Any, cast

import pytest

from turbopump.broker.config import BrokerConfig
from turbopump.broker.live_config import LiveConfig
from turbopump.broker.replication.frames import (
    FRAME_BYTES_MAX,
    ReportDecoder,
    Transfer,
    TransferDecoder,
    encode_header,
    encode_report,
    joined,
)
from turbopump.broker.replication.master import SLAVES_MAX, SlaveConnection, Slaves, Throttle
from turbopump.errors import FrameError
from turbopump.message import PhysicalOffset
from turbopump.store.config import StoreConfig
from turbopump.supervisor import Watch
from turbopump.testing import virtual_time
from unit.store.support import ManualClock
from vectors import load

CONNECTIONS: list[dict[str, Any]] = load("replication.json")["connections"]
SLAVE_SIDE = [connection["slaveToMaster"] for connection in CONNECTIONS]
MASTER_SIDE = [connection["masterToSlave"]["frames"] for connection in CONNECTIONS]


@pytest.mark.parametrize("recorded", SLAVE_SIDE)
def test_reports_as_recorded(recorded: dict[str, Any]) -> None:
    data, reports = bytes.fromhex(recorded["hex"]), recorded["reports"]
    assert b"".join(map(encode_report, map(PhysicalOffset, reports))) == data
    for size in (1, 3, 8, 13, len(data)):
        decoder = ReportDecoder()
        fed = [decoder.feed(data[at : at + size]) for at in range(0, len(data), size)]
        found = [report for report in fed if report is not None]
        # Of several in one chunk, the newest counts.
        assert found[-1] == reports[-1]
        assert size > 8 or found == reports


@pytest.mark.parametrize("frames", MASTER_SIDE)
def test_frames_as_recorded(frames: list[dict[str, Any]]) -> None:
    data, expected = b"", []
    for frame in frames:
        head = frame.get("head") or frame["hex"][:24]
        assert encode_header(frame["offset"], frame["bodySize"]).hex() == head
        body = bytes.fromhex(frame.get("hex", "")[24:])
        body = body or random.Random(frame["offset"]).randbytes(frame["bodySize"])
        data += bytes.fromhex(head) + body
        expected.append((frame["offset"], body))
    for size in (1, 5, 12, 100, 32 * 1024 + 12, len(data)):
        decoder, found = TransferDecoder(), list[tuple[int, bytes]]()
        for at in range(0, len(data), size):
            for transfer in decoder.feed(data[at : at + size]):
                part = bytes(transfer.data)
                last = found[-1] if found else (-1, b"")
                if part and last[0] + len(last[1]) == transfer.position and last[1]:
                    found[-1] = (last[0], last[1] + part)
                else:
                    found.append((transfer.position, part))
        # Adjacent frames form one range of the log.
        assert b"".join(part for _, part in found) == b"".join(part for _, part in expected)
        heartbeats = [position for position, part in expected if not part]
        assert [position for position, part in found if not part] == heartbeats


@pytest.mark.parametrize(("position", "size"), [(-1, 5), (0, -1), (7, FRAME_BYTES_MAX + 1)])
def test_invalid_frames(position: int, size: int) -> None:
    with pytest.raises(FrameError, match=f"frame of {size} bytes at position {position}"):
        list(TransferDecoder().feed(encode_header(PhysicalOffset(position), size)))


def test_transfers_are_joined_within_a_file() -> None:
    def transfer(position: int, data: bytes) -> Transfer:
        return Transfer(PhysicalOffset(position), memoryview(data))

    given = [(10, b"ab"), (12, b"c"), (13, b""), (13, b"d"), (14, b"ef"), (16, b"g"), (18, b"h")]
    found = joined((transfer(*each) for each in given), file_bytes=16)
    assert [(each.position, bytes(each.data)) for each in found] == [
        (10, b"abc"),
        (13, b""),
        (13, b"def"),
        (16, b"g"),
        (18, b"h"),
    ]


def test_negative_reports() -> None:
    with pytest.raises(FrameError, match="-3"):
        ReportDecoder().feed(encode_report(PhysicalOffset(-3)))


def test_a_throttle_lets_bytes_through_at_a_rate() -> None:
    clock = ManualClock()
    throttle, sent = Throttle(clock), 0
    assert throttle.wait_ms(0) == 0
    throttle.note_sent(1 << 40)
    assert throttle.wait_ms(0) == 0, "without a limit nothing is owed"
    begin_ms = clock.monotonic_ms()
    while clock.monotonic_ms() - begin_ms < 10_000:
        wait_ms = throttle.wait_ms(100_000)
        if wait_ms:
            clock.advance(wait_ms)
        else:
            throttle.note_sent(32_768)
            sent += 32_768
    assert 950_000 <= sent <= 1_050_000


# --- a master, and reports of Apache RocketMQ slaves ----------------------------------------------


class FakeLog:
    """The log that was recorded: its size and its files."""

    def __init__(self, end: int, segment_bytes: int) -> None:
        self.min_offset = PhysicalOffset(0)
        self.readable_end = PhysicalOffset(end)
        self.config = StoreConfig(segment_bytes=segment_bytes)

    def cold_part(self, position: int, size_max: int) -> None:
        """Return None: all of it is in memory."""

    def raw(self, position: PhysicalOffset, size_max: int) -> memoryview | None:
        in_file = self.config.segment_bytes - position % self.config.segment_bytes
        size = min(size_max, in_file, self.readable_end - position)
        return memoryview(bytes(size)) if size > 0 and position >= self.min_offset else None


class FakeTransport(asyncio.Transport):
    """Accepts all bytes immediately."""

    def __init__(self) -> None:
        super().__init__({"peername": ("10.20.30.40", 5000)})
        self.sent = b""
        self.is_closed = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: Any) -> None:
        self.sent += bytes(data)

    def writelines(self, list_of_data: Any) -> None:
        self.sent += b"".join(list_of_data)

    def close(self) -> None:
        self.is_closed = True

    def heads(self) -> list[str]:
        """Return the headers of the frames sent since the last call."""
        heads, at = [], 0
        while at < len(self.sent):
            heads.append(self.sent[at : at + 12].hex())
            at += 12 + int.from_bytes(self.sent[at + 8 : at + 12], "big")
        self.sent = b""
        return heads


class Master:
    """A master with one connection."""

    def __init__(self, end: int, segment_bytes: int) -> None:
        self.clock = ManualClock()
        self.log = FakeLog(end, segment_bytes)
        live = LiveConfig(BrokerConfig(), self.clock)
        self.slaves = Slaves(cast("Any", self.log), live, self.clock, Watch("heartbeats"))
        self.slaves.accepts = True
        self.connection, self.transport = self.connect()

    def connect(self) -> tuple[SlaveConnection, FakeTransport]:
        connection, transport = SlaveConnection(self.slaves), FakeTransport()
        connection.connection_made(transport)
        return connection, transport

    def report(self, position: int) -> list[str]:
        """Return the headers of the frames that answer a report."""
        self.connection.data_received(encode_report(PhysicalOffset(position)))
        return self.transport.heads()


@virtual_time()
async def test_transports_that_do_not_pause_in_writelines_get_joined_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slave that does not read would fill the memory."""
    monkeypatch.setattr("turbopump.net.outbox._ALWAYS_JOINED", (FakeTransport.__module__,))
    monkeypatch.setattr(FakeTransport, "writelines", None)
    master = Master(end=100_000, segment_bytes=262_144)
    assert len(master.report(1)) == 4


@virtual_time()
async def test_a_new_slave_of_apache_rocketmq_gets_the_last_file_as_recorded() -> None:
    recorded = [frame for frame in MASTER_SIDE[0] if frame["bodySize"]]
    master = Master(end=589_049, segment_bytes=262_144)
    assert master.report(0) == [frame["head"] for frame in recorded]
    for position in SLAVE_SIDE[0]["reports"][1:]:
        assert master.report(position) == []
    assert master.slaves.acknowledged == 589_049
    master.clock.advance(5000)
    master.slaves.tick()
    assert master.transport.heads() == [MASTER_SIDE[0][-1]["hex"]]


@virtual_time()
async def test_messages_are_sent_as_they_arrive() -> None:
    master = Master(end=384_632, segment_bytes=65_536)
    assert master.report(0) == [frame["head"] for frame in MASTER_SIDE[1][1:3]]
    for frame in MASTER_SIDE[1][3:6]:
        master.log.readable_end = PhysicalOffset(frame["offset"] + 170)
        master.connection.pump()
        assert master.transport.heads() == [frame["hex"][:24]]


@virtual_time()
async def test_no_frame_crosses_the_end_of_a_file() -> None:
    master = Master(end=100_000, segment_bytes=40_000)
    heads = master.report(10)
    ends = [int(head[:16], 16) + int(head[16:], 16) for head in heads]
    assert ends == [32_778, 40_000, 72_768, 80_000, 100_000]


@pytest.mark.parametrize(
    ("report", "reason"),
    [(-1, "must not be negative"), (2**62, "its log ends at"), (100_001, "its log ends at")],
)
@virtual_time()
async def test_an_invalid_first_report(
    report: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    master = Master(end=100_000, segment_bytes=40_000)
    # Only the end of the log is reported, without any of its bytes.
    assert master.report(report) in ([], [encode_header(PhysicalOffset(100_000), 0).hex()])
    assert master.transport.is_closed
    assert reason in caplog.text
    assert not master.slaves.is_available(PhysicalOffset(100_000))


@virtual_time()
async def test_a_later_report_beyond_the_end_closes_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    master = Master(end=100_000, segment_bytes=40_000)
    master.report(90_000)
    assert master.slaves.is_available(PhysicalOffset(100_000))
    master.report(100_001)
    assert master.transport.is_closed
    assert "it reports position 100001, but the log ends at 100000" in caplog.text
    assert not master.slaves.following


@virtual_time()
async def test_a_first_report_acknowledges_nothing_that_is_waited_for() -> None:
    master = Master(end=100_000, segment_bytes=40_000)
    master.report(10_000)
    told: list[bool] = []
    master.slaves.when_stored(PhysicalOffset(50_000), told.append)
    other, _ = master.connect()
    # Where it starts to compare, and the same as a heartbeat: all of it may turn out to differ.
    for _ in range(2):
        other.data_received(encode_report(PhysicalOffset(60_000)))
        assert not told
    other.data_received(encode_report(PhysicalOffset(60_100)))
    assert told == [True]


@virtual_time()
async def test_what_a_slave_has_reported_is_not_waited_for() -> None:
    """In an idle cluster, no other report would come."""
    master = Master(end=100_000, segment_bytes=40_000)
    master.report(10_000)
    master.report(50_000)
    told: list[bool] = []
    master.slaves.when_stored(PhysicalOffset(50_000), told.append)
    assert told == [True]
    master.slaves.when_stored(PhysicalOffset(50_001), told.append)
    assert told == [True]


@virtual_time()
async def test_ended_waits_are_released() -> None:
    master = Master(end=100_000, segment_bytes=40_000)
    master.report(10_000)
    told: list[bool] = []

    def wait() -> tuple[weakref.ref[Any], Any]:
        def on_stored(is_stored: bool) -> None:
            told.append(is_stored)

        return weakref.ref(on_stored), master.slaves.when_stored(PhysicalOffset(50_000), on_stored)

    waits = [wait() for _ in range(1000)]
    for _, release in waits[1:]:
        release()
    assert sum(waiter() is not None for waiter, _ in waits) == 1
    assert len(master.slaves._order) < 100
    master.report(50_000)
    assert told == [True]
    waits[0][1]()
    assert waits[0][0]() is None


@virtual_time()
async def test_a_slave_before_the_first_file_begins_with_it() -> None:
    master = Master(end=100_000, segment_bytes=40_000)
    master.log.min_offset = PhysicalOffset(40_000)
    assert int(master.report(500)[0][:16], 16) == 40_000
    assert master.slaves.acknowledged == 0


@virtual_time()
async def test_a_slave_that_is_too_slow_for_retention_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    master = Master(end=100_000, segment_bytes=40_000)
    master.connection.pause_writing()
    master.report(500)
    master.log.min_offset = PhysicalOffset(40_000)
    master.connection.resume_writing()
    assert master.transport.is_closed
    assert "position 500 was deleted" in caplog.text


@virtual_time()
async def test_connections_are_bounded_and_silent_ones_closed() -> None:
    master = Master(end=100_000, segment_bytes=40_000)
    others = [master.connect() for _ in range(SLAVES_MAX)]
    assert [transport.is_closed for _, transport in others] == [False] * (SLAVES_MAX - 1) + [True]
    # Connections that report nothing are not slaves.
    assert not master.slaves.is_available(PhysicalOffset(100))
    master.clock.advance(20_001)
    master.slaves.tick()
    assert all(transport.is_closed for _, transport in others)
    assert not master.connect()[1].is_closed
