"""``turbopump store verify``: reports damage, changes nothing, and exits with 1 if there is any."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from appending import append
from turbopump.cli.app import app
from turbopump.store import Store
from turbopump.wire.record import decode_record
from unit.store.support import read_all, record, small_config, unpack

CONFIG = small_config(index_entries=50)
COUNT = 40


def verify(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["store", "verify", *arguments], env={"COLUMNS": "400"})


def damage_of(root: Path) -> list[dict[str, object]]:
    before = snapshot(root)
    result = verify(str(root), "--json")
    found: list[dict[str, object]] = json.loads(result.stdout)["damage"]
    assert result.exit_code == (1 if found else 0), result.output
    assert snapshot(root) == before
    return found


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole") / "store"
    with Store.open(root, CONFIG) as store:
        for number in range(COUNT):
            queue_id = number % 2
            append(store, [record(b"%02d" % number * 40, queue_id=queue_id, TAGS="a", KEYS="k")])
    return root


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "store"))


def flip(path: Path, at: int, bit: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("archive", ["store", "store_crash", "store_trimmed", "store_v6"])
def test_stores_of_apache_rocketmq_are_whole(archive: str, tmp_path: Path) -> None:
    assert damage_of(unpack(archive, tmp_path)) == []


def test_a_whole_store(root: Path) -> None:
    assert damage_of(root) == []
    result = verify(str(root))
    assert (result.exit_code, result.stdout) == (
        0,
        "40 messages, 2 queues and 1 index files checked: no damage.\n",
    )


@pytest.mark.parametrize(
    ("at", "reason"),
    [
        (0, "unit of offset 5 points to no message of its queue"),
        (8, "unit of offset 5 points to no message of its queue"),
        (11, "unit of offset 5 points to no message of its queue"),
        (12, "unit of offset 5 has another tag than its message"),
    ],
)
def test_a_damaged_unit(root: Path, at: int, reason: str) -> None:
    path = root / "consumequeue/Topic/1" / f"{0:020d}"
    flip(path, 5 * 20 + at, 7)
    found = damage_of(root)
    assert found[0] == {
        "path": str(path.relative_to(root)), "position": 100, "reason": reason,
    }  # fmt: skip
    # In addition, a message that no unit points to is missing.
    assert [str(one["reason"]) for one in found[1:]] == [
        "1 messages of the log are not entered"
    ] * (at < 8)


@pytest.mark.parametrize(
    ("at", "reasons"),
    [
        (100, ["topic Topic, queue 1, offset 3: body does not match its checksum"]),
        (8, ["topic Topic, queue 1, offset 3: body does not match its checksum"]),
        (5, ["neither a message nor the end of the file", "unit of offset 3 points to no"]),
        (30, ["message says that it lies at", "unit of offset 3 points to no"]),
        (25, ["unit of offset 3 points to no"]),
    ],
)
def test_a_damaged_record(root: Path, at: int, reasons: list[str]) -> None:
    with Store.open(root, CONFIG) as store:
        position = read_all(store, "Topic", 1)[3].physical_offset
    flip(root / "commitlog" / f"{0:020d}", position + at)
    found = damage_of(root)
    queues_and_log = [one for one in found if not str(one["path"]).startswith("index")]
    assert len(queues_and_log) == len(reasons), found
    for one, reason in zip(queues_and_log, reasons, strict=True):
        assert str(one["reason"]).startswith(reason)


def test_a_damaged_index(root: Path) -> None:
    (path,) = (root / "index").iterdir()
    entries_at = 40 + 4 * CONFIG.index_slots
    flip(path, entries_at + 20 * 7 + 10)
    (found,) = damage_of(root)
    assert found["reason"] == "entry 7 points to no message"
    flip(path, 20)
    assert len(damage_of(root)) == 1


def test_the_table_and_what_is_not_a_store(root: Path, tmp_path: Path) -> None:
    flip(root / "commitlog" / f"{0:020d}", 100)
    result = verify(str(root))
    assert result.exit_code == 1
    first, line, last = result.stdout.splitlines()
    assert first.split() == ["FILE", "AT", "BYTE", "DAMAGE"]
    assert line.startswith(f"commitlog/{0:020d}")
    assert last == "40 messages, 2 queues and 1 index files checked: 1 damaged places."
    result = verify(str(tmp_path))
    assert result.exit_code == 2
    assert "must be a store" in result.output


def test_a_broker_rebuilds_what_was_reported(root: Path) -> None:
    flip(root / "consumequeue/Topic/1" / f"{0:020d}", 5 * 20 + 6)
    assert damage_of(root)
    with Store.open(root, CONFIG) as store:
        found = store.read("Topic", 1, read_all(store, "Topic", 1)[5].queue_offset, 1)
        assert [decode_record(each).queue_offset for each in found.messages] == [5]  # type: ignore[union-attr]
    assert damage_of(root) == []
