"""Processes of filter servers and code filters, as the kernel reports them."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from turbopump.filter_server.sandbox import FilterRefused, Sandbox
from turbopump.filters.server_config import CodeLimits

EVERYTHING = b"def matches(message): return True"


@functools.cache
def why_unavailable() -> str | None:
    """Return why no code filter can run here; only trying the sandbox shows that."""

    async def try_one() -> str | None:
        try:
            sandbox = await Sandbox.start(EVERYTHING, CodeLimits())
        except FilterRefused as error:
            return str(error)
        await sandbox.close()
        return None

    return asyncio.run(try_one())


def require_sandbox() -> None:
    """Skip the test if the system has no seccomp for the sandbox."""
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)


def descendants(pid: int) -> dict[int, str]:
    """Return the command lines of a process's live descendants."""
    parents: dict[int, tuple[int, str]] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (directory / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (
                (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
        except OSError:
            continue
        if state != "Z":
            parents[int(directory.name)] = int(parent), command
    found = {pid: ""}
    while more := {
        p: c for p, (parent, c) in parents.items() if parent in found and p not in found
    }:
        found |= more
    del found[pid]
    return found


def filter_servers(pid: int) -> list[int]:
    """Return the filter servers that a process has started."""
    return [p for p, command in descendants(pid).items() if "-m turbopump.filter_server" in command]


def sandboxes(pid: int) -> list[int]:
    """Return the code filter processes among a process's descendants."""
    return [p for p, command in descendants(pid).items() if "filter_server/child.py" in command]


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_for(fact: Callable[[], object], timeout_s: float = 60) -> None:
    """Poll until a condition holds."""
    end_s = time.monotonic() + timeout_s
    while not fact():
        assert time.monotonic() < end_s, f"condition not met within {timeout_s:g} s"
        time.sleep(0.01)
