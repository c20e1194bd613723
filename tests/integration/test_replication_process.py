"""Replication as the guide shows it, with processes and sockets."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commands import ready_addresses, started
from documents import blocks
from shells import wait_for

pytestmark = pytest.mark.slow

GUIDE = "docs/guide/replication.md"


def turbopump(nameserver: str, *words: str) -> str:
    """Run a command for daily work; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "turbopump", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "NAMESRV_ADDR": nameserver},
        check=False,
    )
    # A SYNC_MASTER stores messages without its slave too; the command reports it.
    assert done.returncode == 0 or "SLAVE_NOT_AVAILABLE" in done.stdout, done.stderr
    return done.stdout


def statuses(nameserver: str) -> dict[str, Any]:
    """Return the replicas by role; a role that two replicas have is omitted."""
    lines = turbopump(nameserver, "cluster", "status", "--json").splitlines()
    return {status["role"]: status for status in map(json.loads, lines)}


def test_the_demo_works_as_printed(tmp_path: Path) -> None:
    shown = [block.text for block in blocks("console") if block.page == GUIDE]
    server, commands = shown[:2]
    assert re.fullmatch(
        r"\$ turbopump standalone --replicas 1 --dir data\n"
        r"ready nameserver=127.0.0.1:9876 broker=127.0.0.1:10911 slave=127.0.0.1:10921"
        r" core=compiled\n",
        server,
    )
    lines = re.findall(r"^\$ turbopump (.*)$", commands, re.MULTILINE)
    typed = [shlex.split(line.replace("$(hostname)", socket.gethostname())) for line in lines]
    assert len(typed) == 4
    options = ("--dir", str(tmp_path), "--nameserver-port", "0", "--broker-port", "0")
    with started(tmp_path, "standalone", "--replicas", "1", *options) as process:
        addresses = ready_addresses(process)
        assert list(addresses) == ["nameserver", "broker", "slave"]
        nameserver = addresses["nameserver"]
        wait_for(lambda: "SLAVE" in statuses(nameserver))
        printed = [turbopump(nameserver, *words) for words in typed]
        assert "to ASYNC_MASTER, with epoch 1" in printed[-1]
        assert "the old master was ASYNC_MASTER" in printed[-1]
        assert "nothing is missing" in printed[-1]
        wait_for(lambda: statuses(nameserver).keys() == {"ASYNC_MASTER", "SLAVE"})
        found = statuses(nameserver)
        assert found["ASYNC_MASTER"]["address"] == addresses["slave"]
        assert found["SLAVE"]["address"] == addresses["broker"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def replica(directory: Path, nameserver: str, broker_id: int, port: str = "0") -> list[str]:
    directory.mkdir(exist_ok=True)
    role = "SLAVE" if broker_id else "SYNC_MASTER"
    config = directory / "broker.conf"
    config.write_text(
        f"brokerName=b\nbrokerRole={role}\nbrokerId={broker_id}\nlistenPort={port}\n"
        f"storePathRootDir={directory / 'store'}\nnamesrvAddr={nameserver}\n"
    )
    return ["broker", "--config", str(config)]


def test_a_killed_master_returns_as_a_slave(tmp_path: Path) -> None:
    with started(tmp_path, "nameserver", "--port", "0") as names:
        nameserver = ready_addresses(names)["nameserver"]
        old, new = tmp_path / "old", tmp_path / "new"
        with started(tmp_path, *replica(new, nameserver, 1)) as slave:
            new_address = ready_addresses(slave)["broker"]
            with started(tmp_path, *replica(old, nameserver, 0)) as master:
                old_address = ready_addresses(master)["broker"]
                turbopump(nameserver, "topic", "create", "orders", "--queues", "1")
                turbopump(nameserver, "message", "send", "orders", "one")
                wait_for(lambda: statuses(nameserver)["SLAVE"]["link"] == "in sync", 60)
                wait_for(lambda: statuses(nameserver)["SLAVE"]["lag_bytes"] == 0, 60)
                master.kill()
                master.wait()
            promote = ("broker", "promote", "b", "--json")
            planned = json.loads(turbopump(nameserver, *promote, "--dry-run"))
            place = {"cluster": "DefaultCluster", "broker": "b", "broker_id": 1}
            roles = {"role": "SYNC_MASTER", "old_role": "SYNC_MASTER"}
            assert planned == {**place, "address": new_address, **roles, "dry_run": True}
            done = json.loads(turbopump(nameserver, *promote, "--yes"))
            assert done.items() >= roles.items()
            assert (done["address"], done["epoch"], done["missing_bytes"]) == (new_address, 1, None)
            turbopump(nameserver, "message", "send", "orders", "two")
            port = old_address.rpartition(":")[2]
            with started(tmp_path, *replica(old, nameserver, 0, port)) as returned:
                assert ready_addresses(returned)["broker"] == old_address
                wait_for(lambda: statuses(nameserver).keys() == {"SYNC_MASTER", "SLAVE"}, 60)
                wait_for(lambda: statuses(nameserver)["SLAVE"]["lag_bytes"] == 0, 60)
                found = statuses(nameserver)
                assert found["SLAVE"]["address"] == old_address
                assert found["SYNC_MASTER"]["address"] == new_address
        logs = [sorted((side / "store" / "commitlog").iterdir()) for side in (old, new)]
        assert [path.name for path in logs[0]] == [path.name for path in logs[1]]
        assert all(a.read_bytes() == b.read_bytes() for a, b in zip(*logs, strict=True))
