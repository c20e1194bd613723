"""Send bare frames over one connection, without any client features.

    python benchmarks/bare_frames.py --address HOST:PORT --concurrency 32 [--batch 16]

Each request is encoded and each response is decoded and checked, nothing else. `benchmarks/run`
uses it as the baseline for clients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from typing import cast

from msgspec.structs import replace

from turbopump.bench.sample import Stopwatch, WatchedProcesses, summary
from turbopump.net.loop import run
from turbopump.wire.batch import BatchEntry, encode_batch
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command, request
from turbopump.wire.framing import FrameDecoder, encode
from turbopump.wire.headers import PullMessage, SendMessageV2
from turbopump.wire.hosts import split_address
from turbopump.wire.sysflag import PULL_SUBSCRIPTION, PULL_SUSPEND

BODY = b"x" * 128
COMMANDS = 1024
"""The number of distinct requests, sent in turn so that keys differ as with real clients."""


def properties_with(number: int) -> str:
    """Return message properties with a unique key."""
    return f"UNIQ_KEY\x017F00000100002A9F{number:016X}\x02WAIT\x01true\x02TAGS\x01TagA"


PROPERTIES = properties_with(0)


def send_request(
    queue_id: int = 0, body: bytes = BODY, *, batch: bool = False, properties: str = PROPERTIES
) -> Command:
    header = SendMessageV2(
        producer_group="benchmark",
        topic="Bench",
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=queue_id,
        sys_flag=0,
        born_timestamp=int(time.time() * 1000),
        flag=0,
        properties=properties,
        batch=batch,
    )
    return request(320 if batch else 310, header, body)


def pull_request(offset: int, queue_id: int = 0, hold_ms: int = 0, tags: str = "*") -> Command:
    header = PullMessage(
        consumer_group="benchmark",
        topic="Bench",
        queue_id=queue_id,
        queue_offset=offset,
        max_msg_nums=32,
        sys_flag=PULL_SUBSCRIPTION | (PULL_SUSPEND if hold_ms else 0),
        commit_offset=0,
        suspend_timeout_millis=hold_ms,
        subscription=tags,
        sub_version=0,
    )
    return request(11, header)


class Flood(asyncio.Protocol):
    """Keeps requests in flight: each answer is checked and triggers the next request."""

    def __init__(self, commands: Sequence[Command], in_flight: int, seconds: float) -> None:
        self.answered = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._commands = commands
        self._in_flight = in_flight
        self._end = time.perf_counter() + seconds
        self._decoder = FrameDecoder()
        self._waiting: set[int] = set()
        self._opaque = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send(self._in_flight)

    def data_received(self, data: bytes) -> None:
        before = len(self._waiting)
        for answer in self._decoder.feed(data):
            assert answer.code == ResponseCode.SUCCESS, answer
            self._waiting.remove(answer.opaque)
        answered = before - len(self._waiting)
        self.answered += answered
        if time.perf_counter() < self._end:
            self._send(answered)
        elif not self._waiting:
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionResetError("closed by the broker"))

    def _send(self, count: int) -> None:
        numbers = range(self._opaque, self._opaque + count)
        self._opaque += count
        self._waiting.update(numbers)
        commands = self._commands
        frames = [
            encode(replace(commands[number % len(commands)], opaque=number)) for number in numbers
        ]
        self._transport.write(b"".join(frames))


async def flood(address: str, in_flight: int, seconds: float, *commands: Command) -> int:
    """Keep n requests in flight on a connection; return how many were answered.

    The given requests are sent in turn.
    """
    host, port = split_address(address)
    transport, requests = await asyncio.get_running_loop().create_connection(
        lambda: Flood(commands, in_flight, seconds), host, port
    )
    try:
        await requests.done
    finally:
        transport.close()
    return requests.answered


def batch_request(count: int, body: bytes, queue_id: int = 0, first: int = 0) -> Command:
    numbers = range(first, first + count)
    entries = [BatchEntry(body, properties_with(number).encode()) for number in numbers]
    return send_request(queue_id, encode_batch(entries), batch=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--queues", type=int, default=1, help="sent to in turn")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--warm-up", type=float, default=0.5)
    parser.add_argument("--cpu-of", type=int, action="append", default=[])
    options = parser.parse_args()
    body = b"x" * options.size
    commands = [
        batch_request(options.batch, body, number % options.queues, number * options.batch)
        if options.batch > 1
        else send_request(number % options.queues, body, properties=properties_with(number))
        for number in range(COMMANDS)
    ]
    await flood(options.address, options.concurrency, options.warm_up, *commands)
    watched, watch = WatchedProcesses(options.cpu_of), Stopwatch()
    sent = await flood(options.address, options.concurrency, options.seconds, *commands)
    sample = watch.sample(sent * options.batch)
    print(json.dumps(summary([sample], options.size, watched.used_s())))


if __name__ == "__main__":
    run(main())
