"""Filters: SQL92 evaluations, and filtered against unfiltered pulls, by the broker's CPU time.

    python benchmarks/filters.py [--messages 1000000] [--only evaluations,pulls,rare]

The broker is a separate process, as in `broker.py`. Its CPU time is counted per message that it
examined, matching or not.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from bare_frames import BODY, pull_request, send_request
from broker_process import TIMEOUT_MS, Server, connected, server
from measure import per_second, print_table
from turbopump.filters.sql92 import compile_sql
from turbopump.filters.tags import SQL92, TAG
from turbopump.net.connection import Connection
from turbopump.net.loop import run
from turbopump.wire import properties
from turbopump.wire.batch import BatchEntry, encode_batch
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request, whole_body
from turbopump.wire.headers import PullMessage, PullMessageAnswer

RARE = 10_000
BATCH = 1000
SENDS_IN_FLIGHT = 8

Properties = Mapping[str, str]

ORDER = {
    "UNIQ_KEY": "7F00000100002A9F0000000000000000",
    "WAIT": "true",
    "TAGS": "TagA",
    "amount": "150",
    "region": "eu",
}

EXPRESSIONS: dict[str, Callable[[Properties], bool]] = {
    "region = 'eu'": lambda found: found.get("region") == "eu",
    "amount > 100": lambda found: "amount" in found and int(found["amount"]) > 100,
    "amount > 100 AND region IN ('eu', 'us')": lambda found: (
        "amount" in found and int(found["amount"]) > 100 and found.get("region") in {"eu", "us"}
    ),
    "(amount BETWEEN 1 AND 99 OR amount >= 120) AND region IS NOT NULL": lambda found: (
        "amount" in found
        and (1 <= int(found["amount"]) <= 99 or int(found["amount"]) >= 120)
        and "region" in found
    ),
}


def evaluations() -> None:
    rows = []
    for expression, plain in EXPRESSIONS.items():
        matches = compile_sql(expression).matches
        assert matches(ORDER)
        assert plain(ORDER)
        ours, theirs = per_second(_thousand(matches)), per_second(_thousand(plain))
        rows.append(
            [f"`{expression}`", f"{ours:,.0f}", f"{1e6 / ours:.2f}", f"{theirs / ours:.1f}"]
        )
    print("\nEvaluations of SQL92 over a message's properties\n")
    print_table(["expression", "per second", "µs each", "times plain Python"], rows)


def _thousand(matches: Callable[[Properties], bool]) -> Callable[[], int]:
    def action() -> int:
        for _ in range(1000):
            matches(ORDER)
        return 1000

    return action


# --- pulls ----------------------------------------------------------------------------------------


async def pulls(messages: int) -> None:
    count = messages // 5
    kinds = {
        "everything": (TAG, "*"),
        "tags, all match": (TAG, "TagA || rare"),
        "SQL92, all match": (SQL92, "amount > 100 AND region IN ('eu', 'us')"),
        "SQL92, 1 in 10 matches": (SQL92, "tenth = 'yes'"),
    }
    rows: list[list[str]] = []
    with server() as running:
        async with connected(running.address) as connection:
            await fill(connection, count)
            plain_us = 0.0
            for name, (kind, expression) in kinds.items():
                found, server_us, _ = await scanned(running, connection, kind, expression)
                plain_us = plain_us or server_us
                ratio = f"{server_us / plain_us:.1f}"
                rows.append([name, f"{found:,}", f"{server_us:.2f}", ratio])
    print(f"\nPulling a backlog of {count:,} messages of 128 bytes, one pull at a time\n")
    print_table(["wanted", "found", "broker CPU µs per message", "times everything"], rows)


async def rare(messages: int) -> None:
    kinds = {"tags": (TAG, "rare"), "SQL92": (SQL92, "rarity = 'rare'")}
    rows: list[list[str]] = []
    with server() as running:
        async with connected(running.address) as connection:
            await fill(connection, messages)
            async with connected(running.address) as other:
                for name, (kind, expression) in kinds.items():
                    waits = asyncio.create_task(waits_ms(other))
                    found, server_us, seconds = await scanned(running, connection, kind, expression)
                    waits.cancel()
                    longest = sorted(await waits)
                    rows.append(
                        [
                            name,
                            f"{found:,}",
                            f"{seconds:.2f}",
                            f"{server_us:.2f}",
                            f"{longest[len(longest) // 2]:.1f}",
                            f"{longest[len(longest) * 99 // 100]:.1f}",
                        ]
                    )
    print(f"\nFinding 1 in {RARE:,} of {messages:,} messages, one pull at a time\n")
    columns = ["filter", "found", "s", "broker CPU µs per message", "others wait ms", "99 %"]
    print_table(columns, rows)


async def fill(connection: Connection, count: int) -> None:
    """Store messages, one in ten and one in ten thousand of which are special."""
    free = asyncio.Semaphore(SENDS_IN_FLIGHT)

    async def send(command: Command) -> None:
        async with free:
            answer = await connection.request(command, TIMEOUT_MS)
            assert answer.code == ResponseCode.SUCCESS, answer

    async with asyncio.TaskGroup() as sending:
        for first in range(0, count, BATCH):
            entries = [entry(number) for number in range(first, min(first + BATCH, count))]
            body = encode_batch(entries)
            sending.create_task(send(send_request(body=body, batch=True, properties="")))


def entry(number: int) -> BatchEntry:
    is_rare = number % RARE == RARE // 2
    own = {"tenth": "yes"} if number % 10 == 0 else {}
    if is_rare:
        own |= {"TAGS": "rare", "rarity": "rare"}
    return BatchEntry(BODY, properties.encode(ORDER | own).encode())


async def scanned(
    running: Server, connection: Connection, kind: str, expression: str
) -> tuple[int, float, float]:
    """Pull all of a queue; return messages found, CPU µs of the broker per message, and seconds."""
    offset = found = 0
    command = pull_request(0, tags=expression)
    header = PullMessage.from_ext_fields(command.ext_fields)
    header = replace(header, expression_type=kind)
    server_s, started = running.cpu_s, time.perf_counter()
    while True:
        pull = request(RequestCode.PULL_MESSAGE, replace(header, queue_offset=offset))
        answer = await connection.request(pull, TIMEOUT_MS)
        if answer.code == ResponseCode.PULL_NOT_FOUND:
            break
        decoded = PullMessageAnswer.from_ext_fields(answer.ext_fields)
        assert decoded.next_begin_offset > offset, answer
        found += count(whole_body(answer))
        offset = decoded.next_begin_offset
    server_us = (running.cpu_s - server_s) / offset * 1e6
    return found, server_us, time.perf_counter() - started


def count(records: bytes) -> int:
    """Return the number of records in an answer; each starts with its size."""
    found = at = 0
    while at < len(records):
        at += int.from_bytes(records[at : at + 4])
        found += 1
    return found


async def waits_ms(connection: Connection) -> list[float]:
    """Send a small request repeatedly; return the latency of each answer."""
    waits: list[float] = []
    try:
        while True:
            started = time.perf_counter()
            await connection.request(request(RequestCode.GET_BROKER_CONFIG), TIMEOUT_MS)
            waits.append((time.perf_counter() - started) * 1000)
            await asyncio.sleep(0.001)
    except asyncio.CancelledError:
        return waits


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--only", default="evaluations,pulls,rare")
    options = parser.parse_args()
    for part in options.only.split(","):
        if part == "evaluations":
            evaluations()
        else:
            await {"pulls": pulls, "rare": rare}[part](options.messages)


if __name__ == "__main__":
    run(main())
