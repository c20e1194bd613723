"""Compare our clients with bare frames, and with other systems through their Python clients.

    benchmarks/run [--rounds 3] [--seconds 1] [--quick] [--only send,batch] [--sizes 128,1024]
        [--cores compiled,plain] [--json FILE] [--plot FILE] [--update-docs]
    benchmarks/run --from FILE [--markdown] [--update-docs]
    benchmarks/run NAME ...

Each figure is for one client process and one broker; our topics have 8 queues. Rounds are
interleaved: each measures every system once, so that other work on the machine affects all of them.
Our broker and clients are measured on each core that is built, in turns; targets are for the first.
Systems that are not installed are listed as absent. The NAME of another script in benchmarks/, such
as growth or spark, runs that script instead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from broker_process import NAMED_CONFIG, Server, server
from compare_chart import write_chart
from compare_docs import blocks
from compare_plan import QUEUES, ClientFailed, Plan, Run, Systems
from compare_report import (
    LEVEL,
    SPARK_WORKS,
    Case,
    Measured,
    as_json,
    from_json,
    print_report,
    write_plot,
)
from measure import update_docs
from peer_servers import PEER_SERVERS, RunningServer, peer_server
from turbopump.core import CORE_NAME

WORKS = tuple(LEVEL)
# The compiled core is the usual one where it is built; TURBOPUMP_CORE leaves only one.
CORES = (CORE_NAME,) if os.environ.get("TURBOPUMP_CORE") else tuple({CORE_NAME: 1, "plain": 2})
SPARK_ROWS_MIN = 40_000
"""Fewer would not fill the batches of Spark's source of ready rows."""
USUAL: dict[str, float] = {
    "rounds": 3,
    "seconds": 1.0,
    "warm_up": 0.5,
    "backlog": 500_000,
    "log_mib": 128,
    "spark_rows": 600_000,
}
QUICK: dict[str, float] = {
    "rounds": 1,
    "seconds": 0.3,
    "warm_up": 0.2,
    "backlog": 50_000,
    "log_mib": 32,
    "spark_rows": 60_000,
}


def absent_systems(wanted: Sequence[str]) -> dict[str, str]:
    """Return what is missing for each system that cannot be measured."""
    missing = {name: PEER_SERVERS[name].missing for name in PEER_SERVERS}
    for name, package in (("C++ client", "rocketmq"), ("Spark", "pyspark")):
        missing[name] = f"Python package {package}" if find_spec(package) is None else None
    absent = {name: f"not installed: {what}" for name, what in missing.items() if what}
    unwanted = {name: "left out with --peers" for name in PEER_SERVERS if name not in wanted}
    return {**absent, **unwanted}


def started_peers(
    stack: contextlib.ExitStack, directory: Path, absent: dict[str, str]
) -> dict[str, RunningServer]:
    """Start the servers of other systems; add those that do not start to ``absent``."""
    peers = {}
    for name in [each for each in PEER_SERVERS if each not in absent]:
        try:
            peers[name] = stack.enter_context(peer_server(name, directory))
        except OSError as error:
            absent[name] = f"cannot be started: {error}"
    return peers


def prepared(
    options: argparse.Namespace, stack: contextlib.ExitStack, absent: dict[str, str]
) -> Iterator[Run]:
    """Start all systems, store the backlog to be read, and yield the cases to measure."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    with_peers = {"send", "drain"} & set(options.only)
    peers = started_peers(stack, directory, absent) if with_peers else {}
    systems = []
    for core in options.cores:
        broker = stack.enter_context(server(config=NAMED_CONFIG, core=core))
        for topic in ("Bench", "Latency", *(f"Drain{size}" for size in options.sizes)):
            broker.turbopump("topic", "create", topic, f"--queues={QUEUES}")
        is_usual = core == options.cores[0]
        systems.append(Systems(broker, peers if is_usual else {}, "" if is_usual else core))
    for size in options.sizes:
        plans = [Plan(options, each, size) for each in systems]
        if {"drain", "orderly"} & set(options.only):
            for plan in plans:
                plan.fill()
        yield from in_turns(*(list(plan.runs(options.only)) for plan in plans))
    broker = systems[0].broker
    works = [each for each in SPARK_WORKS if each in options.only]
    if works and "Spark" not in absent:
        yield from spark(options, works, broker, directory, stack)


def in_turns(usual: Sequence[Run], *others: Sequence[Run]) -> Iterator[Run]:
    """Yield each case on all cores before the next one."""
    for run in usual:
        yield run
        for runs in others:
            yield from (each for each in runs if replace(each.case, core="") == run.case)


def spark(
    options: argparse.Namespace,
    works: Sequence[str],
    broker: Server,
    directory: Path,
    stack: contextlib.ExitStack,
) -> Sequence[Run]:
    from compare_spark import spark_runs

    rows = options.spark_rows
    return stack.enter_context(spark_runs(works, options.sizes, broker, directory, rows))


def measure(options: argparse.Namespace, absent: dict[str, str]) -> list[Measured]:
    """Run all rounds; return the results by case. Add what cannot be started to ``absent``."""
    begun_s = time.monotonic()

    def progress(text: str) -> None:
        print(f"{time.monotonic() - begun_s:4.0f} s  {text}", file=sys.stderr, flush=True)

    with contextlib.ExitStack() as stack:
        progress("starting servers, storing the backlog")
        runs = list(prepared(options, stack, absent))
        results: dict[Case, list[dict[str, Any]]] = {run.case: [] for run in runs}
        for number in range(options.rounds):
            for place, run in enumerate(runs, 1):
                if run.case.name in absent:
                    continue
                at = f"round {number + 1}/{options.rounds}, {place}/{len(runs)}"
                progress(f"{at}: {run.case.name}")
                try:
                    results[run.case].append(run.measure())
                except ClientFailed as error:
                    if run.case.system not in PEER_SERVERS and run.case.work not in SPARK_WORKS:
                        raise
                    absent[run.case.name] = str(error).strip().splitlines()[-1]
        progress("stopping servers")
    # Ratios are computed per round, so a case that failed in any round is left out.
    return [Measured(case, rows) for case, rows in results.items() if len(rows) == options.rounds]


def works(text: str) -> list[str]:
    return some_of(WORKS, text.split(","))


def cores(text: str) -> list[str]:
    return some_of(CORES, text.split(","))


def peers(text: str) -> str:
    some_of(PEER_SERVERS, filter(None, text.split(",")))
    return text


def some_of(known: Iterable[str], chosen: Iterable[str]) -> list[str]:
    names = list(chosen)
    unknown = sorted(set(names).difference(known))
    if unknown:
        raise argparse.ArgumentTypeError(f"expected some of {','.join(known)}, got {unknown[0]!r}")
    return names


def body_sizes(text: str) -> list[int]:
    chosen = text.split(",")
    if not all(each.isdecimal() and int(each) for each in chosen):
        raise argparse.ArgumentTypeError(f"expected sizes in bytes such as 128,1024, got {text!r}")
    return [int(each) for each in chosen]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument

    def amount(name: str, kind: type, what: str) -> None:
        key = name.replace("-", "_")
        add(f"--{name}", type=kind, help=f"{what} (usual {USUAL[key]:g}, quick {QUICK[key]:g})")

    add("--quick", action="store_true", help="a short run that only shows that everything works")
    amount("rounds", int, "measurements of each system")
    amount("seconds", float, "length of a measurement")
    amount("warm-up", float, "seconds before a measurement")
    amount("backlog", int, "messages to drain")
    amount("log-mib", int, "size of the log to recover")
    amount("spark-rows", int, "rows that Spark reads; it writes a third of them")
    add("--sizes", type=body_sizes, default=[128], help="sizes of bodies, in bytes (usual 128)")
    add("--only", type=works, default=list(WORKS), help=f"measure some of {','.join(WORKS)}")
    add("--cores", type=cores, default=list(CORES), help=f"some of {','.join(CORES)}")
    every_peer = ",".join(PEER_SERVERS)
    add("--peers", type=peers, default=every_peer, help=f"some of {every_peer}, or '' for none")
    add("--json", type=Path, help="write all results to this file")
    add("--plot", type=Path, help="draw the medians (PNG or SVG; matplotlib)")
    add(
        "--from",
        type=Path,
        dest="from_file",
        metavar="JSON",
        help="show the results of an earlier run",
    )
    add("--markdown", action="store_true", help="print the tables of the documents")
    add("--update-docs", action="store_true", help="write tables and chart into the documents")
    options = parser.parse_args()
    for name, value in (QUICK if options.quick else USUAL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.rounds < 1 or options.seconds <= 0 or options.backlog < 1000:
        parser.error("--rounds must be at least 1, --seconds more than 0, --backlog at least 1000")
    if options.spark_rows < SPARK_ROWS_MIN:
        parser.error(f"--spark-rows must be at least {SPARK_ROWS_MIN}, got {options.spark_rows}")
    return options


def command_of(options: argparse.Namespace) -> str:
    """Return the command that repeats the measurement, without its output options."""
    words = ["benchmarks/run", *["--quick"] * options.quick]
    for name, usual in (QUICK if options.quick else USUAL).items():
        if (value := getattr(options, name)) != usual:
            words.append(f"--{name.replace('_', '-')} {value:g}")
    lists = {"sizes": (options.sizes, [128]), "only": (options.only, list(WORKS))}
    lists["cores"] = (options.cores, list(CORES))
    for name, (chosen, usual_list) in lists.items():
        if chosen != usual_list:
            words.append(f"--{name} {','.join(map(str, chosen))}")
    if options.peers != ",".join(PEER_SERVERS):
        words.append(f"--peers '{options.peers}'")
    return " ".join(words)


def measured_value(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, and return all results in the form written to a file."""
    # Whatever is started without a core of its own has the first.
    os.environ["TURBOPUMP_CORE"] = options.cores[0]
    absent = absent_systems(options.peers.split(","))
    load = os.getloadavg()[0]
    found = measure(options, absent)
    machine = {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "core": options.cores[0],
        "load_average": load,
        "command": command_of(options),
    }
    return {
        "machine": machine,
        "options": {name: str(each) for name, each in vars(options).items()},
        "absent": absent,
        **as_json(found),
    }


def main() -> None:
    options = parsed()
    if options.from_file is None:
        value = measured_value(options)
    else:
        value = json.loads(options.from_file.read_text(encoding="utf-8"))
    if options.json is not None:
        options.json.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    found = from_json(value)
    print_report(found, value["absent"], value["machine"])
    if options.plot is not None:
        write_plot(found, options.plot)
    if options.markdown:
        for name, text in blocks(found, value["machine"]).items():
            print(f"\n<!-- {name} -->\n{text}")
    if options.update_docs:
        update_docs(blocks(found, value["machine"]))
        write_chart(found)


if __name__ == "__main__":
    main()
