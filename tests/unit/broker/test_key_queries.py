"""Queries by a key that many messages share."""

from __future__ import annotations

import asyncio
from pathlib import Path
from struct import Struct
from typing import Any

import pytest

from brokers import Client, running_broker, views
from turbopump.broker.broker import Broker
from turbopump.broker.config import LimitsConfig
from turbopump.store import index_file
from turbopump.testing import virtual_loop, virtual_time
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command
from turbopump.wire.headers import QueryMessage

MESSAGES = 500
AT_ONCE = 20


class CountedEntries:
    """Counts the index entries that are decoded in one turn of the loop."""

    def __init__(self, entry: Struct) -> None:
        self._entry = entry
        self.total = self.in_turn = self.most = 0

    def unpack_from(self, *args: Any) -> tuple[Any, ...]:
        if not self.in_turn:
            virtual_loop().call_soon(self._end_turn)
        self.total, self.in_turn = self.total + 1, self.in_turn + 1
        self.most = max(self.most, self.in_turn)
        return self._entry.unpack_from(*args)

    unpack = unpack_from

    def _end_turn(self) -> None:
        self.in_turn = 0


async def send_many(client: Client) -> int:
    """Send one message, and much later many with the same key; return when the first was stored."""
    await client.send(b"first", named={"KEYS": "k"})
    first_ms = virtual_loop().clock.now_ms()
    await asyncio.sleep(60)
    await asyncio.gather(*(client.send(b"later", named={"KEYS": "k"}) for _ in range(MESSAGES)))
    return first_ms


async def query(client: Client, begin_ms: int, end_ms: int) -> Command:
    header = QueryMessage(
        topic="T", key="k", max_num=32, begin_timestamp=begin_ms, end_timestamp=end_ms
    )
    return await client.ask(RequestCode.QUERY_MESSAGE, header)


@virtual_time()
async def test_each_turn_of_the_loop_examines_few_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = CountedEntries(index_file._ENTRY)
    monkeypatch.setattr(index_file, "_ENTRY", entries)
    monkeypatch.setattr(index_file, "EXAMINED_AT_ONCE", AT_ONCE)
    async with running_broker(tmp_path) as (_, client):
        first_ms = await send_many(client)
        queries = [query(client, first_ms - 5000, first_ms + 5000) for _ in range(5)]
        for answer in await asyncio.gather(*queries):
            assert [view.body for view in views(answer)] == [b"first"]
    assert entries.total >= 5 * MESSAGES
    assert entries.most <= 2 * AT_ONCE


@virtual_time()
async def test_a_query_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_file, "EXAMINED_AT_ONCE", AT_ONCE)
    limits = LimitsConfig(query_entries_max=100)
    async with running_broker(tmp_path, limits=limits) as (broker, client):
        first_ms = await send_many(client)
        refused = await query(client, first_ms - 5000, first_ms + 5000)
        assert refused.code == ResponseCode.SYSTEM_ERROR
        assert refused.remark == (
            "key k: stopped after 100 index entries; end the time range closer to the message, or"
            " raise maxQueryIndexEntries"
        )
        newest = await query(client, first_ms - 5000, first_ms + 120_000)
        assert newest.code == ResponseCode.SUCCESS
        assert [view.body for view in views(newest)] == [b"later"] * 32
        await raise_limit(client, broker)
        assert (await query(client, 0, first_ms + 5000)).code == ResponseCode.SUCCESS


async def raise_limit(client: Client, broker: Broker) -> None:
    await client.ask(RequestCode.UPDATE_BROKER_CONFIG, body=b"maxQueryIndexEntries=1000")
    assert broker.config.limits.query_entries_max == 1000
