"""A backup of a broker that goes on storing messages."""

from __future__ import annotations

import signal
import subprocess
import threading
from pathlib import Path

import pytest

from commands import DEADLINE_S, ready_addresses, started
from plain_requests import field, pull, send

pytestmark = pytest.mark.slow

BEFORE = 20


def test_a_broker_serves_what_was_acknowledged_before_the_backup(tmp_path: Path) -> None:
    store, copy = tmp_path / "store", tmp_path / "other" / "store"
    with started(tmp_path, "broker", "--dir", str(tmp_path), "--port", "0") as process:
        broker = ready_addresses(process)["broker"]
        for number in range(BEFORE):
            assert field(send(broker, b"%d" % number), "queueOffset") == number
        is_over = threading.Event()
        sender = threading.Thread(target=keep_sending, args=(broker, is_over))
        sender.start()
        try:
            with started(tmp_path, "store", "backup", str(store), str(copy)) as backup:
                output, error = backup.communicate(timeout=DEADLINE_S)
        finally:
            is_over.set()
            sender.join()
        assert backup.returncode == 0, error
        assert output.startswith(f"Backed up {store} in {copy}: ")
        stop(process)

    with started(tmp_path, "store", "verify", str(copy)) as verify:
        assert verify.communicate(timeout=DEADLINE_S)[0].endswith("no damage.\n")
    with started(tmp_path, "broker", "--dir", str(copy.parent), "--port", "0") as process:
        broker = ready_addresses(process)["broker"]
        assert pull(broker, 0)[:BEFORE] == [b"%d" % number for number in range(BEFORE)]
        stop(process)


def keep_sending(broker: str, is_over: threading.Event) -> None:
    while not is_over.is_set():
        send(broker, b"later")


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0
