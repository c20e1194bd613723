"""Transactions compared with plain sends, and the cost of a round of check-backs.

    python benchmarks/transactions.py [--seconds 2] [--open 100000] [--only rates,checks]

Rates: a broker in a separate process; each transaction is a half message and its commit, both
answered. Rounds: a broker in this process, with open half messages.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

from bare_frames import BODY, send_request
from block_appends import append_all
from broker_process import TIMEOUT_MS, Server, connected, server
from measure import print_table
from turbopump.broker.broker import Broker
from turbopump.broker.clients import Member, Peer
from turbopump.broker.config import BrokerConfig, IdentityConfig, TransactionsConfig
from turbopump.broker.message_writer import Draft, record_of
from turbopump.broker.transactions.half import half_draft, operation
from turbopump.message import QueueOffset
from turbopump.net.connection import Connection
from turbopump.net.loop import run
from turbopump.store.store import Store
from turbopump.wire import properties
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request
from turbopump.wire.headers import EndTransaction, SendMessageAnswer
from turbopump.wire.hosts import host
from turbopump.wire.ids import parse_offset_id
from turbopump.wire.record import Record

GROUP = "benchmark"
HERE = host("127.0.0.1", 10911)
HALF = send_request(
    properties=properties.encode(
        {"UNIQ_KEY": "7F00000100002A9F0000000000000000", "TRAN_MSG": "true", "PGROUP": GROUP}
    )
)
PLAIN = send_request()
COMMIT = 8
ROUNDS = 3
APPENDED_AT_ONCE = 512


# --- rates ----------------------------------------------------------------------------------------


async def answered(connection: Connection, command: Command) -> Command:
    answer = await connection.request(command, TIMEOUT_MS)
    assert answer.code == ResponseCode.SUCCESS, answer
    return answer


async def plain(connection: Connection) -> None:
    await answered(connection, PLAIN)


async def transaction(connection: Connection) -> None:
    sent = SendMessageAnswer.from_ext_fields((await answered(connection, HALF)).ext_fields)
    end = EndTransaction(
        producer_group=GROUP,
        tran_state_table_offset=sent.queue_offset,
        commit_log_offset=parse_offset_id(sent.msg_id)[1],
        commit_or_rollback=COMMIT,
        msg_id="",
    )
    await answered(connection, request(RequestCode.END_TRANSACTION, end))


async def rate(
    work: Callable[[Connection], Awaitable[None]], target: Server, in_flight: int, seconds: float
) -> tuple[float, float]:
    """Return the rate per second, and the broker's CPU time per operation in µs."""
    count = 0

    async def repeat(connection: Connection, end: float) -> None:
        nonlocal count
        while time.perf_counter() < end:
            await work(connection)
            count += 1

    async with connected(target.address) as connection:
        began, cpu_s = time.perf_counter(), target.cpu_s
        await asyncio.gather(*(repeat(connection, began + seconds) for _ in range(in_flight)))
        took_s, used_s = time.perf_counter() - began, target.cpu_s - cpu_s
    return count / took_s, used_s / count * 1e6


async def rates(seconds: float, _open: int) -> None:
    rows = []
    with server() as target:
        for in_flight in (1, 8, 64):
            found: dict[str, list[tuple[float, float]]] = {"plain": [], "transaction": []}
            for _ in range(ROUNDS):
                for name, work in (("plain", plain), ("transaction", transaction)):
                    found[name].append(await rate(work, target, in_flight, seconds))
            (sends, send_us), (ended, end_us) = (
                tuple(statistics.median(column) for column in zip(*found[name], strict=True))
                for name in ("plain", "transaction")
            )
            counts = [str(in_flight), f"{sends:,.0f}", f"{ended:,.0f}"]
            rows.append([*counts, f"{send_us:.0f}", f"{end_us:.0f}", f"{end_us / send_us:.1f}"])
    print_table(
        [
            "in flight",
            "sends/s",
            "transactions/s",
            "CPU µs a send",
            "CPU µs a transaction",
            "ratio",
        ],
        rows,
    )


# --- rounds of checks -----------------------------------------------------------------------------


class Silent:
    """A producer that never answers check-backs."""

    peer_address = "127.0.0.1:1"

    def oneway(self, command: Command) -> None:
        pass

    async def request(self, command: Command, timeout_ms: int) -> Command:
        raise NotImplementedError

    def close(self, reason: str = "") -> None:
        pass


def half_record(number: int, immunity_s: int) -> Record:
    named = {
        "UNIQ_KEY": f"{number:032X}",
        "TRAN_MSG": "true",
        "CHECK_IMMUNITY_TIME_IN_SECONDS": str(immunity_s),
    }
    draft = Draft(
        topic="Bench",
        queue_id=0,
        properties=named,
        body=BODY,
        born_timestamp_ms=int(time.time() * 1000),
        born_host=HERE,
        store_host=HERE,
    )
    return record_of(half_draft(draft, GROUP))


def fill(directory: Path, records: Iterable[Record]) -> None:
    with Store.open(directory) as store:
        batch: list[Record] = []
        for record in records:
            batch.append(record)
            if len(batch) == APPENDED_AT_ONCE:
                append_all(store, batch)
                batch = []
        if batch:
            append_all(store, batch)


@asynccontextmanager
async def broker_with(records: Iterable[Record]) -> AsyncIterator[Broker]:
    """Run a broker with these records; the caller triggers its rounds."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        fill(path, records)
        config = BrokerConfig(
            directory=path,
            identity=IdentityConfig(broker_name="bench", port=0),
            transactions=TransactionsConfig(timeout_ms=0, check_interval_ms=3_600_000),
        )
        began = time.process_time()
        async with Broker(config) as broker:
            print(f"start: {time.process_time() - began:.2f} s of processor time")
            producer = Member(cast(Peer, Silent()), "p1", 3, 409, 0, 0)
            broker.state.producers.heartbeat(producer, GROUP)
            yield broker


async def round_s(broker: Broker) -> float:
    began = time.process_time()
    await broker.path.checks.run()
    return time.process_time() - began


async def checks(_seconds: float, count: int) -> None:
    now_ms = int(time.time() * 1000)
    ended = [
        record
        for number in range(count)
        for record in (
            half_record(number, 0),
            operation(QueueOffset(number), now_ms, HERE),
        )
    ]
    rows: list[tuple[str, float]] = []
    async with broker_with(ended) as broker:
        rows.append((f"first, {count:,} ended since the last", await round_s(broker)))
        rows.append(("next, nothing open", await round_s(broker)))
    async with broker_with(half_record(number, 86_400) for number in range(count)) as broker:
        rows.append((f"first, {count:,} open, none to be checked", await round_s(broker)))
        rows.append(("next", await round_s(broker)))
    async with broker_with(half_record(number, 0) for number in range(count)) as broker:
        rows.append((f"first, {count:,} open, all checked", await round_s(broker)))
        rows.append(("next, all checked", await round_s(broker)))
    print_table(
        ["round", "s of processor time", "µs for each"],
        [[name, f"{took:.3f}", f"{took / count * 1e6:.1f}"] for name, took in rows],
    )


PARTS = {"rates": rates, "checks": checks}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--open", type=int, default=100_000)
    parser.add_argument("--only", default=",".join(PARTS))
    options = parser.parse_args()
    for name in options.only.split(","):
        await PARTS[name](options.seconds, options.open)


if __name__ == "__main__":
    run(main())
