"""Servers as separate processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STOP_S = 60.0
"""Long enough for a busy machine."""

LOG = "log"

_READY = re.compile(r"ready nameserver=(\S+) broker=(\S+) core=(?:plain|compiled)\n")


@dataclass(frozen=True, slots=True)
class Standalone:
    """A running name server and broker."""

    process: subprocess.Popen[str]
    nameserver: str
    broker: str
    log: Path

    @property
    def ports(self) -> tuple[str, str]:
        """The ports that a replacement has to listen on."""
        return self.nameserver.rpartition(":")[2], self.broker.rpartition(":")[2]

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def launched(
    directory: Path,
    settings: Mapping[str, str] | None = None,
    ports: tuple[str, str] = ("0", "0"),
) -> Iterator[subprocess.Popen[str]]:
    """Start ``turbopump standalone`` with its data, settings and log in a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "broker.conf"
    config.write_text("".join(f"{key}={value}\n" for key, value in (settings or {}).items()))
    options = ["--nameserver-port", ports[0], "--broker-port", ports[1], "--config", str(config)]
    command = [sys.executable, "-m", "turbopump", "standalone", "--dir", str(directory), *options]
    with (
        (directory / LOG).open("a") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "HOME": str(directory)},
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            finally:
                process.kill()


@contextmanager
def standalone(
    directory: Path,
    settings: Mapping[str, str] | None = None,
    ports: tuple[str, str] = ("0", "0"),
) -> Iterator[Standalone]:
    """Start ``turbopump standalone``, and wait until it is ready."""
    log = directory / LOG
    with launched(directory, settings, ports) as process:
        assert process.stdout is not None
        ready = _READY.fullmatch(process.stdout.readline())
        assert ready is not None, log.read_text()
        yield Standalone(process, ready[1], ready[2], log)
