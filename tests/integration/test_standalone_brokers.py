"""``turbopump standalone --brokers``: several broker processes behind one name server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from commands import DEADLINE_S, started
from shells import wait_for
from turbopump import Message, Producer, PullConsumer
from turbopump.admin import Admin

pytestmark = pytest.mark.slow

FREE_PORTS = ("--nameserver-port", "0", "--broker-port", "0")
STOP_S = 10.0


@contextmanager
def standalone(home: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """Run two brokers; yield the process, the name server's address and the brokers'."""
    arguments = ("standalone", "--brokers", "2", "--dir", str(home / "data"), *options)
    with started(home, *arguments) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        words = dict(word.split("=") for word in line.split()[1:])
        assert list(words) == ["nameserver", "broker", "core"], (line, process.poll())
        yield process, words["nameserver"], words["broker"].split(",")


def children(process: subprocess.Popen[str]) -> list[int]:
    text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(each) for each in text.split()]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def listener_at(address: str, pids: list[int]) -> int:
    """Return which of the processes listens on an address."""
    port = int(address.rpartition(":")[2])
    table = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (inode,) = (row[9] for row in table if row[3] == "0A" and row[1].endswith(f":{port:04X}"))
    (found,) = (pid for pid in pids if f"socket:[{inode}]" in open_files(pid))
    return found


def open_files(pid: int) -> set[str]:
    """Return what the descriptors of a process refer to."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        # It may have been closed meanwhile.
        with suppress(FileNotFoundError):
            found.add(str(descriptor.readlink()))
    return found


def stored(nameserver: str) -> dict[str, int]:
    """Return the number of messages of the topic on each broker."""
    with Admin(nameserver) as admin:
        queues = admin.topics.status("orders").queues
    counts: dict[str, int] = {}
    for each in queues:
        counts[each.queue.broker] = counts.get(each.queue.broker, 0) + each.messages
    return counts


def send(nameserver: str, count: int) -> None:
    with Producer("g", nameserver=nameserver) as producer:
        for number in range(count):
            producer.send(Message("orders", b"%d" % number))


def bodies(nameserver: str) -> list[int]:
    with PullConsumer("reader", nameserver=nameserver) as consumer:
        found = []
        for queue in consumer.queues("orders"):
            pulled = consumer.pull(queue, 0)
            found += [int(message.body) for message in getattr(pulled, "messages", ())]
    return sorted(found)


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_clients_spread_over_brokers_that_retain_their_messages(
    tmp_path: Path, stop: signal.Signals
) -> None:
    host = socket.gethostname()
    with standalone(tmp_path, *FREE_PORTS) as (process, nameserver, brokers):
        assert len(set(brokers)) == 2
        with Admin(nameserver) as admin:
            admin.topics.create("orders", queues=2)
        send(nameserver, 40)
        assert stored(nameserver) == {host: 20, f"{host}-2": 20}
        pids = children(process)
        assert len(pids) == 2
        process.send_signal(stop)
        assert process.wait(STOP_S) == 0
        assert not any(map(is_running, pids))
        assert "Traceback" not in process.communicate()[1]
    assert {each.name for each in (tmp_path / "data").iterdir()} >= {"store", "store-2"}
    with standalone(tmp_path, *FREE_PORTS) as (_, nameserver, _):
        assert bodies(nameserver) == list(range(40))


def test_a_broker_that_dies_is_restarted_at_its_address(tmp_path: Path) -> None:
    with standalone(tmp_path, *FREE_PORTS) as (process, nameserver, brokers):
        with Admin(nameserver) as admin:
            admin.topics.create("orders", queues=2)
        send(nameserver, 8)
        first, second = (listener_at(address, children(process)) for address in brokers)
        os.kill(second, signal.SIGKILL)

        def is_back() -> bool:
            pids = children(process)
            return len(pids) == 2 and second not in pids and is_listening(brokers[1])

        wait_for(is_back, DEADLINE_S)
        assert first in children(process)
        wait_for(lambda: bodies(nameserver) == list(range(8)), DEADLINE_S)
        send(nameserver, 4)
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0
        log = process.communicate()[1]
    assert "broker process 2 exited with -9" in log
    assert "broker process 1 exited" not in log


def is_listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_brokers_stop_when_the_parent_is_killed(tmp_path: Path) -> None:
    with standalone(tmp_path, *FREE_PORTS) as (process, _, _):
        pids = children(process)
        process.kill()
        process.wait()
        wait_for(lambda: not any(map(is_running, pids)), DEADLINE_S)


def test_a_broker_that_cannot_start_leaves_nothing_behind(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        first = taken.getsockname()[1] - 10
        ports = ("--nameserver-port", "0", "--broker-port", str(first))
        arguments = ("standalone", "--brokers", "2", "--dir", str(tmp_path), *ports)
        with started(tmp_path, *arguments) as process:
            stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, stdout) == (1, "")
    assert "address already in use" in stderr
    assert "turbopump: broker process 2 exited with 1; see its log above" in stderr
    assert "Traceback" not in stderr
