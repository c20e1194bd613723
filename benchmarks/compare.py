"""Our clients against bare frames, and against other systems through their Python clients.

    benchmarks/run [--rounds 3] [--seconds 2] [--only send,batch] [--sizes 128,1024] [--json FILE]
        [--plot FILE]

Each figure is of one client process against one broker; topics of ours have 8 queues. Rounds are
interleaved: each measures every system once, so that other work on the machine disturbs all alike.
Systems that are not installed are listed as absent.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from compare_report import Case, Measured, print_report, write_plot
from peer_servers import PEER_SERVERS, RunningServer, peer_server
from recover import STATES
from servers import Server, server

HERE = Path(__file__).parent
WORKS = ("send", "batch", "batch32", "drain", "orderly", "latency", "recovery")
LEVELS = (1, 8, 32, 64, 512)
OUR_LEVELS = (1, 8, 32, 512)
THREAD_LEVELS = (1, 8, 32)
BATCH_LEVELS = (1, 8)
BATCHES = {"batch": 16, "batch32": 32}
QUEUES = 8
RATE = 200
FILL_BATCH = 200
WARM_DRAIN_MIN = 500_000
"""Messages of a backlog of which some are drained before it is measured."""
TIMEOUT_S = 900


class ClientFailed(Exception):
    """A client ended with an error."""


@dataclass(frozen=True, slots=True)
class Systems:
    """What runs for the time of the benchmark."""

    nameserver: str
    broker: Server
    peers: dict[str, RunningServer]


@dataclass(frozen=True, slots=True)
class Run:
    """A case and the command of its client, which prints one line of JSON."""

    case: Case
    command: list[str]

    def measure(self) -> dict[str, Any]:
        done = subprocess.run(
            self.command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if done.returncode:
            raise ClientFailed(f"{self.case.name} failed:\n{done.stderr}")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


class Plan:
    """Builds the commands of all clients."""

    def __init__(self, options: argparse.Namespace, systems: Systems, size: int) -> None:
        self._options = options
        self._systems = systems
        self._size = size
        self._backlog_topic = f"Drain{size}"
        timed = [f"--seconds={options.seconds}", f"--warm-up={options.warm_up}"]
        self._sent = [*timed, f"--size={size}"]
        self._ours = [f"--cpu-of={systems.broker.process.pid}"]

    def runs(self, works: Sequence[str]) -> Iterator[Run]:
        makers = {
            "send": self._sends,
            "batch": lambda: self._batches("batch"),
            "batch32": lambda: self._batches("batch32"),
            "drain": self._drains,
            "orderly": self._orderly_drains,
            "latency": self._latencies,
            "recovery": self._recoveries,
        }
        for work in works:
            yield from makers[work]()

    def _case(self, work: str, system: str, level: int) -> Case:
        return Case(work, system, level, self._size)

    def fill(self) -> None:
        """Store the backlog that consumers drain."""
        batches = [f"--batch={FILL_BATCH}", "--concurrency=8", "--warm-up=0"]
        amount = [f"--count={self._options.backlog}", f"--size={self._size}"]
        command = self._turbopump("produce", self._backlog_topic, *batches, *amount)
        subprocess.run(command, check=True, capture_output=True)

    def _turbopump(self, work: str, topic: str, *options: str) -> list[str]:
        words = [sys.executable, "-m", "turbopump", "bench", work, topic, *options]
        return [*words, "--json", f"--nameserver={self._systems.nameserver}", *self._ours]

    def _bare(self, *options: str) -> list[str]:
        script = [sys.executable, str(HERE / "bare_frames.py")]
        where = [f"--address={self._systems.broker.address}", f"--queues={QUEUES}"]
        return [*script, *where, *options, *self._ours]

    def _peer(self, name: str, work: str, running: RunningServer, *options: str) -> list[str]:
        script = [sys.executable, str(HERE / "peers.py"), name, work]
        watched = [f"--cpu-of={pid}" for pid in running.pids]
        return [*script, f"--server={running.address}", *options, *watched]

    def _sends(self) -> Iterator[Run]:
        for level in LEVELS:
            options = [f"--concurrency={level}", *self._sent]
            yield Run(self._case("send", "bare frames", level), self._bare(*options))
            if level in OUR_LEVELS:
                command = self._turbopump("produce", "Bench", *options)
                yield Run(self._case("send", "turbopump asyncio", level), command)
            if level in THREAD_LEVELS:
                command = self._turbopump("produce", "Bench", "--mode=threads", *options)
                yield Run(self._case("send", "turbopump threads", level), command)
                if find_spec("rocketmq") is not None:
                    ours = RunningServer(
                        self._systems.nameserver, (self._systems.broker.process.pid,)
                    )
                    command = self._peer("cpp", "produce", ours, *options)
                    yield Run(self._case("send", "C++ client", level), command)
            if level in OUR_LEVELS:
                for name, running in self._systems.peers.items():
                    command = self._peer(name, "produce", running, *options)
                    yield Run(self._case("send", name, level), command)

    def _batches(self, work: str) -> Iterator[Run]:
        for level in BATCH_LEVELS:
            options = [f"--concurrency={level}", f"--batch={BATCHES[work]}", *self._sent]
            yield Run(self._case(work, "bare frames", level), self._bare(*options))
            command = self._turbopump("produce", "Bench", *options)
            yield Run(self._case(work, "turbopump asyncio", level), command)
            command = self._turbopump("produce", "Bench", "--mode=threads", *options)
            yield Run(self._case(work, "turbopump threads", level), command)

    def _drain(self, *options: str) -> list[str]:
        """Return the command that drains the backlog; a large one after a warm-up."""
        is_large = self._options.backlog >= WARM_DRAIN_MIN
        warm_up_s = min(self._options.warm_up, 0.5) if is_large else 0
        return self._turbopump("consume", self._backlog_topic, f"--warm-up={warm_up_s}", *options)

    def _drains(self) -> Iterator[Run]:
        for batch in (1, 32):
            of_batch = f"--batch={batch}"
            for mode in ("asyncio", "threads"):
                command = self._drain(f"--mode={mode}", of_batch)
                yield Run(self._case("drain", f"turbopump {mode}", batch), command)
            command = self._drain("--processes=2", of_batch)
            yield Run(self._case("drain", "turbopump asyncio, 2 processes", batch), command)
        for name, running in self._systems.peers.items():
            count = [f"--count={self._options.backlog // 10}", f"--size={self._size}"]
            yield Run(self._case("drain", name, 1), self._peer(name, "consume", running, *count))

    def _orderly_drains(self) -> Iterator[Run]:
        for batch in (1, 32):
            for mode in ("asyncio", "threads"):
                command = self._drain("--orderly", f"--mode={mode}", f"--batch={batch}")
                yield Run(self._case("orderly", f"turbopump {mode}", batch), command)

    def _recoveries(self) -> Iterator[Run]:
        mib = self._options.log_mib
        for state in STATES:
            script = [sys.executable, str(HERE / "recover.py"), f"--state={state}"]
            command = [*script, f"--mib={mib}", f"--size={self._size}"]
            yield Run(self._case("recovery", f"turbopump store, {state}", mib), command)

    def _latencies(self) -> Iterator[Run]:
        for mode in ("asyncio", "threads"):
            options = [f"--mode={mode}", f"--rate={RATE}", *self._sent]
            command = self._turbopump("latency", "Latency", *options)
            yield Run(self._case("latency", f"turbopump {mode}", RATE), command)


def absent_systems(wanted: Sequence[str]) -> dict[str, str]:
    """Return what is missing of each system that cannot take part."""
    missing = {name: PEER_SERVERS[name].missing for name in PEER_SERVERS}
    missing["C++ client"] = "Python package rocketmq" if find_spec("rocketmq") is None else None
    absent = {name: f"not installed: {what}" for name, what in missing.items() if what}
    unwanted = {name: "left out with --peers" for name in PEER_SERVERS if name not in wanted}
    return {**absent, **unwanted}


def measure(options: argparse.Namespace, absent: dict[str, str]) -> list[Measured]:
    """Run all rounds; return the results by case. Adds to ``absent`` what cannot be started."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        peers: dict[str, RunningServer] = {}
        for name in [each for each in PEER_SERVERS if each not in absent]:
            try:
                peers[name] = stack.enter_context(peer_server(name, directory))
            except OSError as error:
                absent[name] = f"cannot be started: {error}"
        broker = stack.enter_context(server())
        sizes = options.sizes
        for topic in ("Bench", "Latency", *(f"Drain{size}" for size in sizes)):
            create = [sys.executable, "-m", "turbopump", "topic", "create", topic]
            where = [f"--queues={QUEUES}", f"--nameserver={broker.nameserver}"]
            subprocess.run([*create, *where], check=True, capture_output=True)
        systems = Systems(broker.nameserver, broker, peers)
        plans = [Plan(options, systems, size) for size in sizes]
        runs = [run for plan in plans for run in plan.runs(options.only)]
        if {"drain", "orderly"} & set(options.only):
            for plan in plans:
                plan.fill()
        results: dict[Case, list[dict[str, Any]]] = {run.case: [] for run in runs}
        for number in range(options.rounds):
            for place, run in enumerate(runs, 1):
                what = f"round {number + 1}/{options.rounds}, {place}/{len(runs)}: {run.case.name}"
                print(what, file=sys.stderr)
                try:
                    results[run.case].append(run.measure())
                except ClientFailed as error:
                    if run.case.system not in PEER_SERVERS:
                        raise
                    absent[run.case.name] = str(error).strip().splitlines()[-1]
    # Ratios are of each round, so a case that failed in one of them is left out.
    return [Measured(case, rows) for case, rows in results.items() if len(rows) == options.rounds]


def works(text: str) -> list[str]:
    chosen = text.split(",")
    unknown = sorted(set(chosen) - set(WORKS))
    if unknown:
        raise argparse.ArgumentTypeError(f"expected some of {','.join(WORKS)}, got {unknown[0]!r}")
    return chosen


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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds before each")
    parser.add_argument("--sizes", type=body_sizes, default=[128], help="of bodies, in bytes")
    parser.add_argument("--backlog", type=int, default=1_000_000, help="messages to drain")
    parser.add_argument("--log-mib", type=int, default=256, help="size of the log to recover")
    parser.add_argument("--only", type=works, default=list(WORKS), help=f"of {','.join(WORKS)}")
    parser.add_argument("--peers", default=",".join(PEER_SERVERS), help="empty for none")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--plot", type=Path, help="draw the medians (PNG or SVG; matplotlib)")
    options = parser.parse_args()
    if options.rounds < 1 or options.seconds <= 0 or options.backlog < 1000:
        parser.error("--rounds must be at least 1, --seconds more than 0, --backlog at least 1000")
    return options


def main() -> None:
    options = parsed()
    absent = absent_systems(options.peers.split(","))
    found = measure(options, absent)
    machine = {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }
    targets = print_report(found, absent, machine)
    if options.json is not None:
        value = {
            "machine": machine,
            "options": {name: str(each) for name, each in vars(options).items()},
            "absent": absent,
            "cases": [each.as_json(found) for each in found],
            "targets": targets,
        }
        options.json.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    if options.plot is not None:
        write_plot(found, options.plot)


if __name__ == "__main__":
    main()
