"""Apache RocketMQ's messages, appended here at the same times, produce identical files."""

from __future__ import annotations

from pathlib import Path

import pytest

from appending import append
from turbopump.machine import Machine
from turbopump.message import PhysicalOffset
from turbopump.store import Store
from turbopump.wire.record import MessageView, Record, decode_record
from unit.store.support import GOLDEN_CONFIG, ManualClock, golden, unpack


@pytest.mark.parametrize("archive", ["store", "store_v6"])
def test_same_input_gives_the_same_bytes(archive: str, tmp_path: Path) -> None:
    original = unpack(archive, tmp_path / "original")
    ours = tmp_path / "ours"
    clock = ManualClock()
    with Store.open(original, GOLDEN_CONFIG) as source:
        positions = [message["physicalOffset"] for message in golden(archive)["messages"]]
        views = [decode_record(source.message_at(PhysicalOffset(at)) or b"") for at in positions]
        with Store.open(ours, GOLDEN_CONFIG, machine=Machine(clock=clock)) as store:
            for view in views:
                clock.wall_ms = view.store_timestamp_ms
                assert append(store, [as_record(view)]).physical_offset == view.physical_offset
    for kind in ("commitlog", "consumequeue"):
        theirs_by_name, ours_by_name = files(original / kind), files(ours / kind)
        assert set(theirs_by_name) == set(ours_by_name)
        for name, data in theirs_by_name.items():
            assert ours_by_name[name] == data, (kind, name)
    # Index files are named after their creation time; their content does not depend on it.
    assert list(files(ours / "index").values()) == list(files(original / "index").values())
    assert files(ours)["lock"] == files(original)["lock"]
    assert files(ours)["checkpoint"] == files(original)["checkpoint"]


def as_record(view: MessageView) -> Record:
    return Record(
        topic=view.topic.encode(),
        queue_id=view.queue_id,
        body=view.stored_body,
        properties=view.stored_properties,
        flag=view.flag,
        sys_flag=view.sys_flag,
        born_timestamp_ms=view.born_timestamp_ms,
        born_host=view.born_host,
        store_host=view.store_host,
        reconsume_times=view.reconsume_times,
        prepared_transaction_offset=view.prepared_transaction_offset,
    )


def files(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
