"""``turbopump nameserver`` as a separate process, on real sockets."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

import pytest

from commands import DEADLINE_S, STOP_S, ready_addresses, started
from turbopump.net.loop import run
from turbopump.net.pool import ConnectionPool
from turbopump.net.sockets import SocketNetwork
from turbopump.wire import headers
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import request

pytestmark = pytest.mark.slow


async def put_and_read_back(address: str) -> str:
    async with ConnectionPool(SocketNetwork()) as pool:
        entry = headers.KvEntry(namespace="n", key="k", value="v")
        await pool.request(address, request(RequestCode.PUT_KV_CONFIG, entry), 3000)
        key = headers.KvKey(namespace="n", key="k")
        answer = await pool.request(address, request(RequestCode.GET_KV_CONFIG, key), 3000)
        return (answer.ext_fields or {})["value"]


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_serves_until_it_receives_a_signal(tmp_path: Path, stop: signal.Signals) -> None:
    with started(tmp_path, "nameserver", "--port", "0") as process:
        address = ready_addresses(process)["nameserver"]
        assert run(put_and_read_back(address)) == "v"
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S):
            # An open connection must not keep it from stopping.
            process.send_signal(stop)
            assert process.wait(STOP_S) == 0
        stdout, stderr = process.communicate()
        assert stdout == ""
        assert "Traceback" not in stderr
    assert (tmp_path / ".turbopump" / "namesrv" / "kvConfig.json").exists()


def test_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with started(tmp_path, "nameserver", "--port", port) as process:
            stdout, stderr = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 1
        assert stdout == ""
        assert f"127.0.0.1:{port}" in stderr
        assert "address already in use" in stderr
        assert "Traceback" not in stderr


def test_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / ".turbopump" / "namesrv" / "kvConfig.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with started(tmp_path, "nameserver", "--port", "0") as process:
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, stdout) == (1, "")
    assert str(path) in stderr
    assert "Traceback" not in stderr


def test_many_concurrent_peers(tmp_path: Path) -> None:
    async def ask(address: str) -> int:
        async with ConnectionPool(SocketNetwork()) as pool:
            asked = request(RequestCode.GET_ROUTEINFO_BY_TOPIC, headers.RouteOf(topic="T"))
            return (await pool.request(address, asked, 10_000)).code

    async def ask_all(address: str) -> set[int]:
        return set(await asyncio.gather(*(ask(address) for _ in range(100))))

    with started(tmp_path, "nameserver", "--port", "0") as process:
        assert run(ask_all(ready_addresses(process)["nameserver"])) == {17}
