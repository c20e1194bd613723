"""``turbopump standalone`` and ``turbopump broker`` as separate processes, on real sockets."""

from __future__ import annotations

import signal
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from commands import DEADLINE_S, STOP_S, ready_addresses, started
from turbopump.net.loop import run
from turbopump.net.pool import ConnectionPool
from turbopump.net.sockets import SocketNetwork
from turbopump.wire import headers
from turbopump.wire.bodies import TopicRoute
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request
from turbopump.wire.schema import Header

pytestmark = pytest.mark.slow

FREE_PORTS = ("--nameserver-port", "0", "--broker-port", "0")
TOPIC = "TBW102"

SEND = headers.SendMessage(
    producer_group="g",
    topic="T",
    default_topic=TOPIC,
    default_topic_queue_nums=1,
    queue_id=0,
    sys_flag=0,
    born_timestamp=0,
    flag=0,
)


async def ask(address: str, code: int, header: Header, body: bytes = b"") -> Command:
    async with ConnectionPool(SocketNetwork()) as pool:
        return await pool.request(address, request(code, header, body), 5000)


def route_of(nameserver: str, topic: str = TOPIC) -> TopicRoute | None:
    answer = run(ask(nameserver, RequestCode.GET_ROUTEINFO_BY_TOPIC, headers.RouteOf(topic=topic)))
    assert isinstance(answer.body, bytes)
    return TopicRoute.decode(answer.body) if answer.code == ResponseCode.SUCCESS else None


def max_offset(broker: str) -> str:
    header = headers.QueueOfTopic(topic="T", queue_id=0)
    answer = run(ask(broker, RequestCode.GET_MAX_OFFSET, header))
    return (answer.ext_fields or {})["offset"]


def stopped(process: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> str:
    """Stop a process; return what it logged."""
    process.send_signal(number)
    assert process.wait(STOP_S) == 0
    stderr = process.communicate()[1]
    assert "Traceback" not in stderr
    return stderr


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_standalone_retains_messages_across_restarts(tmp_path: Path, stop: signal.Signals) -> None:
    arguments = ("standalone", "--dir", str(tmp_path / "data"), *FREE_PORTS)
    with started(tmp_path, *arguments) as process:
        ready = ready_addresses(process)
        assert list(ready) == ["nameserver", "broker"]
        route = route_of(ready["nameserver"])
        assert route is not None
        assert route.broker_datas[0].broker_addrs == {0: ready["broker"]}
        sent = run(ask(ready["broker"], RequestCode.SEND_MESSAGE, SEND, b"hello"))
        assert sent.code == ResponseCode.SUCCESS
        assert max_offset(ready["broker"]) == "1"
        stopped(process, stop)
    with started(tmp_path, *arguments) as process:
        ready = ready_addresses(process)
        assert max_offset(ready["broker"]) == "1"
        assert route_of(ready["nameserver"], "T") is not None
        stopped(process)


def test_broker_registers_with_a_name_server_and_unregisters(tmp_path: Path) -> None:
    with ExitStack() as running:
        names = running.enter_context(started(tmp_path, "nameserver", "--port", "0"))
        nameserver = ready_addresses(names)["nameserver"]
        arguments = ("--port", "0", "--dir", str(tmp_path), "--nameserver", nameserver)
        broker = running.enter_context(started(tmp_path, "broker", *arguments))
        assert list(ready_addresses(broker)) == ["broker"]
        assert route_of(nameserver) is not None
        stopped(broker)
        assert route_of(nameserver) is None
        stopped(names)


def test_a_broker_port_in_use_leaves_nothing_behind(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        arguments = ("--dir", str(tmp_path), "--nameserver-port", "0", "--broker-port", port)
        with started(tmp_path, "standalone", *arguments) as process:
            stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, stdout) == (1, "")
    assert "address already in use" in stderr
    assert "Traceback" not in stderr


def test_directory_that_is_in_use(tmp_path: Path) -> None:
    arguments = ("standalone", "--dir", str(tmp_path), *FREE_PORTS)
    with started(tmp_path, *arguments) as first:
        ready_addresses(first)
        with started(tmp_path, *arguments) as second:
            stdout, stderr = second.communicate(timeout=DEADLINE_S)
        assert (second.returncode, stdout) == (1, "")
        assert str(tmp_path / "store") in stderr
        assert "Traceback" not in stderr
        stopped(first)
