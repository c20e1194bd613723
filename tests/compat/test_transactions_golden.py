"""Transactions of Apache RocketMQ: recorded requests, and a store with open transactions."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from archives import extract
from brokers import Client, client_of, config_at
from transaction_peers import COMMIT, ROLLBACK, Producer, producer_of
from turbopump.broker import config as broker_config
from turbopump.broker.broker import Broker
from turbopump.broker.config import IdentityConfig, LimitsConfig, TransactionsConfig
from turbopump.machine.files import REAL_FILES
from turbopump.store.config import StoreConfig
from turbopump.testing import MemoryNetwork, virtual_machine, virtual_time
from turbopump.wire import framing
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command, whole_body
from turbopump.wire.delay_levels import parse_delay_levels
from turbopump.wire.headers import CheckTransactionState
from turbopump.wire.record import decode_record
from vectors import DATA, frames

HOST = "10.20.30.40"
IDENTITY = IdentityConfig(broker_name="broker-a", bind_host=HOST, port=10911)
CHECKS = TransactionsConfig(check_interval_ms=2000)
BY_NAME = {vector["name"]: vector for vector in frames()}
FIRST_HALF = 9715
"""Position of the first recorded half message in the log."""


def recorded(name: str) -> Command:
    return framing.decode(bytes.fromhex(BY_NAME[name]["hex"]))


async def replay(producer: Producer, name: str) -> None:
    """Send a recorded request; the answer must be the recorded one."""
    client = producer.client
    command = recorded(name)
    if name.endswith("request"):
        answer = await client.pool.request(client.address, command, 3000)
        expected = recorded(name.replace("request", "response"))
        assert (answer.code, answer.ext_fields) == (expected.code, expected.ext_fields), name
    else:
        (await client.pool.connection(client.address)).oneway(command)
        await asyncio.sleep(0.01)


async def fill_log(client: Client, end: int) -> None:
    """Send one message so that the log ends at a position."""
    answer = await client.send(b"", "Filler")
    assert answer.code == ResponseCode.SUCCESS
    [message] = await client.messages("Filler")
    await client.send(bytes(end - 2 * message.size), "Filler")


@virtual_time()
async def test_recorded_transactions(tmp_path: Path) -> None:
    """All offsets match the recording, so each record is as long as Apache RocketMQ's."""
    network = MemoryNetwork()
    config = config_at(tmp_path, identity=IDENTITY, transactions=CHECKS)
    async with (
        Broker(config, network.host(HOST), virtual_machine(REAL_FILES)) as broker,
        client_of(network, broker.address) as client,
        producer_of(network, broker.address, group="pg_tran") as producer,
    ):
        await fill_log(client, FIRST_HALF)
        for step in ("commit", "rollback", "exception", "unknown_checked"):
            await replay(producer, f"tran_{step}.SEND_MESSAGE_V2.request")
            await replay(producer, f"tran_{step}.END_TRANSACTION.oneway")
        await asyncio.sleep(8.5)
        checks = producer.asked
        assert [asked.place.physical_offset for asked in checks] == [11385, 11703]
        name = "tran_unknown_checked.CHECK_TRANSACTION_STATE.oneway"
        expected = recorded(name)
        header = CheckTransactionState.from_ext_fields(expected.ext_fields)
        assert checks[0].header == header
        theirs, ours = decode_record(whole_body(expected)), checks[0].message
        for field in ("topic", "queue_id", "body", "properties", "size", "sys_flag", "body_crc"):
            assert getattr(ours, field) == getattr(theirs, field), field
        assert (ours.queue_offset, ours.physical_offset, ours.store_host) == (
            theirs.queue_offset,
            theirs.physical_offset,
            theirs.store_host,
        )
        await replay(producer, "tran_unknown_checked.END_TRANSACTION.oneway#2")
        await replay(producer, "tran_unknown_checked.END_TRANSACTION.oneway#3")
        await asyncio.sleep(5)
        assert len(checks) == 2
        keys = [
            message.keys
            for queue_id in (1, 0)
            for message in await client.messages("TranTopic", queue_id)
        ]
        assert keys == [["tk1"], ["tk4"]]


def golden_store(name: str, into: Path) -> Path:
    extract(DATA / "store" / f"{name}.tar.gz", into)
    return into / name


STORE = StoreConfig(
    segment_bytes=65536,
    queue_segment_units=100,
    index_slots=50,
    index_entries=200,
    record_bytes_max=32768,
    delay_levels=parse_delay_levels("1s 2s 3s 4s 5s 6s 7s 8s 9s 10s 20s 30s 1m 2m 5m 10m 1h 2h"),
)
LIMITS = LimitsConfig(message_bytes_max=16384)


@pytest.mark.parametrize("name", ["store", "store_crash", "store_trimmed"])
@pytest.mark.parametrize("decision", [COMMIT, ROLLBACK])
def test_a_store_with_an_open_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, decision: int
) -> None:
    # The recorded stores have smaller files than any broker would create.
    monkeypatch.setattr(broker_config, "RECORD_EXTRA_BYTES", 16384)

    @virtual_time()
    async def run() -> None:
        network = MemoryNetwork()
        directory = golden_store(name, tmp_path)
        config = config_at(directory, identity=IDENTITY, store=STORE, limits=LIMITS)
        async with (
            Broker(config, network.host(HOST), virtual_machine(REAL_FILES)) as broker,
            client_of(network, broker.address) as client,
            producer_of(
                network, broker.address, group="pg_tran", decide=lambda _: decision
            ) as producer,
        ):
            before = await committed(client)
            await asyncio.sleep(300)
            [asked] = producer.asked
            assert asked.message.keys == ["t-pending"]
            after = await committed(client)
            assert after == sorted([*before, *(["t-pending"] if decision == COMMIT else [])])

    run()


async def committed(client: Client) -> list[str]:
    found = [await client.messages("TranAlpha", queue_id) for queue_id in range(4)]
    return sorted(key for messages in found for message in messages for key in message.keys)
