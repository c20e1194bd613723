"""A broker process reports busy when it is overloaded, not when it was not scheduled."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from servers import Standalone, standalone
from turbopump.net.pool import ConnectionPool
from turbopump.net.sockets import SocketNetwork
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request
from turbopump.wire.framing import FrameDecoder, encode
from turbopump.wire.headers import SendMessageV2
from turbopump.wire.hosts import split_address

STALL_S = 0.35
"""Longer than a send may be queued by default."""

CONNECTIONS = 120
SENDS = 250
"""Sends per connection: in total, far more work than fits into a send's queue timeout."""


def send_request() -> Command:
    header = SendMessageV2(
        producer_group="pg",
        topic="T",
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=0,
        sys_flag=0,
        born_timestamp=int(time.time() * 1000),
        flag=0,
        properties="",
    )
    return request(RequestCode.SEND_MESSAGE_V2, header, b"x" * 100)


@contextmanager
def stopped(server: Standalone) -> Iterator[None]:
    """Suspend the process while the block runs."""
    server.process.send_signal(signal.SIGSTOP)
    # Until then, it may notice what arrives, and would serve that by itself later.
    os.waitid(os.P_PID, server.process.pid, os.WSTOPPED)
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_a_process_that_was_not_scheduled_rejects_no_sends(tmp_path: Path) -> None:
    async def send(server: Standalone) -> Counter[int]:
        codes: Counter[int] = Counter()
        async with ConnectionPool(SocketNetwork()) as pool:

            async def keep_sending(end_s: float) -> None:
                while time.monotonic() < end_s:
                    answer = await pool.request(server.broker, send_request(), 10_000)
                    codes[answer.code] += 1

            for in_flight in (1, 8):
                end_s = time.monotonic() + 2 * STALL_S
                sending = asyncio.gather(*[keep_sending(end_s) for _ in range(in_flight)])
                await asyncio.sleep(STALL_S / 4)
                with stopped(server):
                    await asyncio.sleep(STALL_S)
                await sending
        return codes

    with standalone(tmp_path) as server:
        codes = asyncio.run(send(server))
        assert set(codes) == {ResponseCode.SUCCESS}, codes


@pytest.mark.slow
def test_an_overloaded_process_rejects_some_sends_and_recovers(tmp_path: Path) -> None:
    frames = b"".join([encode(send_request())] * SENDS)

    async def answers(reader: asyncio.StreamReader) -> Counter[int]:
        decoder, codes = FrameDecoder(), Counter[int]()
        while codes.total() < SENDS:
            codes.update(command.code for command in decoder.feed(await reader.read(65536)))
        return codes

    async def send(server: Standalone) -> Counter[int]:
        async with ConnectionPool(SocketNetwork()) as pool:
            assert (await pool.request(server.broker, send_request(), 10_000)).code == 0
            host, port = split_address(server.broker)
            streams = [await asyncio.open_connection(host, port) for _ in range(CONNECTIONS)]
            with stopped(server):
                for _, writer in streams:
                    writer.write(frames)
                await asyncio.gather(*[writer.drain() for _, writer in streams])
            found = await asyncio.gather(*[answers(reader) for reader, _ in streams])
            # By now, the backlog has been processed.
            await asyncio.sleep(0.5)
            assert (await pool.request(server.broker, send_request(), 10_000)).code == 0
            for _, writer in streams:
                writer.close()
        return sum(found, Counter())

    with standalone(tmp_path, {"waitTimeMillsInSendQueue": "1"}) as server:
        codes = asyncio.run(send(server))
        assert set(codes) == {ResponseCode.SUCCESS, ResponseCode.SYSTEM_BUSY}, codes
        assert codes[ResponseCode.SUCCESS] > SENDS, codes
