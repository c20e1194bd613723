"""Damaged and crashed stores of Apache RocketMQ: recovery has the same result, or a better one."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from store_work import checkpoint_of, queues_of
from turbopump.errors import StoreDamaged
from turbopump.message import QueueOffset
from turbopump.store import Store
from unit.store.support import GOLDEN_CONFIG, golden, unpack

CASES = golden("recovery")["cases"]

# Better than Apache RocketMQ, as the vectors' description permits: recovery, too, computes delivery
# times from the configured levels, and rebuilds missing queues completely. Such queues must have
# the units of the undamaged base.
REBUILT = {
    "clean, last three units of a consume queue missing",
    "clean, consume queues and index gone, abort file, no checkpoint",
    "crash, consume queues gone",
    "crash, consume queues and checkpoint gone",
}

# A record before the position that the queues confirm is kept if only its body is damaged: readers
# verify the checksum.
KEPT = {"clean, last body damaged"}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_recovery(case: Any, tmp_path: Path) -> None:
    root = damaged(case, tmp_path)
    expected = undamaged(case["base"]) if case["name"] in KEPT else case["result"]
    if not expected["loaded"]:
        before = snapshot(root)
        with pytest.raises(StoreDamaged, match="bytes instead of"):
            Store.open(root, GOLDEN_CONFIG)
        assert snapshot(root) == before
        return
    first = recovered(root)
    assert [first["min"], first["end"]] == [expected["minPhyOffset"], expected["maxPhyOffset"]]
    assert first["segments"] == expected["commitLogFiles"]
    reference = (undamaged(case["base"]) if case["name"] in REBUILT else expected)["queues"]
    for name, queue in reference.items():
        assert first["queues"].get(name, EMPTY) == {
            "min": queue["min"],
            "max": queue["max"],
            "unitsSha256": queue["unitsSha256"],
        }, name
    assert first["checkpoint"] == expected_checkpoint(expected)
    second = recovered(root)
    assert second == first


EMPTY = {"min": 0, "max": 0, "unitsSha256": hashlib.sha256().hexdigest()}


def damaged(case: Any, into: Path) -> Path:
    root = unpack(case["base"], into)
    for edit in case["edits"]:
        path = root / edit["path"]
        match edit["do"]:
            case "delete":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            case "create":
                path.write_bytes(bytes.fromhex(edit.get("hex", "")))
            case "truncate":
                with path.open("r+b") as file:
                    file.truncate(edit["size"])
            case "write":
                with path.open("r+b") as file:
                    file.seek(edit["at"])
                    file.write(bytes.fromhex(edit["hex"]))
            case other:
                raise AssertionError(other)
    return root


def undamaged(base: str) -> Any:
    (name,) = {"store": ["clean as it is"], "store_crash": ["crash as it is"]}[base]
    return next(case for case in CASES if case["name"] == name)["result"]


def recovered(root: Path) -> dict[str, Any]:
    """Open the store after its crash or clean stop, and describe its content."""
    crashed = (root / "abort").exists()
    with Store.open(root, GOLDEN_CONFIG) as store:
        found = {
            "min": store.min_offset,
            "end": store.written_end,
            "segments": sorted(path.name for path in (root / "commitlog").iterdir()),
            "queues": {f"{topic}/{number}": units(store, topic, number)
                       for topic, number in store.queue_ids()},
            "checkpoint": [
                checkpoint_of(store).log_ms,
                checkpoint_of(store).queues_ms,
            ],
        }  # fmt: skip
    if crashed:
        # A second recovery from the crash must have the same result.
        (root / "abort").touch()
    return found


def units(store: Store, topic: str, queue_id: int) -> dict[str, Any]:
    low, high = store.queue_range(topic, queue_id)
    queue = queues_of(store).find(topic, queue_id)
    assert queue is not None
    digest = hashlib.sha256()
    offset = low
    while offset < high:
        data = queue.units(offset, high - offset)
        assert data
        digest.update(data)
        offset = QueueOffset(offset + len(data) // 20)
    return {"min": low, "max": high, "unitsSha256": digest.hexdigest()}


def expected_checkpoint(expected: Any) -> list[int]:
    checkpoint = expected["checkpoint"]
    return [checkpoint["physicMsgTimestamp"], checkpoint["logicsMsgTimestamp"]]


def snapshot(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != "lock"
    }
