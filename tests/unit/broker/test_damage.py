"""Damaged files under a broker: consumers get everything else, in order, and continue."""

from __future__ import annotations

from pathlib import Path

import pytest

from brokers import pulled, running_broker, views
from turbopump.testing import virtual_time
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import whole_body
from turbopump.wire.lenient_json import loads
from turbopump.wire.record import MessageView

COUNT = 100
BODY_BYTES = 100_000
"""So that the first messages are in a file of the log that is no longer written."""


def flip(path: Path, at: int, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


async def fill(directory: Path) -> list[MessageView]:
    async with running_broker(directory) as (_, client):
        for number in range(COUNT):
            await client.send(body=b"%03d" % number * (BODY_BYTES // 3))
        found: list[MessageView] = []
        while len(found) < COUNT:
            found += views(await client.pull(len(found)))
        return found


@pytest.mark.parametrize("what", ["unit position", "unit size", "record", "both"])
@virtual_time()
async def test_consumers_continue_exactly_after_the_damage(tmp_path: Path, what: str) -> None:
    stored = await fill(tmp_path)
    unit = tmp_path / "consumequeue" / "T" / "0" / f"{0:020d}"
    if what in {"unit position", "both"}:
        flip(unit, 40 * 20 + 5)
    if what == "unit size":
        flip(unit, 40 * 20 + 8, 6)
    if what in {"record", "both"}:
        flip(tmp_path / "commitlog" / f"{0:020d}", stored[40].physical_offset + 4)
    is_lost = what in {"record", "both"}
    async with running_broker(tmp_path) as (_, client):
        found: list[int] = []
        offset = 0
        while offset < COUNT:
            answer = await client.pull(offset)
            if answer.code == ResponseCode.SUCCESS:
                found += [view.queue_offset for view in views(answer)]
            else:
                assert answer.code == ResponseCode.PULL_RETRY_IMMEDIATELY
                assert answer.remark == "MESSAGE_DAMAGED"
                assert pulled(answer).next_begin_offset == 41
            offset = pulled(answer).next_begin_offset
        assert found == [number for number in range(COUNT) if number != 40 or not is_lost]
        info = await client.ask(RequestCode.GET_BROKER_RUNTIME_INFO)
        table = loads(whole_body(info))["table"]
        assert table["damagedMessages"] == str(int(is_lost))
        assert table["repairedQueueUnits"] == str(int(what.startswith("unit")))
