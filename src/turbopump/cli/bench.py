"""``turbopump bench``."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turbopump.cli.administration import TopicArgument, require_range
from turbopump.cli.command import Console, command
from turbopump.cli.options import option
from turbopump.cli.output import Output, columns
from turbopump.errors import InvalidArgument, NotThere

if TYPE_CHECKING:
    from turbopump.admin.blocking import Admin
    from turbopump.bench.sample import Work

app = typer.Typer()

PROCESSES_MAX = 64
_SECONDS = 10.0


class Mode(StrEnum):
    """How the client is used."""

    ASYNCIO = "asyncio"
    THREADS = "threads"


ModeOption = Annotated[
    Mode, typer.Option(help="asyncio: `turbopump.aio`, in tasks; threads: plain functions.")
]
SizeOption = Annotated[int, typer.Option(metavar="BYTES", help="Size of each body.")]
SecondsOption = Annotated[float | None, option("How long to measure.", metavar="SECONDS")]
CountOption = Annotated[int | None, option("Measure N messages.", metavar="N")]
WarmUpOption = Annotated[
    float, typer.Option(metavar="SECONDS", help="How long to run before measuring.")
]
ProcessesOption = Annotated[
    int, typer.Option(min=1, max=PROCESSES_MAX, help="Client processes that share the work.")
]
CpuOfOption = Annotated[
    list[int] | None,
    option(
        "Also measure the CPU time of this process, as a broker's; can be repeated.", metavar="PID"
    ),
]

COLUMNS = columns(
    "messages:number seconds:number messages_per_second=MESSAGES/S:number"
    " mib_per_second=MIB/S:number client_cpu_us=CLIENT_CPU_µS:number"
    " watched_cpu_us=WATCHED_CPU_µS:number p50_ms p99_ms max_ms"
)


@command(app)
def produce(
    console: Console,
    topic: TopicArgument,
    mode: ModeOption = Mode.ASYNCIO,
    concurrency: Annotated[
        int, typer.Option(help="Sends in flight: tasks, or threads, of each process.")
    ] = 32,
    batch: Annotated[int, typer.Option(help="Messages per send.")] = 1,
    size: SizeOption = 128,
    seconds: SecondsOption = None,
    count: CountOption = None,
    warm_up: WarmUpOption = 1.0,
    processes: ProcessesOption = 1,
    cpu_of: CpuOfOption = None,
) -> None:
    """Send messages as fast as brokers acknowledge them."""
    from turbopump.bench.produce import Produce

    require_range("concurrency", concurrency, 1, 10_000)
    require_range("batch", batch, 1, 10_000)
    require_range("size", size, 0)
    seconds, count = _extent(seconds, count, warm_up)
    console.admin.topics.route(topic)
    work = Produce(
        nameserver=console.nameserver,
        topic=topic,
        asynchronous=mode is Mode.ASYNCIO,
        concurrency=concurrency,
        batch=batch,
        size_bytes=size,
        seconds=seconds,
        count=None if count is None else -(-count // processes),
        warm_up_s=warm_up,
    )
    used = {"mode": str(mode), "concurrency": concurrency, "batch": batch, "size_bytes": size}
    _measure("produce", topic, work, processes, cpu_of, used, console)


@command(app)
def consume(
    console: Console,
    topic: TopicArgument,
    mode: ModeOption = Mode.ASYNCIO,
    concurrency: Annotated[
        int, typer.Option(help="Listener calls at a time: tasks, or threads, of each process.")
    ] = 20,
    batch: Annotated[int, typer.Option(help="Most messages per listener call.")] = 1,
    orderly: Annotated[
        bool, option("One listener call at a time for each queue.", "--orderly")
    ] = False,
    seconds: SecondsOption = None,
    count: CountOption = None,
    warm_up: WarmUpOption = 1.0,
    processes: ProcessesOption = 1,
    cpu_of: CpuOfOption = None,
) -> None:
    """Consume the messages that a topic has, as a new group with a listener that only counts."""
    from turbopump.bench.consume import Consume

    require_range("concurrency", concurrency, 1, 1000)
    require_range("batch", batch, 1, 1024)
    _extent(seconds, count, warm_up)
    status = console.admin.topics.status(topic)
    queues, stored = len(status.queues), status.messages
    if processes > queues:
        raise InvalidArgument(
            f"--processes must be 1–{queues}, got {processes}: {topic} has {queues} queues"
        )
    if not stored:
        raise InvalidArgument(
            f"topic {topic} has no messages; send some with `turbopump bench produce {topic}`"
        )
    wanted = min(stored, count or stored)
    with _temporary_group(console.admin) as group:
        work = Consume(
            nameserver=console.nameserver,
            topic=topic,
            group=group,
            queues=(queues // processes, -(-queues // processes)),
            asynchronous=mode is Mode.ASYNCIO,
            concurrency=concurrency,
            batch=batch,
            orderly=orderly,
            seconds=seconds,
            # Which process gets how many is not known; each ends when nothing arrives.
            count=wanted if processes == 1 else None,
            warm_up_s=warm_up,
        )
        used = {"mode": str(mode), "concurrency": concurrency, "batch": batch}
        used |= {"orderly": orderly, "size_bytes": None}
        _measure("consume", topic, work, processes, cpu_of, used, console)


@command(app)
def latency(
    console: Console,
    topic: TopicArgument,
    mode: ModeOption = Mode.ASYNCIO,
    rate: Annotated[float, typer.Option(help="Messages sent per second.")] = 200.0,
    size: SizeOption = 128,
    seconds: SecondsOption = None,
    warm_up: WarmUpOption = 1.0,
    cpu_of: CpuOfOption = None,
) -> None:
    """Measure the time from a send to the listener, at a steady rate."""
    from turbopump.bench.latency import SIZE_BYTES_MIN, Latency

    require_range("size", size, SIZE_BYTES_MIN)
    if not 0 < rate <= 10_000:
        raise InvalidArgument(f"rate must be more than 0 and at most 10000, got {rate}")
    seconds, _ = _extent(seconds, None, warm_up)
    queues = len(console.admin.topics.status(topic).queues)
    with _temporary_group(console.admin) as group:
        work = Latency(
            nameserver=console.nameserver,
            topic=topic,
            group=group,
            queues=queues,
            asynchronous=mode is Mode.ASYNCIO,
            rate=rate,
            size_bytes=size,
            seconds=seconds or _SECONDS,
            warm_up_s=warm_up,
        )
        used = {"mode": str(mode), "rate": rate, "size_bytes": size}
        _measure("latency", topic, work, 1, cpu_of, used, console)


def _measure(
    name: str,
    topic: str,
    work: Work,
    processes: int,
    cpu_of: list[int] | None,
    used: dict[str, Any],
    output: Output,
) -> None:
    from turbopump.bench.sample import WatchedProcesses, measured, summary

    samples, watched_s = measured(work, processes, WatchedProcesses(cpu_of or ()))
    found = summary(samples, used["size_bytes"], watched_s if cpu_of else None)
    value = {"work": name, "topic": topic, "processes": processes, **used, **found}
    sent = found["bytes"]
    shown = {**found, "mib_per_second": sent and sent / found["seconds"] / 2**20}
    wanted = [each for each in COLUMNS if shown[each.key] is not None]
    output.one(value, [shown], wanted, _described(name, topic, processes, used))


def _described(name: str, topic: str, processes: int, used: dict[str, Any]) -> str:
    settings = [f"{key} {value}" for key, value in used.items() if value not in (None, False)]
    clients = "1 client process" if processes == 1 else f"{processes} client processes"
    return f"{name} {topic}: {clients}, {', '.join(settings)}."


def _extent(
    seconds: float | None, count: int | None, warm_up: float
) -> tuple[float | None, int | None]:
    """Check how long to measure; without either, for the usual time."""
    if seconds is not None and count is not None:
        raise InvalidArgument("specify --seconds or --count, not both")
    if seconds is not None and not 0 < seconds <= 86_400:
        raise InvalidArgument(f"seconds must be more than 0 and at most 86400, got {seconds}")
    if count is not None:
        require_range("count", count, 1)
    if not 0 <= warm_up <= 3600:
        raise InvalidArgument(f"warm-up must be 0–3600 seconds, got {warm_up}")
    return (_SECONDS if seconds is None and count is None else seconds), count


@contextmanager
def _temporary_group(admin: Admin) -> Iterator[str]:
    """Yield the name of a group that did not exist before and is deleted afterwards."""
    group = f"turbopump-bench-{secrets.token_hex(4)}"
    try:
        yield group
    finally:
        with suppress(NotThere):
            admin.groups.delete(group, force=True)
