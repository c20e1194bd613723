"""What the commands on Spark share: starting it, stopping in order, and printing reports."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from turbopump.cli.formats import parse_pairs
from turbopump.cli.options import option
from turbopump.cli.output import Column, Output
from turbopump.errors import InvalidArgument, MissingPackage, SparkError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from turbopump.spark.pipelines.progress import Watch
    from turbopump.spark.pipelines.reports import Report, Table

MasterOption: TypeAlias = Annotated[
    str, typer.Option(metavar="MASTER", help="Where Spark runs: local[N], spark://HOST:PORT, yarn.")
]
ConfOption: TypeAlias = Annotated[
    list[str] | None, option("A setting of Spark; can be repeated.", "--conf", metavar="NAME=VALUE")
]

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NOISY = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
"""Loggers by which PySpark prints pages of JSON about errors that are reported anyway."""


@dataclass(frozen=True, slots=True)
class Run:
    """A pipeline that is about to run: on which Spark, watched how, and stopped by what."""

    spark: SparkSession
    watch: Watch
    stop: threading.Event


@contextmanager
def spark_run(title: str, master: str, conf: Sequence[str] | None) -> Iterator[Run]:
    """Start Spark, show progress on stderr, and end in order at the first signal."""
    settings = parse_pairs(conf or (), "--conf")
    if find_spec("pyspark") is None:
        raise MissingPackage.of_extra("spark", "pipelines need PySpark")
    _check_master(master)
    from turbopump.spark.pipelines.progress import Step, shown

    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    with shown() as watch:
        watch(Step("starting Spark"))
        spark = _started(f"turbopump pipeline {title}", master, settings)
        try:
            with _stop_event() as stop:
                yield Run(spark, watch, stop)
        finally:
            spark.stop()


def _check_master(master: str) -> None:
    from turbopump.spark.session_builder import require_master

    if master.startswith("sc:"):
        raise InvalidArgument(
            "--master must be local[N], spark://HOST:PORT or another master, got "
            f"{master!r}: pipelines need Spark's driver in their own process, which Spark Connect "
            "does not have"
        )
    require_master(master)


def _started(app_name: str, master: str, settings: Mapping[str, str]) -> SparkSession:
    """Start Spark; what it says in pages of Java if it cannot becomes one line."""
    from py4j.protocol import Py4JError, Py4JJavaError
    from pyspark.errors import PySparkException

    from turbopump.spark.pipelines.spark_errors import first_line
    from turbopump.spark.session_builder import session

    try:
        return session(app_name, master=master, settings=settings)
    except (Py4JError, PySparkException) as error:
        said = error.java_exception.toString() if isinstance(error, Py4JJavaError) else str(error)
        raise SparkError(
            f"Spark does not start with master {master!r}: {first_line(said)}"
        ) from error


def print_report(report: Report, *, as_json: bool) -> None:
    """Print everything as one JSON object, or as tables."""
    from turbopump.spark.pipelines.reports import as_json as json_of

    if as_json:
        typer.echo(json_of(report))
        return
    for number, table in enumerate(report.tables()):
        if number:
            typer.echo()
        if table.title:
            typer.echo(table.title)
        _print_table(table)


def _print_table(table: Table) -> None:
    keys = [str(number) for number in range(len(table.columns))]
    rows = [dict(zip(keys, map(_cell_value, row), strict=True)) for row in table.rows]
    if table.is_facts:
        # Each row has a kind of its own.
        for row in table.rows:
            kind = _kind([row[1]])
            typer.echo(f"  {row[0]!s:<36}{Column('1', '', kind).text({'1': _cell_value(row[1])})}")
        return
    columns = [
        Column(key, title.upper(), _kind([row[number] for row in table.rows]))
        for number, (key, title) in enumerate(zip(keys, table.columns, strict=True))
    ]
    Output(as_json=False).rows(rows, columns, nothing="  nothing")


def _kind(cells: Sequence[object]) -> str:
    there = [cell for cell in cells if cell is not None]
    if there and all(isinstance(cell, datetime) for cell in there):
        return "time"
    is_number = there and all(isinstance(cell, int | float) for cell in there)
    return "number" if is_number else "text"


def _cell_value(cell: object) -> Any:
    return round(cell.timestamp() * 1000) if isinstance(cell, datetime) else cell


@contextmanager
def _stop_event() -> Iterator[threading.Event]:
    """Set the event at the first signal; a second one kills the process."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - Python gives both
        stop.set()
        sys.stderr.write(
            "stopping after the current batch; press Ctrl-C again to stop immediately\n"
        )
        for each in _STOP_SIGNALS:
            signal.signal(each, signal.SIG_DFL)

    # Spark has set a handler of its own by now, which would cancel the batch.
    before = {number: signal.signal(number, on_signal) for number in _STOP_SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
