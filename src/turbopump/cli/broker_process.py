"""Brokers as processes of their own, started and kept running by ``standalone --brokers``.

``python -m turbopump.cli.broker_process`` is one of them. It reads a `BrokerJob` as a line of JSON
from standard input, prints its ``ready`` line, and ends when its standard input does: when the
process that started it stops, or is killed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import typer

from turbopump.cli.administration import reported
from turbopump.cli.life_cycle import ready_line, serve
from turbopump.cli.logs import LogFormat, LogLevel, LogSettings
from turbopump.errors import ServerFailed
from turbopump.machine.child_process import wait_or_kill
from turbopump.supervisor import Supervisor
from turbopump.timeouts import timeout

_START_S = 60.0
"""A store that was not closed is checked first."""
_END_S = 10.0
"""Brokers stop within two seconds; one that hangs for longer than this is killed."""
_READY = "ready broker="


class BrokerJob(msgspec.Struct, frozen=True):
    """What a broker process gets from its parent."""

    settings: dict[str, str]
    log_level: LogLevel
    log_format: LogFormat
    config_path: Path | None = None


class _BrokerProcess:
    """One broker; restarted at the same address after it has died."""

    def __init__(self, number: int, job: BrokerJob) -> None:
        self._number = number
        self._job = job
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Its address, after the first start."""

    @property
    def name(self) -> str:
        return f"broker process {self._number}"

    async def run(self) -> None:
        """Run it until it ends; only a start that fails before any other has succeeded returns."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # A signal from the terminal goes to the parent only, which stops this one in its turn.
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(self._job) + b"\n")
            async with timeout(_START_S):
                line = (await process.stdout.readline()).decode().strip()
            self._started(_address(line))
            code = await process.wait()
        except TimeoutError:
            self._started(None)
            code = None
        finally:
            # Without its input it stops.
            process.stdin.close()
            await wait_or_kill(process, _END_S)
        how = f"exited with {code}" if code is not None else f"was not ready after {_START_S:.0f} s"
        failure = ServerFailed(f"{self.name} {how}; see its log above")
        if self.ready.done():
            raise failure
        self.ready.set_exception(failure)

    def _started(self, address: str | None) -> None:
        if address is None or self.ready.done():
            return
        self.ready.set_result(address)
        if self._job.settings.get("listenPort") == "0":
            # Clients know the port that was picked; beside it there was no VIP port.
            same = {"listenPort": address.rpartition(":")[2], "vipChannelEnable": "false"}
            self._job = msgspec.structs.replace(self._job, settings={**self._job.settings, **same})


def _address(line: str) -> str | None:
    """Return the address of a ``ready`` line; None if it is none."""
    return line.removeprefix(_READY).split()[0] if line.startswith(_READY) else None


@asynccontextmanager
async def broker_processes(jobs: Sequence[BrokerJob]) -> AsyncIterator[list[str]]:
    """Run brokers until the context ends; yields their addresses when all accept connections."""
    supervisor = Supervisor()
    processes = [_BrokerProcess(number, job) for number, job in enumerate(jobs, 1)]
    try:
        for process in processes:
            supervisor.keep(process.name, process.run)
        yield list(await asyncio.gather(*(process.ready for process in processes)))
    finally:
        await supervisor.stop()


def main() -> None:
    """Run the broker of the job on standard input."""
    from turbopump.broker.config_keys import parse
    from turbopump.broker.replicated import ReplicatedBroker
    from turbopump.net.sockets import SocketNetwork

    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=BrokerJob)
    with reported():
        config = parse(job.settings)
        serve(
            ReplicatedBroker(config, SocketNetwork(), config_path=job.config_path),
            lambda running: ready_line(broker=running.address),
            log=LogSettings(job.log_level, job.log_format),
            directory=config.directory,
            ends_with_input=True,
        )


if __name__ == "__main__":
    try:
        main()
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
