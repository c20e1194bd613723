"""A broker process on a small, full file system: tmpfs, where mounting is permitted."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import ready_addresses, started
from plain_requests import field, pull, send
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command

pytestmark = pytest.mark.slow

DISK_BYTES = 16 * 1024 * 1024
COUNT = 60
HEALED_S_MAX = 60.0
"""A broker checks its disk every 10 s."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system for one test."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def settings(tmp_path: Path, segment_bytes: int) -> Path:
    path = tmp_path / "broker.conf"
    path.write_text(
        f"maxMessageSize=70000\nmappedFileSizeCommitLog={segment_bytes}\nmaxHashSlotNum=1000\n"
        "maxIndexNum=4000\nmappedFileSizeConsumeQueue=20000\n"
    )
    return path


def send_until_taken(broker: str, body: bytes) -> Command:
    deadline = time.monotonic() + HEALED_S_MAX
    while (answer := send(broker, body)).code != ResponseCode.SUCCESS:
        assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE, answer
        assert time.monotonic() < deadline, answer
        time.sleep(0.1)
    return answer


def body(number: int) -> bytes:
    return b"%04d" % number * 16_000


def fill(disk: Path) -> Path:
    """Write until no space is left."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1024 * 1024, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return path


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGKILL])
def test_the_broker_starts_and_recovers(tmp_path: Path, disk: Path, stop: signal.Signals) -> None:
    config = settings(tmp_path, 64 * 1024 * 1024)
    arguments = ("broker", "--dir", str(disk), "--port", "0", "--config", str(config))
    with started(tmp_path, *arguments) as process:
        broker = ready_addresses(process)["broker"]
        for number in range(COUNT):
            assert send(broker, body(number)).code == ResponseCode.SUCCESS
        process.send_signal(stop)
        process.wait(20)
    filler = fill(disk)
    with started(tmp_path, *arguments) as process:
        broker = ready_addresses(process)["broker"]
        for number in range(COUNT):
            assert pull(broker, number, 1) == [body(number)]
        refused = send(broker, body(0))
        assert refused.code == ResponseCode.SERVICE_NOT_AVAILABLE
        filler.unlink()
        send_until_taken(broker, body(COUNT))
        assert pull(broker, COUNT) == [body(COUNT)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        log = process.communicate()[1]
    assert "messages are refused" in log
    assert str(disk) in log
    assert "Traceback" not in log
    with started(tmp_path, *arguments) as process:
        broker = ready_addresses(process)["broker"]
        for number in range(COUNT + 1):
            assert pull(broker, number, 1) == [body(number)]


def test_the_broker_frees_space_by_deleting_the_oldest_files(tmp_path: Path, disk: Path) -> None:
    config = settings(tmp_path, 512 * 1024)
    arguments = ("broker", "--dir", str(disk), "--port", "0", "--config", str(config))
    with started(tmp_path, *arguments) as process:
        broker = ready_addresses(process)["broker"]
        for number in range(COUNT):
            assert send(broker, body(number)).code == ResponseCode.SUCCESS
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    fill(disk)
    with started(tmp_path, *arguments) as process:
        broker = ready_addresses(process)["broker"]
        stored = send_until_taken(broker, body(COUNT))
        assert field(stored, "queueOffset") == COUNT
        assert pull(broker, COUNT) == [body(COUNT)]
