"""Real clients in separate processes, controlled line by line.

Each input line is ``{"do": name, "with": arguments}``, answered by ``@{"answer": ...}`` or
``@{"error": ...}``; ``@{"got": message}`` reports each message that a push consumer receives. Other
output is the client's own and is ignored.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import msgspec

DEADLINE_S = 60.0
"""Longer than the slowest interval of any client, the 30 s between route refreshes."""


def attempts() -> Iterator[int]:
    """Count attempts until the caller stops iterating; fail after the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    number = 0
    while time.monotonic() < deadline:
        yield number
        number += 1
    raise AssertionError(f"condition not met after {DEADLINE_S} s")


class Sent(msgspec.Struct, frozen=True):
    """What a client reports about a send."""

    status: int
    msg_id: str
    queue_offset: int


class Got(msgspec.Struct, frozen=True):
    """A message as a client delivers it to its listener."""

    peer: int
    """Number of the client that delivered it."""
    group: str
    topic: str
    body: str
    tags: str
    keys: str
    msg_id: str
    queue_id: int
    queue_offset: int
    reconsume_times: int
    born_ms: int
    stored_ms: int
    at_ms: int
    """When the client delivered it."""
    properties: dict[str, str] = {}


class Inbox:
    """What the consumers of all clients of a test received."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._got: list[Got] = []
        self._trouble: list[str] = []

    def add(self, message: Got) -> None:
        with self._changed:
            self._got.append(message)
            self._changed.notify_all()

    def add_trouble(self, text: str) -> None:
        """Make all waits fail with this error."""
        with self._changed:
            self._trouble.append(text)
            self._changed.notify_all()

    def of(self, group: str) -> list[Got]:
        """Return what a group has received so far."""
        return [one for one in self._got if one.group == group]

    def wait(self, group: str, enough: Callable[[list[Got]], bool]) -> list[Got]:
        """Return what a group has received, as soon as ``enough`` is true of it."""

        def is_over() -> bool:
            return bool(self._trouble) or enough(self.of(group))

        with self._changed:
            in_time = self._changed.wait_for(is_over, DEADLINE_S)
            assert not self._trouble, self._trouble
            assert in_time, f"not enough after {DEADLINE_S} s: {self.of(group)}"
            return self.of(group)

    def wait_for(self, group: str, count: int) -> list[Got]:
        return self.wait(group, lambda got: len(got) >= count)

    def wait_for_bodies(self, group: str, wanted: Iterable[str]) -> list[Got]:
        return self.wait(group, lambda got: set(wanted) <= {one.body for one in got})


class Peer:
    """A client's process."""

    def __init__(
        self, number: int, process: subprocess.Popen[str], errors: Path, inbox: Inbox
    ) -> None:
        self.number = number
        self._process = process
        self._errors = errors
        self._inbox = inbox
        self._is_closing = False
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.startswith("@"):
                continue
            reply = json.loads(line[1:])
            if "got" in reply:
                self._inbox.add(msgspec.convert({**reply["got"], "peer": self.number}, Got))
            else:
                self._answers.put(reply)
        if not self._is_closing:
            ended = f"client {self.number} has ended"
            self._answers.put({"error": ended})
            self._inbox.add_trouble(f"{ended}: {self._errors.read_text()}")

    def call(self, do: str, **arguments: Any) -> Any:
        """Have the client execute a command, and return the result."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, "with": arguments}) + "\n")
        self._process.stdin.flush()
        reply = self._answers.get(timeout=DEADLINE_S)
        assert "error" not in reply, f"{do}: {reply['error']}\n{self._errors.read_text()}"
        return reply["answer"]

    def send(self, topic: str, body: str, how: str = "sync", shard: int = 0, **more: Any) -> Sent:
        """Send a message, and check that the client reports it as stored."""
        message = {"topic": topic, "body": body, **more}
        sent = msgspec.convert(self.call("send", message=message, how=how, shard=shard), Sent)
        assert sent.status == 0
        return sent

    def send_oneway(self, topic: str, body: str, how: str = "oneway", shard: int = 0) -> None:
        self.call("send", message={"topic": topic, "body": body}, how=how, shard=shard)

    def pull(self, group: str, topic: str, expression: str = "*") -> list[Got]:
        pulled = self.call("pull", group=group, topic=topic, expression=expression)
        return msgspec.convert([{**one, "peer": self.number} for one in pulled], list[Got])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._is_closing = True
        self._process.stdin.close()
        try:
            self._process.wait(DEADLINE_S)
        finally:
            self._process.kill()
            self._reader.join()


class Peers:
    """Starts clients of one kind, each with its own home directory for logs and offsets."""

    def __init__(
        self, command: Sequence[str], directory: Path, environment: Mapping[str, str]
    ) -> None:
        self._command = command
        self._directory = directory
        self._environment = environment
        self._running = ExitStack()
        self._count = 0
        self.inbox = Inbox()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._running.close()

    def start(self) -> Peer:
        """Start one more client."""
        home = self._directory / f"client-{self._count}"
        home.mkdir()
        errors = home / "errors"
        process = self._running.enter_context(
            subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._running.enter_context(errors.open("w")),
                text=True,
                cwd=home,
                env={**os.environ, **self._environment, "HOME": str(home)},
            )
        )
        peer = Peer(self._count, process, errors, self.inbox)
        self._count += 1
        self._running.callback(peer.close)
        return peer
