"""``python -m turbopump.store inspect``: prints what exists, and changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from appending import append, append_all
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
def test_every_message_of_an_apache_rocketmq_store_as_a_line(
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
def test_the_report_of_an_apache_rocketmq_store(
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
            append(store, [record(b"%d" % number * 500)])
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
    reasons = {found["path"]: found["reason"] for found in damage}
    assert "checksum" in reasons[str(first)]
    assert "2 messages of the log are not entered" in reasons[str(queue.parent)]
    assert main(["inspect", str(root)]) == 0
    assert "damage:" in capsys.readouterr().out
    assert main(["inspect", str(root), "--messages"]) == 0
    assert capsys.readouterr().out


def log(root: Path, number: int) -> Path:
    return sorted((root / "commitlog").iterdir())[number]


def queue(root: Path, number: int) -> Path:
    return sorted((root / "consumequeue" / "Topic" / "0").iterdir())[number]


def index(root: Path, number: int) -> Path:
    return sorted((root / "index").iterdir())[number]


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "middle segment": (lambda root: log(root, 2).unlink(), "commitlog", "between 4096 and 12288"),
    "first segment": (lambda root: overwrite(log(root, 0), 0, bytes(4096)), f"{0:020d}", "closing"),
    "segment size": (lambda root: os.truncate(log(root, 1), 100), f"{4096:020d}", "100 bytes"),
    "foreign": (lambda root: (root / "commitlog" / "x").touch(), "x", "not a store file"),
    "directory": (lambda root: (root / "commitlog" / ("9" * 20)).mkdir(parents=True), "9" * 20, ""),
    "queue file": (lambda root: queue(root, 1).unlink(), "0", "no file between 0 and 400"),
    "first queue file": (lambda root: queue(root, 0).unlink(), "0", "10 messages of the log"),
    "last queue file": (lambda root: queue(root, -1).unlink(), "0", "10 messages of the log"),
    "queue size": (lambda root: os.truncate(queue(root, 0), 50), f"{0:020d}", "50 bytes"),
    "no message": (lambda root: overwrite(queue(root, 0), 20, bytes(7) + b"x"), f"{0:020d}", "1 p"),
    "other queue": (
        lambda root: overwrite(queue(root, 0), 0, other_queue(root)), f"{0:020d}", "of its queue",
    ),
    "queue": (lambda root: shutil.rmtree(queue(root, 0).parent), "0", "60 messages of the log"),
    "foreign queue": (lambda root: (root / "consumequeue/Topic/x").mkdir(), "x", "not a store"),
    "odd queue": (lambda root: (root / "consumequeue/Topic/007").mkdir(), "007", "not a store"),
    "foreign topic": (lambda root: (root / "consumequeue/y").touch(), "y", "not a store"),
    "index size": (lambda root: os.truncate(index(root, 0), 50), "", "50 bytes"),
    "foreign index": (lambda root: (root / "index" / "z").touch(), "z", "not a store"),
}  # fmt: skip


def other_queue(root: Path) -> bytes:
    return (root / "consumequeue" / "Topic" / "1" / f"{0:020d}").read_bytes()[:20]


@pytest.mark.parametrize("name", DAMAGES)
def test_each_kind_of_damage_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open(tmp_path, small_config()) as store:
        append(store, [record(b"other", queue_id=1)])
        append(store, [record(b"gone", topic="Removed", KEYS="gone")])
        store.remove_topic("Removed")
        for number in range(60):
            append(store, [record(b"x" * 500, KEYS=f"k{number}")])
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["damage"] == []
    damage, path, reason = DAMAGES[name]
    damage(tmp_path)
    before = snapshot(tmp_path)
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["damage"]
    assert any(
        Path(one["path"]).name.endswith(path) and reason in one["reason"] for one in found
    ), found
    assert main(["inspect", str(tmp_path), "--messages"]) == 0
    assert snapshot(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "--json", "--messages"])
def test_output_that_cannot_be_written(options: str, tmp_path: Path) -> None:
    with Store.open(tmp_path, small_config()) as store:
        append_all(store, [[record(b"x" * 1000)] for _ in range(100)])
    command = f"{sys.executable} -m turbopump.store inspect {tmp_path} {options}"
    full = subprocess.run(
        f"{command} > /dev/full", shell=True, capture_output=True, text=True, check=False
    )
    assert (full.returncode, full.stderr) == (2, "error: [Errno 28] No space left on device\n")
    # The reader closes the pipe before anything is written.
    piped = subprocess.run(
        f"(sleep 0.01; {command}; echo $? >&2) | true",
        shell=True, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert piped.stderr == "0\n"


def test_an_unwritten_file_between_others_is_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "store"
    with Store.open(root, small_config()) as store:
        for number in range(12):
            append(store, [record(b"%d" % number * 500)])
    second = sorted((root / "commitlog").iterdir())[1]
    data = second.read_bytes()
    second.write_bytes(data[:602] + bytes(len(data) - 602))
    assert main(["inspect", str(root), "--json"]) == 0
    damage = json.loads(capsys.readouterr().out)["damage"]
    assert any(found["path"] == str(second) for found in damage)


def test_a_running_store_can_be_inspected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open(tmp_path, small_config()) as store:
        append(store, [record(b"a")])
        assert main(["inspect", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["crashed"]
    assert report["messages"] == 1
    assert set(report["checkpoint"]) >= {"logMs", "queuesMs", "indexMs"}


@pytest.mark.parametrize("options", [[], ["--json"], ["--messages"]])
def test_bad_input_is_named(
    tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for name, reason in (
        ("nowhere", "not a directory"),
        ("file", "not a directory"),
        (".", "not a store"),
    ):
        assert main(["inspect", str(tmp_path / name), *options]) == 2
        captured = capsys.readouterr()
        assert reason in captured.err
        assert not captured.out


def test_usage_errors_have_the_same_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err
