"""Running a worker: in this process, or in several that are restarted and reloaded.

``python -m turbopump.cli.worker_process JOB CHANNEL`` is one of several. The channel is a socket to
the process that has started it: it sends its ``ready`` line there, and stops when the other end is
closed, as it is when that process is killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec
import typer

from turbopump.cli.administration import FAILED, NAMESERVER, reported
from turbopump.cli.life_cycle import log_core, ready_line
from turbopump.cli.logs import LogSettings, configure_logging
from turbopump.cli.options import NAMESERVER_VARIABLE
from turbopump.cli.source_files import SourceFiles, State
from turbopump.cli.worker_app import AnyWorker, load
from turbopump.client.blocking import Worker as BlockingWorker
from turbopump.client.life_cycle import stop_signals
from turbopump.errors import ServerFailed
from turbopump.net.loop import run
from turbopump.supervisor import Supervisor
from turbopump.timeouts import timeout

_log = logging.getLogger("turbopump.cli.worker")

_POLL_S = 0.5
"""How often files are compared."""


class WorkerJob(msgspec.Struct, frozen=True):
    """What a worker process is to run."""

    app: str
    nameserver: str | None
    log: LogSettings


# --- one process ----------------------------------------------------------------------------------


def run_worker(job: WorkerJob, channel: socket.socket | None = None) -> None:
    """Import an application and consume with its functions until a signal.

    With a channel, the ``ready`` line goes there, and its end stops the worker too.
    """
    configure_logging(job.log)
    log_core()
    # For workers without an address, and for other clients of the application.
    if job.nameserver is not None:
        os.environ[NAMESERVER_VARIABLE] = job.nameserver
    elif not os.environ.get(NAMESERVER_VARIABLE):
        os.environ[NAMESERVER_VARIABLE] = NAMESERVER
    worker = load(job.app, job.nameserver)
    line = ready_line(worker=job.app, groups=",".join(worker.groups))
    run(_consume(worker, line, channel))


async def _consume(worker: AnyWorker, line: str, channel: socket.socket | None) -> None:
    running = _InThreads(worker) if isinstance(worker, BlockingWorker) else worker
    with _stop_event() as stop:
        if channel is not None:
            _set_at_end_of(channel, stop)
        await running.start()
        ended = asyncio.create_task(running.wait(handle_signals=False))
        # A function may close the worker.
        ended.add_done_callback(lambda _: stop.set())
        try:
            if channel is None:
                typer.echo(line)
            else:
                with suppress(BrokenPipeError):
                    # Without the reader, the end of the channel stops the worker.
                    channel.sendall(f"{line}\n".encode())
            await stop.wait()
            if not ended.done():
                _log.info("stopping when running calls have finished; a second signal ends them")
        finally:
            await running.close()
            await ended


class _InThreads:
    """A blocking worker, started and closed without blocking the event loop."""

    def __init__(self, worker: BlockingWorker) -> None:
        self._worker = worker

    async def start(self) -> None:
        await asyncio.to_thread(self._worker.start)

    async def wait(self, *, handle_signals: bool) -> None:
        await asyncio.to_thread(self._worker.wait, handle_signals=handle_signals)

    async def close(self) -> None:
        await asyncio.to_thread(self._worker.close)


@contextmanager
def _stop_event(kill: Callable[[], object] = lambda: None) -> Iterator[asyncio.Event]:
    """Set the event at the first signal; a second one ends the process, after ``kill``."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    with stop_signals(partial(loop.call_soon_threadsafe, stop.set), kill):
        yield stop


def _set_at_end_of(channel: socket.socket, stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def end() -> None:
        loop.remove_reader(channel)
        stop.set()

    loop.add_reader(channel, end)


# --- several processes ----------------------------------------------------------------------------


def run_workers(job: WorkerJob, count: int, watched: Path | None = None) -> None:
    """Run processes with the same functions until a signal, or until all have ended.

    One that dies is started again, after a growing pause. With a directory to watch, all are
    restarted when its Python files change; without, typer.Exit is raised if they cannot start.
    """
    configure_logging(job.log)
    files = None if watched is None else SourceFiles(watched)
    run(_Workers(job, count, files).run())


class _Workers:
    """Worker processes with the same functions."""

    def __init__(self, job: WorkerJob, count: int, files: SourceFiles | None) -> None:
        self._job = job
        self._count = count
        self._files = files
        self._processes: list[_WorkerProcess] = []

    async def run(self) -> None:
        with _stop_event(self._kill) as stop:
            while not stop.is_set() and await self._run_until(stop):
                pass

    async def _run_until(self, stop: asyncio.Event) -> bool:
        """Run processes until they have ended or are to; return whether to start them again."""
        # Before the processes import them.
        states = {} if self._files is None else self._files.states()
        consuming = asyncio.create_task(self._consume())
        interrupted = asyncio.create_task(self._interrupted(stop, states))
        try:
            await asyncio.wait({consuming, interrupted}, return_when=asyncio.FIRST_COMPLETED)
            if not interrupted.done():
                if self._files is None or consuming.exception() is None:
                    await consuming
                    return False
                _log.warning("waiting for a change of a Python file")
            return await interrupted
        finally:
            for task in (consuming, interrupted):
                task.cancel()
            await asyncio.gather(consuming, interrupted, return_exceptions=True)

    async def _interrupted(self, stop: asyncio.Event, states: dict[str, State]) -> bool:
        """Wait for a signal or for changed files; return whether files have changed."""
        if self._files is None:
            await stop.wait()
        while not stop.is_set():
            assert self._files is not None
            if changed := self._files.changed_since(states):
                _log.info("restarting: %s changed", ", ".join(changed))
                return True
            with suppress(TimeoutError):
                async with timeout(_POLL_S):
                    await stop.wait()
        return False

    async def _consume(self) -> None:
        """Start processes; return when all have ended by themselves."""
        supervisor = Supervisor()
        self._processes = [
            _WorkerProcess(number, self._job) for number in range(1, self._count + 1)
        ]
        first, *others = self._processes
        try:
            supervisor.keep(first.name, first.run)
            # Alone, so that a fault of the application is reported once.
            line = await first.ready
            for each in others:
                supervisor.keep(each.name, each.run)
            await asyncio.gather(*(each.ready for each in others))
            typer.echo(f"{line} processes={self._count}")
            await supervisor.wait()
        finally:
            await supervisor.stop()

    def _kill(self) -> None:
        for each in self._processes:
            each.kill()


class _WorkerProcess:
    """One process; `Supervisor.keep` runs it again after it has died."""

    def __init__(self, number: int, job: WorkerJob) -> None:
        self.name = f"worker process {number}"
        self._job = job
        self._process: asyncio.subprocess.Process | None = None
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Its ``ready`` line, after the first start; or why that failed."""

    async def run(self) -> None:
        """Run it until it ends by itself, or its first start fails; raises ServerFailed later."""
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        is_ready, code = False, None
        try:
            with theirs:
                self._process = await self._started(theirs)
            if line := (await reader.readline()).decode().strip():
                is_ready = True
                if not self.ready.done():
                    self.ready.set_result(line)
            code = await self._process.wait()
        finally:
            await self._stop(writer, is_ready=is_ready)
        if is_ready and code == 0:
            # A function has closed the worker.
            return
        failure = ServerFailed(f"{self.name} exited with {code}; see its log above")
        if self.ready.done():
            raise failure
        # A code that is not negative comes with the reason, which it has printed.
        self.ready.set_exception(typer.Exit(code or FAILED) if code >= 0 else failure)

    async def _started(self, channel: socket.socket) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__),
            *(msgspec.json.encode(self._job).decode(), str(channel.fileno())),
            pass_fds=[channel.fileno()],
            stdin=asyncio.subprocess.DEVNULL,
            # A signal from the terminal goes to the parent only, which stops this one in its turn.
            start_new_session=True,
        )

    async def _stop(self, writer: asyncio.StreamWriter, *, is_ready: bool) -> None:
        """Let it stop, and wait for that: its functions may run for as long as they are allowed."""
        # Without its channel it stops.
        writer.close()
        if self._process is not None:
            if not is_ready and self._process.returncode is None:
                # An import may take long, and has nothing to finish.
                self._process.terminate()
            await self._process.wait()

    def kill(self) -> None:
        """End it now; may be called by a signal handler."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)


def main() -> None:
    """Run the job of the first argument, with the channel of the second."""
    job, descriptor = sys.argv[1:]
    with socket.socket(fileno=int(descriptor)) as channel, reported():
        # Not for the processes that the application starts.
        channel.set_inheritable(False)
        run_worker(msgspec.json.decode(job, type=WorkerJob), channel)


if __name__ == "__main__":
    try:
        main()
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
