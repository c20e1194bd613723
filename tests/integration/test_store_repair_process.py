"""A broker whose commit log is missing, as when a file system is not mounted."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from commands import DEADLINE_S, ready_addresses, started
from plain_requests import GROUP, TOPIC, ask, field, pull, send
from turbopump.wire.codes import RequestCode
from turbopump.wire.headers import QueryConsumerOffset, UpdateConsumerOffset

pytestmark = pytest.mark.slow

COUNT = 5
COMMIT = UpdateConsumerOffset(consumer_group=GROUP, topic=TOPIC, queue_id=0, commit_offset=COUNT)
COMMITTED = QueryConsumerOffset(consumer_group=GROUP, topic=TOPIC, queue_id=0)


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0


def test_the_broker_starts_only_once_the_log_is_back_or_abandoned(tmp_path: Path) -> None:
    store = tmp_path / "store"
    log, elsewhere = store / "commitlog", tmp_path / "elsewhere"
    broker_command = ("broker", "--dir", str(tmp_path), "--port", "0")
    with started(tmp_path, *broker_command) as process:
        broker = ready_addresses(process)["broker"]
        for number in range(COUNT):
            field(send(broker, b"%d" % number), "queueOffset")
        ask(broker, RequestCode.UPDATE_CONSUMER_OFFSET, COMMIT)
        stop(process)

    log.rename(elsewhere)
    log.mkdir()
    with started(tmp_path, *broker_command) as process:
        assert process.wait(DEADLINE_S) == 1
        error = process.communicate()[1]
    assert f"{log} has no files" in error
    assert f"about {COUNT} messages (T {COUNT})" in error
    assert f"turbopump store repair {store}" in error
    assert "Traceback" not in error

    log.rmdir()
    elsewhere.rename(log)
    with started(tmp_path, *broker_command) as process:
        broker = ready_addresses(process)["broker"]
        assert pull(broker, 0) == [b"%d" % number for number in range(COUNT)]
        stop(process)

    log.rename(elsewhere)
    repaired = json.loads(command(tmp_path, "store", "repair", str(store), "--yes", "--json"))
    assert repaired["topics"] == {"T": COUNT}
    with started(tmp_path, *broker_command) as process:
        broker = ready_addresses(process)["broker"]
        assert field(send(broker, b"new"), "queueOffset") == COUNT
        # The group resumes with new messages.
        offset = field(ask(broker, RequestCode.QUERY_CONSUMER_OFFSET, COMMITTED), "offset")
        assert pull(broker, offset) == [b"new"]
        stop(process)


def command(home: Path, *arguments: str) -> str:
    with started(home, *arguments) as process:
        output, error = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, error
    return output
