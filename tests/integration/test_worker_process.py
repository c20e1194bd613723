"""``turbopump worker``: one process or several, stopped, killed and reloaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from commands import DEADLINE_S
from servers import Standalone, standalone
from shells import wait_for
from turbopump import Message, Producer
from turbopump.admin.blocking import Admin
from turbopump.core import CORE_NAME

pytestmark = pytest.mark.slow

APP = """
import os, threading, time
from pathlib import Path
import turbopump
from turbopump import Listening, aio, consumer

def say(text):
    os.write(1, f"{text} {os.getpid()}\\n".encode())

@consumer("TOPIC", group="TOPIC", start_from="first", listening=Listening(close_wait=60))
def bill(number: int) -> None:
    say(f"begun {number}")
    while number and not Path("go").exists():
        time.sleep(0.01)
    say(f"done {number}")

@consumer("TOPIC", group="TOPIC", start_from="first")
async def close(number: int) -> None:
    say(f"closing {number}")
    await awaited.close()

@consumer("TOPIC", group="TOPIC", start_from="first")
def close_blocking(number: int) -> None:
    say(f"closing {number}")
    blocked.close()

blocking = turbopump.Worker(bill, nameserver="192.0.2.1:1")
awaited = aio.Worker(close, nameserver="192.0.2.1:1")
blocked = turbopump.Worker(close_blocking, nameserver="192.0.2.1:1")
"""


@dataclass
class Running:
    """A worker command, with the lines that it and its functions print."""

    process: subprocess.Popen[str]
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def until(self, text: str) -> int:
        """Read lines until a function prints this; return its process."""
        while not (line := self.line()).startswith(text):
            assert line, f"ended without {text!r}"
        return int(line.split()[-1])

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal, and wait until it is heard."""
        self.process.send_signal(number)
        wait_for(lambda: "stopping" in self.log, DEADLINE_S)

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("worker")) as running:
        yield running


@pytest.fixture
def topic(server: Standalone, request: pytest.FixtureRequest) -> str:
    name = "".join(each if each.isalnum() else "_" for each in request.node.name)
    with Admin(server.nameserver) as admin:
        # Before it is subscribed to.
        admin.topics.create(name, queues=4)
    return name


@contextmanager
def working(directory: Path, nameserver: str, *arguments: str) -> Iterator[Running]:
    """Run ``turbopump worker`` in a directory."""
    log = directory / "stderr.txt"
    command = [sys.executable, "-m", "turbopump", "worker", *arguments]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [*command, "--nameserver", nameserver],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=directory,
        ) as process,
    ):
        try:
            yield Running(process, log)
        finally:
            process.kill()


def write_app(directory: Path, topic: str, source: str = APP) -> None:
    path = directory / "app.py"
    path.with_suffix(".new").write_text(source.replace("TOPIC", topic))
    path.with_suffix(".new").replace(path)


def send(server: Standalone, topic: str, *numbers: int) -> None:
    with Producer("pg", nameserver=server.nameserver) as producer:
        for number in numbers:
            producer.send(Message(topic, b"%d" % number))


def lag(server: Standalone, group: str) -> int | None:
    with Admin(server.nameserver) as admin:
        return admin.groups.progress(group).lag


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# --- one process ----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("app", ["app:bill", "app:blocking"])
def test_running_calls_finish_after_a_signal(
    server: Standalone, tmp_path: Path, topic: str, app: str, number: signal.Signals
) -> None:
    write_app(tmp_path, topic)
    with working(tmp_path, server.nameserver, app) as running:
        assert running.line() == f"ready worker={app} groups={topic} core={CORE_NAME}"
        send(server, topic, 1)
        running.until("begun 1")
        running.stop(number)
        (tmp_path / "go").touch()
        running.until("done 1")
        assert running.process.wait(DEADLINE_S) == 0
        assert "Traceback" not in running.log
    assert lag(server, topic) == 0


def test_a_second_signal_ends_it(server: Standalone, tmp_path: Path, topic: str) -> None:
    write_app(tmp_path, topic)
    with working(tmp_path, server.nameserver, "app:bill") as running:
        running.line()
        send(server, topic, 1)
        running.until("begun 1")
        running.stop()
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(DEADLINE_S) == -signal.SIGTERM
        assert running.line() == ""


@pytest.mark.parametrize("options", [[], ["--processes", "2"]])
@pytest.mark.parametrize("app", ["app:awaited", "app:blocked"])
def test_a_function_may_end_it(
    server: Standalone, tmp_path: Path, topic: str, app: str, options: list[str]
) -> None:
    write_app(tmp_path, topic)
    with working(tmp_path, server.nameserver, app, *options) as running:
        running.line()
        ended = set[str]()
        while len(ended) < (2 if options else 1):
            send(server, topic, *range(4))
            text, _, pid = running.line().split()
            if text == "closing":
                ended.add(pid)
        assert running.process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize(
    ("app", "code", "error"),
    [
        ("missing", 2, "turbopump: no module 'missing'"),
        ("app:missing", 2, "turbopump: app has no 'missing'; use app:"),
        ("app:say", 2, "turbopump: app:say must be a turbopump.Worker"),
        (
            "broken",
            1,
            "turbopump: cannot import broken:\nTraceback (most recent call last):\n  File",
        ),
    ],
)
@pytest.mark.parametrize("options", [[], ["--processes", "3"]])
def test_what_cannot_start_is_reported_once(
    tmp_path: Path, app: str, code: int, error: str, options: list[str]
) -> None:
    write_app(tmp_path, "T")
    (tmp_path / "broken.py").write_text("1 / 0")
    with working(tmp_path, "127.0.0.1:1", app, *options) as running:
        assert running.process.wait(DEADLINE_S) == code
        assert running.line() == ""
        assert running.log.count(error) == 1, running.log
        assert "worker_process" not in running.log


# --- several processes ----------------------------------------------------------------------------


def test_processes_share_the_messages_and_a_dead_one_is_replaced(
    server: Standalone, tmp_path: Path, topic: str
) -> None:
    write_app(tmp_path, topic)
    options = ("app:blocking", "--processes", "2")
    with working(tmp_path, server.nameserver, *options) as running:
        assert (
            running.line()
            == f"ready worker=app:blocking groups={topic} core={CORE_NAME} processes=2"
        )
        first, second = running.children()
        seen = set[int]()
        while seen != {first, second}:
            send(server, topic, 0)
            seen.add(running.until("done 0"))
        os.kill(second, signal.SIGKILL)
        wait_for(lambda: "worker process 2 exited with -9" in running.log, DEADLINE_S)
        wait_for(lambda: len(running.children()) == 2, DEADLINE_S)
        assert first in running.children()
        (third,) = {*running.children()} - {first}
        while third not in seen:
            send(server, topic, 0)
            seen.add(running.until("done 0"))
        send(server, topic, 1)
        running.until("begun 1")
        running.stop()
        (tmp_path / "go").touch()
        running.until("done 1")
        assert running.process.wait(DEADLINE_S) == 0
        assert not any(map(is_running, seen))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_all_processes(
    server: Standalone, tmp_path: Path, topic: str, number: signal.Signals
) -> None:
    write_app(tmp_path, topic)
    with working(tmp_path, server.nameserver, "app:bill", "--processes", "2") as running:
        running.line()
        send(server, topic, 1)
        running.until("begun 1")
        pids = running.children()
        running.stop(number)
        running.process.send_signal(number)
        assert running.process.wait(DEADLINE_S) == -number
        wait_for(lambda: not any(map(is_running, pids)), DEADLINE_S)
        assert running.line() == ""


def test_processes_stop_when_their_parent_is_killed(
    server: Standalone, tmp_path: Path, topic: str
) -> None:
    write_app(tmp_path, topic)
    with working(tmp_path, server.nameserver, "app:bill", "--processes", "2") as running:
        running.line()
        send(server, topic, 1)
        running.until("begun 1")
        pids = running.children()
        running.process.kill()
        (tmp_path / "go").touch()
        running.until("done 1")
        wait_for(lambda: not any(map(is_running, pids)), DEADLINE_S)
    assert lag(server, topic) == 0


# --- reloading ------------------------------------------------------------------------------------


def test_changed_files_are_reloaded(server: Standalone, tmp_path: Path, topic: str) -> None:
    write_app(tmp_path, topic)
    with working(tmp_path, server.nameserver, "app:bill", "--reload") as running:
        running.line()
        send(server, topic, 0)
        running.until("done 0")
        write_app(tmp_path, topic, "1 / 0")
        wait_for(lambda: "waiting for a change" in running.log, DEADLINE_S)
        assert "restarting: app.py changed" in running.log
        assert "ZeroDivisionError" in running.log
        write_app(tmp_path, topic, APP.replace("done", "ended"))
        assert (
            running.line() == f"ready worker=app:bill groups={topic} core={CORE_NAME} processes=1"
        )
        send(server, topic, 0)
        running.until("ended 0")
        running.process.terminate()
        assert running.process.wait(DEADLINE_S) == 0
    assert lag(server, topic) == 0


def test_a_broken_application_that_is_watched_can_be_stopped(tmp_path: Path) -> None:
    write_app(tmp_path, "T", "1 / 0")
    with working(tmp_path, "127.0.0.1:1", "app", "--reload") as running:
        wait_for(lambda: "waiting for a change" in running.log, DEADLINE_S)
        running.process.terminate()
        assert running.process.wait(DEADLINE_S) == 0
