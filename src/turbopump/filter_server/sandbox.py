"""One code filter in a process without rights (`child`), monitored from outside."""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import mmap
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from turbopump.filter_server import child
from turbopump.filters.server_config import CodeLimits
from turbopump.timeouts import timeout
from turbopump.wire.record import MessageView

_SCRIPT = Path(child.__file__)
_FIELDS = attrgetter(*child.Message._fields)
"""What a filter is given of a message."""
_END_MS = 1000
_UNREAD_BYTES_MAX = 16 * 1024
"""Largest reply of a filter; more than any valid one."""
_CPU_CLOCK = 2
_NS_PER_MS = 1_000_000
_BATCH_COUNT_MAX = 64
_BATCH_MS = 100
"""CPU time for a batch, by the speed of the last one: queues take turns in one process."""


@dataclass(frozen=True, slots=True)
class _Allowance:
    """How long a filter may take for a step, and which setting to change if that is too short."""

    what: str
    cpu_ms: int
    time_ms: int
    remedy: str = ""
    waiting_ms: int | None = None
    """How long it may use no CPU time at all, although other processes get some meanwhile."""


_LOADING = _Allowance("to load", 2000, 60_000, ": do less outside of functions", 5000)
"""Includes the start of the interpreter. One that waits keeps other filters from being loaded."""


class FilterRefused(Exception):
    """The source is no filter, or cannot be run here; the text says why."""


class FilterStopped(Exception):
    """The filter broke a limit or exited, and its process is gone."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Which messages of a batch match, up to the first that the filter failed on."""

    matched: Sequence[bool]
    failure: str | None = None
    """What the filter raised for the message after these."""


class Sandbox:
    """Runs one filter: `start`, `decide` batch after batch, `close`."""

    def __init__(
        self, process: asyncio.subprocess.Process, progress: mmap.mmap, limits: CodeLimits
    ) -> None:
        self._process = process
        self._progress = progress
        self._limits = limits
        self._busy = asyncio.Lock()
        self._stopped: FilterStopped | None = None
        self._ending = asyncio.Lock()
        self._reply: asyncio.Future[tuple[bytes, bytes, str]] | None = None
        self._idle_since_cpu_ns = 0
        """The CPU time that it had used when it sent its last reply."""
        self.batch_count = 1
        """How many messages to pass in one batch."""

    @classmethod
    async def start(cls, source: bytes, limits: CodeLimits) -> Sandbox:
        """Start the process and have it load the source; raises FilterRefused, FilterStopped."""
        if not hasattr(os, "memfd_create"):
            raise FilterRefused(f"code filters need Linux with seccomp, this is {sys.platform}")
        file = os.memfd_create("filter-progress")
        try:
            os.ftruncate(file, mmap.PAGESIZE)
            progress = mmap.mmap(file, mmap.PAGESIZE)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-B", str(_SCRIPT)),
                *(str(limits.memory_bytes_max), str(file), str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                pass_fds=(file,),
                env={},
                cwd="/",
                limit=_UNREAD_BYTES_MAX,
            )
        finally:
            os.close(file)
        sandbox = cls(process, progress, limits)
        try:
            await sandbox._load(source)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    @property
    def is_running(self) -> bool:
        return self._stopped is None and self._process.returncode is None

    async def decide(self, messages: Sequence[MessageView]) -> Verdicts:
        """Return which messages match; raises FilterStopped, RecordError for a damaged body."""
        frame = marshal.dumps(list(map(_FIELDS, messages)))
        # To its end, even if the subscriber leaves: others wait for the same process.
        return await asyncio.shield(asyncio.ensure_future(self._decide(frame, len(messages))))

    async def _decide(self, frame: bytes, count: int) -> Verdicts:
        async with self._busy:
            if self._stopped is not None:
                raise self._stopped
            limits = self._limits
            allowance = _Allowance(
                "for one message",
                limits.cpu_ms_max,
                limits.time_ms_max,
                ": make it faster, or raise filterCodeCpuTimePerMessage or"
                " filterCodeTimePerMessage",
            )
            before_ns = self._idle_since_cpu_ns
            kind, verdicts, text = await self._ask(frame, count, allowance)
            ns_per_message = (self._idle_since_cpu_ns - before_ns) // (len(verdicts) + 1)
            fitting = _BATCH_MS * _NS_PER_MS // max(1, ns_per_message)
            self.batch_count = min(max(1, fitting), _BATCH_COUNT_MAX)
            if kind == child.OUT_OF_MEMORY:
                raise await self._stop(self._memory_text())
            is_whole = len(verdicts) == count
            is_valid = max(verdicts, default=0) <= 1 and is_whole == (kind == child.DECIDED)
            if kind not in (child.DECIDED, child.RAISED) or not is_valid:
                raise await self._stop("it wrote to its reply pipe")
            return Verdicts([byte == 1 for byte in verdicts], text or None)

    async def check_idle(self) -> None:
        """Stop a process that uses CPU while idle; raises FilterStopped."""
        if self._busy.locked() or not self.is_running:
            return
        used_ms = (_cpu_ns(self._process.pid) - self._idle_since_cpu_ns) // _NS_PER_MS
        if used_ms > self._limits.cpu_ms_max:
            text = f"it used {used_ms} ms of processor time while there was no message to decide"
            raise await self._stop(text)

    async def close(self) -> None:
        """End the process, whatever its state."""
        await self._stop("it was closed")
        with contextlib.suppress(BufferError, ValueError):
            self._progress.close()

    # --- inside -----------------------------------------------------------------------------------

    async def _load(self, source: bytes) -> None:
        kind, _, text = await self._ask(source, 0, _LOADING)
        if kind == child.OUT_OF_MEMORY:
            raise await self._stop(self._memory_text())
        if kind != child.LOADED:
            raise FilterRefused(text or "it wrote to its reply pipe")

    async def _ask(self, frame: bytes, count: int, allowed: _Allowance) -> tuple[bytes, bytes, str]:
        """Send a frame and return the reply; kill the process if a message takes too long."""
        child.PROGRESS.pack_into(self._progress, 0, 0)
        meter = _Meter(self._process.pid, self._progress, count)
        self._reply = reply = asyncio.ensure_future(self._exchange(frame))
        # The missing reply of a killed process is not reported.
        reply.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            interval_s = min(allowed.cpu_ms, allowed.time_ms) / 2000
            while not (await asyncio.wait([reply], timeout=interval_s))[0]:
                excess = meter.excess(allowed)
                if excess is not None:
                    raise await self._stop(excess)
            if reply.cancelled():
                raise await self._stop("it was closed")
            self._idle_since_cpu_ns = _cpu_ns(self._process.pid)
            return reply.result()
        except (EOFError, OSError) as error:
            raise await self._stop(await self._end_text()) from error
        finally:
            if not reply.done():
                # The rest of the reply would be read as the next one.
                await self._stop("it was interrupted")

    async def _exchange(self, frame: bytes) -> tuple[bytes, bytes, str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # In one write: each write may wake the process.
        self._process.stdin.write(child.LENGTH.pack(len(frame)) + frame)
        await self._process.stdin.drain()
        read = self._process.stdout.readexactly
        kind, count, length = child.REPLY.unpack(await read(child.REPLY.size))
        if max(count, length) > len(frame) + child.TEXT_BYTES_MAX:
            # More than a valid child sends; `decide` refuses what is left of it.
            return b"", b"", ""
        verdicts, text = await read(count), await read(length)
        return kind, verdicts, text.decode(errors="replace")

    async def _stop(self, reason: str) -> FilterStopped:
        if self._stopped is None:
            self._stopped = FilterStopped(reason)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        if self._reply is not None and not self._reply.done():
            self._reply.cancel()
            await asyncio.wait([self._reply])
        assert self._process.stdout is not None
        async with self._ending:
            # The end of a process is reported only after all that it has sent was read.
            while await self._process.stdout.read(_UNREAD_BYTES_MAX):
                pass
            await self._process.wait()
        return self._stopped

    async def _end_text(self) -> str:
        """Return how the process ended, or is about to end."""
        with contextlib.suppress(TimeoutError):
            async with timeout(_END_MS / 1000):
                await self._process.wait()
        code = self._process.returncode
        if code is None:
            return "it closed its pipes"
        if code < 0:
            return f"it ended by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"

    def _memory_text(self) -> str:
        most = self._limits.memory_bytes_max
        text = f"it needs more than {most} bytes of memory, the interpreter included"
        return f"{text}: keep less in memory, or raise filterCodeMemoryMax"


class _Meter:
    """What one message has used, measured from outside; the filter cannot reset it."""

    def __init__(self, pid: int, progress: mmap.mmap, count: int) -> None:
        self._pid = pid
        self._progress = progress
        self._count = count
        self._at = 0
        self._last_cpu_ns, self._worked_ns = 0, time.monotonic_ns()
        self._begin()

    def excess(self, allowed: _Allowance) -> str | None:
        """Return which limit the current message has exceeded, or None."""
        (at,) = child.PROGRESS.unpack_from(self._progress, 0)
        # A filter can forge its progress, but gains no more than each message may take anyway.
        if self._at < at <= self._count:
            self._at = at
            self._begin()
        now_ns, cpu_ns = time.monotonic_ns(), _cpu_ns(self._pid)
        if cpu_ns != self._last_cpu_ns:
            self._last_cpu_ns, self._worked_ns = cpu_ns, now_ns
        waited_ms = (now_ns - self._worked_ns) // _NS_PER_MS
        if allowed.waiting_ms is not None and waited_ms > allowed.waiting_ms:
            return f"it blocked for {waited_ms} ms {allowed.what}: filters must not wait"
        cpu_ms = (cpu_ns - self._began_cpu_ns) // _NS_PER_MS
        if cpu_ms > allowed.cpu_ms:
            took = f"it used {cpu_ms} ms of processor time {allowed.what}"
            return f"{took}, the limit is {allowed.cpu_ms} ms{allowed.remedy}"
        time_ms = (now_ns - self._began_ns) // _NS_PER_MS
        if time_ms > allowed.time_ms:
            took = f"it took {time_ms} ms {allowed.what}"
            return f"{took}, the limit is {allowed.time_ms} ms{allowed.remedy}"
        return None

    def _begin(self) -> None:
        self._began_cpu_ns, self._began_ns = _cpu_ns(self._pid), time.monotonic_ns()


def _cpu_ns(pid: int) -> int:
    """Return the CPU time that a process has used."""
    try:
        # Linux derives the clock of a process from its id (clock_getcpuclockid(3)).
        return time.clock_gettime_ns(~pid << 3 | _CPU_CLOCK)
    except OSError:
        # It has just ended, which its pipe reports.
        return 0
