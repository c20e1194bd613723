"""The scrubber finds damage before it is read, a slice at a time."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from appending import append
from brokers import running_broker
from turbopump.message import QueueOffset
from turbopump.store import Found, Store, StoreConfig, unit_repair
from turbopump.store.scrubber import SLICE_BYTES
from turbopump.testing import virtual_time, wait_until
from turbopump.wire.record import decode_record
from unit.store.support import record, small_config

CONFIG = small_config(segment_bytes=1 << 20, queue_segment_units=1000)
COUNT = 400
BODY_BYTES = 4000


def fill(root: Path) -> list[int]:
    """Return the positions of the messages."""
    with Store.open(root, CONFIG) as store:
        return [
            append(store, [record(b"%04d" % number * (BODY_BYTES // 4), TAGS="a")]).physical_offset
            for number in range(COUNT)
        ]


def change(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def log_file(root: Path, position: int) -> tuple[Path, int]:
    size = CONFIG.segment_bytes
    return root / "commitlog" / f"{position // size * size:020d}", position % size


def scrub(store: Store) -> int:
    """Scan everything; return how many slices that took."""
    passes, slices = store.damage.scrub_passes, 0
    while store.damage.scrub_passes == passes:
        store.scrub()
        slices += 1
        assert slices < 100
    return slices


def test_an_intact_store_is_scrubbed_slice_by_slice(tmp_path: Path) -> None:
    fill(tmp_path)
    with Store.open(tmp_path, CONFIG) as store:
        slices = scrub(store)
        assert slices == -(-store.written_end // SLICE_BYTES)
        append(store, [record(b"later")])
        store.flush()
        scrub(store)
        damage = store.damage
        assert (damage.messages, damage.log_ranges, damage.repaired_units) == (0, 0, 0)


def test_each_kind_of_damage_is_found_and_rebuilt_if_possible(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    positions = fill(tmp_path)
    units = tmp_path / "consumequeue/Topic/0" / f"{0:020d}"
    change(units, 30 * 20, struct.pack(">q", 5))
    change(units, 50 * 20 + 12, struct.pack(">q", 77))
    path, at = log_file(tmp_path, positions[100])
    change(path, at + 200, b"?")
    path, at = log_file(tmp_path, positions[200])
    change(path, at, b"?" * 20)
    with Store.open(tmp_path, CONFIG) as store:
        for _ in range(2):
            scrub(store)
            damage = store.damage
            assert (damage.messages, damage.log_ranges, damage.repaired_units) == (1, 1, 2)
        found = store.read("Topic", 0, QueueOffset(30), 1)
        assert isinstance(found, Found)
        assert decode_record(found.messages[0]).queue_offset == 30
    assert struct.unpack_from(">qiq", units.read_bytes(), 50 * 20)[2] != 77
    assert "topic Topic, queue 0, offset 100: the body does not match" in caplog.text
    assert f"at {positions[200]} of the log" in caplog.text


def test_damaged_units_of_many_queues_are_rebuilt_without_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues, count = 80, 6
    with Store.open(tmp_path, CONFIG) as store:
        for number in range(queues * count):
            append(store, [record(bytes(100), queue_id=number % queues)])
    for path in (tmp_path / "consumequeue/Topic").glob("*/*"):
        change(path, 20, b"?" * 4 * 20)
    with Store.open(tmp_path, CONFIG) as store:
        searched: list[object] = []
        monkeypatch.setattr(unit_repair, "next_record", lambda *args: searched.append(args))
        scrub(store)
        assert not searched
        assert store.damage.messages == 0
        assert store.damage.repaired_units == 4 * queues
        for queue_id in range(queues):
            found = store.read("Topic", queue_id, QueueOffset(0), count)
            assert isinstance(found, Found)
            assert list(found.queue_offsets) == list(range(count))


@pytest.mark.parametrize("rate", [0, SLICE_BYTES])
@virtual_time()
async def test_the_broker_scrubs_only_if_configured(tmp_path: Path, rate: int) -> None:
    store = StoreConfig(
        segment_bytes=8 << 20, index_slots=100, index_entries=100, scrub_bytes_per_s=rate
    )
    async with running_broker(tmp_path, store=store) as (broker, client):
        for _ in range(20):
            await client.send(b"x" * 50_000)
        if rate:
            await wait_until(lambda: broker.store.damage.scrub_passes > 0, 600)
        else:
            assert broker.store.damage.scrub_passes == 0
