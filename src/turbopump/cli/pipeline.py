"""``turbopump pipeline``: the ready-made pipelines on Spark."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from math import ceil, inf
from pathlib import Path
from typing import Annotated

import typer

from turbopump.cli.administration import (
    NAMESERVER,
    AgainOption,
    DryRunOption,
    GroupArgument,
    JsonOption,
    NameServerOption,
    RedriveToOption,
    YesOption,
    administration,
    complete_group,
    complete_topic,
    confirm,
    destination,
    parse_times,
    reported,
)
from turbopump.cli.formats import parse_pairs
from turbopump.cli.options import option
from turbopump.cli.spark_runs import ConfOption, MasterOption, print_report, spark_run
from turbopump.errors import InvalidArgument

app = typer.Typer()

_MASTER = "local[*]"
_MIB = 1024 * 1024
_MIB_MAX = 1024**3
_SPEED_MIN = 0.001
_ANY = "*"

WhereOption = Annotated[
    str | None,
    option("Only messages that match, as \"tags = 'paid' AND size < 1000\".", metavar="SQL"),
]
SinceOption = Annotated[str | None, option("Only what was stored since.", metavar="TIME")]
UntilOption = Annotated[str | None, option("Only what was stored before.", metavar="TIME")]
RateOption = Annotated[float | None, option("At most N messages per second.", metavar="N")]
SourceOption = Annotated[
    list[str] | None,
    option("An option of the source; can be repeated.", "--option", metavar="NAME=VALUE"),
]
WindowOption = Annotated[
    str, typer.Option(metavar="DURATION", help="Length of a window, as '30 seconds'.")
]
PlotOption = Annotated[Path | None, option("Draw a PNG picture too.", metavar="FILE")]


@app.command()
def archive(
    topics: Annotated[
        list[str], typer.Argument(help="Topics to archive.", autocompletion=complete_topic)
    ],
    to: Annotated[str, typer.Option(metavar="DIR", help="Directory for the Parquet files.")],
    partition_by: Annotated[
        str, typer.Option(metavar="COLUMNS", help="Folders: columns of the source, date, hour.")
    ] = "topic,date",
    begin: Annotated[
        str, typer.Option("--from", metavar="POSITION", help="Where the first run begins.")
    ] = "earliest",
    group: Annotated[
        str | None,
        option("Commit progress to brokers under this name.", autocompletion=complete_group),
    ] = None,
    batch: Annotated[int | None, option("Messages in a batch at most.", metavar="N")] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Where progress is kept.", show_default="DIR/_checkpoint"),
    ] = None,
    every: Annotated[
        float | None,
        option(
            "Run forever with a batch every N seconds; otherwise stop when all is archived.",
            metavar="SECONDS",
        ),
    ] = None,
    compact: Annotated[bool, option("Merge small files afterwards.", "--compact")] = False,
    format: Annotated[  # noqa: A002 - the name of the option
        str, typer.Option(metavar="FORMAT", help="parquet, or delta for a Delta table.")
    ] = "parquet",
    option: SourceOption = None,
    master: MasterOption = _MASTER,
    conf: ConfOption = None,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Archive topics to Parquet files, each message once; the next run resumes there."""
    with reported():
        source = {
            "nameserver": nameserver,
            "topics": ",".join(topics),
            "startingOffsets": begin,
            **({"group": group} if group else {}),
            **({"maxOffsetsPerTrigger": str(batch)} if batch is not None else {}),
            **parse_pairs(option or (), "--option"),
        }
        _require_above_0("--every", every, most=threading.TIMEOUT_MAX)
        _require_above_0("--batch", batch)
        _require_format(format, compact=compact)
        with administration(nameserver) as admin:
            for topic in topics:
                admin.topics.route(topic)
        with spark_run("archive", master, conf) as run:
            from turbopump.spark import pipelines

            report = pipelines.archive(
                run.spark,
                to,
                source,
                partition_by=_names(partition_by),
                checkpoint=checkpoint,
                interval=every,
                format=format,
                watch=run.watch,
                stop=run.stop,
            )
            merged = pipelines.compact(run.spark, to, watch=run.watch) if compact else None
        print_report(report, as_json=json)
        if merged is not None:
            print_report(merged, as_json=json)


@app.command()
def compact(
    directory: Annotated[Path, typer.Argument(help="The archive.")],
    target_mib: Annotated[
        float, typer.Option(metavar="MIB", help="About how large files are to be.")
    ] = 128,
    master: MasterOption = _MASTER,
    conf: ConfOption = None,
    json: JsonOption = False,
) -> None:
    """Merge the small files of an archive, which may be written and read meanwhile."""
    with reported():
        _require_above_0("--target-mib", target_mib, most=_MIB_MAX)
        _require_archive(str(directory))
        with spark_run("compact", master, conf) as run:
            from turbopump.spark import pipelines

            report = pipelines.compact(
                run.spark, directory, target_bytes=ceil(target_mib * _MIB), watch=run.watch
            )
        print_report(report, as_json=json)


@app.command()
def replay(
    directory: Annotated[str, typer.Argument(help="The archive.")],
    to: Annotated[
        list[str],
        typer.Option(
            metavar="TOPIC|FROM=TO", help="Where messages go, of all topics or of one; repeatable."
        ),
    ],
    rate: RateOption = None,
    speed: Annotated[
        float | None,
        option("Keep the original spacing: 1 as it was, 10 ten times as fast.", metavar="FACTOR"),
    ] = None,
    where: WhereOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    dry_run: DryRunOption = False,
    master: MasterOption = _MASTER,
    conf: ConfOption = None,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Replay an archive to topics: as fast as possible, at a rate, or with its original timing."""
    with reported():
        targets = _targets(to)
        _require_above_0("--rate", rate)
        if speed is not None and not _SPEED_MIN <= speed < inf:
            raise InvalidArgument(f"--speed must be at least {_SPEED_MIN}, got {speed}")
        first, last = parse_times(since, until)
        with administration(nameserver) as admin:
            admin.clusters.list()
        _require_archive(directory)
        with spark_run("replay", master, conf) as run:
            from turbopump.spark import pipelines

            report = pipelines.replay(
                run.spark,
                directory,
                {"nameserver": nameserver},
                targets,
                pace=pipelines.Pace(rate, speed),
                where=where,
                since=first,
                until=last,
                is_dry_run=dry_run,
                watch=run.watch,
            )
        print_report(report, as_json=json)


@app.command()
def redrive(
    group: GroupArgument,
    where: WhereOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    to: RedriveToOption = "origin",
    again: AgainOption = False,
    rate: RateOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    master: MasterOption = _MASTER,
    conf: ConfOption = None,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Redrive matching dead letters, each once, on all cores of a cluster."""
    with reported():
        _require_above_0("--rate", rate)
        first, last = parse_times(since, until)
        with administration(nameserver) as admin:
            admin.groups.require(group)
        if not dry_run:
            chosen = "all dead letters" if where is None else f"dead letters where {where}"
            confirm(f"Send {chosen} of {group} to {to}?", is_sure=yes, as_json=json)
        with spark_run("redrive", master, conf) as run:
            from turbopump.spark import pipelines

            report = pipelines.redrive(
                run.spark,
                group,
                nameserver,
                where=where,
                since=first,
                until=last,
                to=destination(to),
                again=again,
                rate_per_s=rate,
                is_dry_run=dry_run,
                watch=run.watch,
            )
        print_report(report, as_json=json)


@app.command()
def lag(
    groups: Annotated[
        list[str] | None,
        typer.Argument(help="Groups; all without any.", autocompletion=complete_group),
    ] = None,
    samples: Annotated[int, typer.Option(metavar="N", help="How often brokers are asked.")] = 10,
    every: Annotated[float, typer.Option(metavar="SECONDS", help="Time between samples.")] = 1.0,
    window: WindowOption = "10 seconds",
    history: Annotated[
        str | None, option("Keep samples there, and include earlier ones.", metavar="DIR")
    ] = None,
    plot: PlotOption = None,
    master: MasterOption = _MASTER,
    conf: ConfOption = None,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Show the lag of groups over time, and how fast they consume."""
    with reported():
        _require_above_0("--samples", samples)
        _require_above_0("--every", every, most=threading.TIMEOUT_MAX, or_0=True)
        with administration(nameserver) as admin:
            for group in groups or ():
                admin.groups.require(group)
            admin.clusters.list()
        with spark_run("lag", master, conf) as run:
            from turbopump.spark import pipelines
            from turbopump.spark.pipelines.plots import save_lag_plot

            report = pipelines.lag(
                run.spark,
                nameserver,
                groups or (),
                samples=samples,
                interval=every,
                window=window,
                history=history,
                watch=run.watch,
                stop=run.stop,
            )
        if plot is not None:
            save_lag_plot(report, plot)
        print_report(report, as_json=json)


@app.command()
def trace(
    topic: Annotated[
        str, typer.Option(help="The trace topic.", autocompletion=complete_topic)
    ] = "RMQ_SYS_TRACE_TOPIC",
    window: WindowOption = "1 minute",
    since: SinceOption = None,
    until: UntilOption = None,
    plot: PlotOption = None,
    option: SourceOption = None,
    master: MasterOption = _MASTER,
    conf: ConfOption = None,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Show latencies, failures and retries by topic, group and tag, from the message trace."""
    with reported():
        first, last = parse_times(since, until)
        from turbopump.spark.pipelines.trace_records import no_trace_topic

        with administration(nameserver) as admin:
            if topic not in admin.topics.names():
                raise no_trace_topic(topic)
        source = {
            "nameserver": nameserver,
            "topic": topic,
            **parse_pairs(option or (), "--option"),
        }
        with spark_run("trace", master, conf) as run:
            from turbopump.spark import pipelines
            from turbopump.spark.pipelines.plots import save_trace_plot

            report = pipelines.trace(
                run.spark, source, window=window, since=first, until=last, watch=run.watch
            )
        if plot is not None:
            save_trace_plot(report, plot)
        print_report(report, as_json=json)


# --- before Spark is started, which takes a while -------------------------------------------------


def _require_above_0(
    option: str, value: float | None, *, most: float | None = None, or_0: bool = False
) -> None:
    if value is None or 0 < value <= (most or sys.float_info.max) or (or_0 and value == 0):
        return
    limit = "" if most is None else f" and at most {most:.0f}"
    least = "0 or more" if or_0 else "above 0"
    raise InvalidArgument(f"{option} must be {least}{limit}, got {value}")


def _require_format(format: str, *, compact: bool) -> None:  # noqa: A002 - the name of the option
    if format not in ("parquet", "delta"):
        raise InvalidArgument(f"--format must be parquet or delta, got {format!r}")
    if format == "delta" and compact:
        raise InvalidArgument(
            "--compact is for Parquet archives; compact a Delta table with deltalake's "
            "DeltaTable(...).optimize.compact()"
        )


def _require_archive(path: str) -> None:
    """What lies elsewhere is for Spark to find."""
    if ":" not in path and not Path(path).is_dir():
        raise InvalidArgument(f"archive must be a directory, got {path!r}")


def _targets(words: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        topic, mark, target = word.rpartition("=")
        key = topic if mark else _ANY
        if not target or (mark and not topic) or key in found:
            raise InvalidArgument(
                f"--to must be TOPIC, or FROM=TO once for each topic, got {word!r}"
            )
        found[key] = target
    return found


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
