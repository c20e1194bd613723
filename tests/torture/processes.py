"""The processes of a run: each started in its own process group, and always cleaned up."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

STOP_S = 30.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
_HERE = Path(__file__).parent.parent


class NotReady(Exception):
    """A process did not report readiness; ``text`` is its output."""

    def __init__(self, name: str, returncode: int | None, text: str) -> None:
        ended = "is still running" if returncode is None else f"exited with {returncode}"
        super().__init__(f"{name} did not become ready and {ended}: {text[-2000:]}")
        self.returncode = returncode
        self.text = text


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Usage:
    """The resource usage of a process at one time."""

    rss_bytes: int
    threads: int
    files: int


class Process:
    """One process, with stderr in its own file."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log: Path, log_from: int) -> None:
        self.name = name
        self._popen = popen
        self._log = log
        self._log_from = log_from

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        return self._popen.poll()

    def log_text(self) -> str:
        """Return what this process wrote to stderr."""
        with self._log.open("rb") as file:
            file.seek(self._log_from)
            return file.read().decode(errors="replace")

    def ready_line(self, wait_s: float) -> str:
        """Wait for the first line on stdout; raises `NotReady`."""
        assert self._popen.stdout is not None
        found, end = b"", time.monotonic() + wait_s
        while not found.endswith(b"\n"):
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._popen.stdout], [], [], left)[0]:
                break
            piece = os.read(self._popen.stdout.fileno(), 4096)
            if not piece:
                self._popen.wait(STOP_S)
                break
            found += piece
        if not found.endswith(b"\n"):
            raise NotReady(self.name, self.returncode, found.decode() + self.log_text())
        return found.decode().strip()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process and its children with SIGKILL."""
        if self.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()
        if self._popen.stdout is not None:
            self._popen.stdout.close()

    def wait(self, wait_s: float = STOP_S) -> int | None:
        """Return the exit code, or None if the process does not exit in time."""
        try:
            return self._popen.wait(wait_s)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self, wait_s: float = STOP_S) -> int | None:
        """Ask the process to stop; return its exit code, or None if it had to be killed."""
        self.signal(signal.SIGTERM)
        code = self.wait(wait_s)
        self.kill()
        return code

    def usage(self) -> Usage | None:
        """Return the resource usage of the process, or None if it has exited."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
            files = len(os.listdir(f"/proc/{self.pid}/fd"))  # noqa: PTH208 - the count is enough
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return None
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        if "VmRSS" not in fields:
            return None
        return Usage(int(fields["VmRSS"].split()[0]) * 1024, int(fields["Threads"]), files)


class Processes:
    """All processes of a scenario; leaving the context ends them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._started: list[Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in reversed(self._started):
            process.kill()

    def python(
        self, name: str, module: str, arguments: Sequence[str], env: Mapping[str, str] | None = None
    ) -> Process:
        """Start ``python -m module arguments``."""
        log = self.directory / f"{name}.log"
        own = {
            "HOME": str(self.directory),
            "PYTHONPATH": str(_HERE),
            # Shows where a fatal signal, such as SIGBUS, came from.
            "PYTHONFAULTHANDLER": "1",
        }
        env = {**os.environ, **own, **(env or {})}
        with log.open("ab") as errors:
            start = errors.tell()
            popen = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=self.directory,
                env=env,
                start_new_session=True,
                # In case the run itself is killed. Safe, as no thread is started here.
                preexec_fn=_die_with_parent,
            )
        process = Process(name, popen, log, start)
        self._started.append(process)
        return process

    def turbopump(self, name: str, *arguments: str) -> Process:
        """Start ``turbopump`` with these arguments."""
        return self.python(name, "turbopump", arguments)
