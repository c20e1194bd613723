"""``python -m turbopump.store inspect``: says what is there, and changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from turbopump.store import Store
from turbopump.store.__main__ import main
from unit.store.support import golden, record, small_config, unpack

FIELDS = {
    "topic", "queueId", "queueOffset", "physicalOffset", "size", "tags", "keys", "properties",
    "bodyHex", "msgId", "uniqKey", "sysFlag", "bornTimestamp", "storeTimestamp", "reconsumeTimes",
}  # fmt: skip


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in root.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("archive", ["store", "store_crash", "store_trimmed", "store_v6"])
def test_every_message_of_the_original_as_a_line(
    archive: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = unpack(archive, tmp_path)
    before = snapshot(root)
    assert main(["inspect", str(root), "--messages"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = golden(archive)["messages"]
    assert len(lines) == len(expected)
    for line, message in zip(lines, expected, strict=True):
        assert set(line) == FIELDS
        assert line.pop("bodyHex") == message["body"]
        assert line == {name: message[name] for name in line}
    assert snapshot(root) == before


@pytest.mark.parametrize("archive", ["store", "store_crash", "store_trimmed", "store_v6"])
def test_the_report_of_a_store_of_the_original(
    archive: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = unpack(archive, tmp_path)
    before = snapshot(root)
    assert main(["inspect", str(root), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    reads = golden(f"{archive}_reads")
    assert report["crashed"] == reads["abortFileBefore"]
    assert (report["minOffset"], report["maxOffset"]) == (
        reads["minPhyOffset"],
        reads["maxPhyOffset"],
    )
    assert report["damage"] == []
    assert report["messages"] == len(golden(archive)["messages"])
    for queue in report["queues"]:
        expected = reads["queues"][queue["topic"]][str(queue["queueId"])]
        gone = expected["max"] > 0 and not expected["units"]
        assert queue["maxOffset"] == expected["max"]
        assert gone or queue["minOffset"] == expected["min"]
    assert snapshot(root) == before


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = unpack("store", tmp_path)
    assert main(["inspect", str(root)]) == 0
    out = capsys.readouterr().out
    assert "stopped, 322 messages, log from 0 to 224122" in out
    assert "00000000000000196608           27514        35" in out
    assert "Alpha                            0           0         120      2" in out
    assert "damage: none" in out


def test_damage_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "store"
    with Store.open(root, small_config()) as store:
        for number in range(12):
            store.append([record(b"%d" % number * 500)])
    first, second = sorted((root / "commitlog").iterdir())[:2]
    data = bytearray(first.read_bytes())
    data[700] ^= 1
    first.write_bytes(data)
    data = bytearray(second.read_bytes())
    data[-8:] = b"trailing"
    second.write_bytes(data)
    last = max((root / "commitlog").iterdir())
    last.write_bytes(last.read_bytes() + b"x")
    queue = root / "consumequeue" / "Topic" / "0" / f"{200:020d}"
    queue.write_bytes(bytes(200))
    assert main(["inspect", str(root), "--json"]) == 0
    damage = json.loads(capsys.readouterr().out)["damage"]
    reasons = {Path(found["path"]).name: found["reason"] for found in damage}
    assert "checksum" in reasons[first.name]
    assert "2 messages of the log are not entered" in reasons["0"]
    assert main(["inspect", str(root)]) == 0
    assert "damage:" in capsys.readouterr().out
    assert main(["inspect", str(root), "--messages"]) == 0
    assert capsys.readouterr().out


def test_an_unwritten_file_between_others_is_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "store"
    with Store.open(root, small_config()) as store:
        for number in range(12):
            store.append([record(b"%d" % number * 500)])
    second = sorted((root / "commitlog").iterdir())[1]
    data = second.read_bytes()
    second.write_bytes(data[:602] + bytes(len(data) - 602))
    assert main(["inspect", str(root), "--json"]) == 0
    damage = json.loads(capsys.readouterr().out)["damage"]
    assert any(found["path"] == str(second) for found in damage)


def test_a_running_store_can_be_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open(tmp_path, small_config()) as store:
        store.append([record(b"a")])
        assert main(["inspect", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["crashed"]
    assert report["messages"] == 1


@pytest.mark.parametrize("options", [[], ["--json"], ["--messages"]])
def test_bad_input_is_named(
    tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "foreign" / "commitlog").mkdir(parents=True)
    (tmp_path / "foreign" / "commitlog" / "notes.txt").touch()
    (tmp_path / "file").touch()
    for name, reason in (
        ("nowhere", "not a directory"),
        ("file", "not a directory"),
        (".", "not a store"),
        ("foreign", "does not belong"),
    ):
        assert main(["inspect", str(tmp_path / name), *options]) == 2
        captured = capsys.readouterr()
        assert reason in captured.err
        assert not captured.out
    shutil.rmtree(tmp_path / "foreign")


def test_usage_errors_have_the_same_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err
