"""``turbopump worker``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from turbopump.cli.administration import NAMESERVER, reported
from turbopump.cli.logs import LogFormat, LogLevel, LogSettings
from turbopump.cli.options import (
    NAMESERVER_VARIABLE,
    LogFormatOption,
    LogLevelOption,
    option,
)

PROCESSES_MAX = 256


def worker(
    app: Annotated[
        str,
        typer.Argument(
            metavar="APP",
            help="A module with decorated functions, or module:name of a function or Worker.",
            show_default=False,
        ),
    ],
    nameserver: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT;...",
            help="Addresses of the name servers, or the URL that returns them, instead of the"
            " Worker's own.",
            show_default=f"{NAMESERVER_VARIABLE}, or {NAMESERVER}",
        ),
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, max=PROCESSES_MAX, help="Processes that share the messages.")
    ] = 1,
    reload: Annotated[
        bool, option("Restart when a Python file in this directory changes.", "--reload")
    ] = False,
    log_level: LogLevelOption = LogLevel.INFO,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Consume with decorated functions: those of a module, or a Worker."""
    from turbopump.cli.worker_process import WorkerJob, run_worker, run_workers

    with reported():
        job = WorkerJob(app, nameserver, LogSettings(log_level, log_format))
        if processes == 1 and not reload:
            run_worker(job)
        else:
            run_workers(job, processes, Path.cwd() if reload else None)
