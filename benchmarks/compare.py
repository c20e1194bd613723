"""Our clients against bare frames, and against other systems through their Python clients.

    benchmarks/run [--rounds 3] [--seconds 2] [--only send,batch] [--json FILE] [--plot FILE]

Each figure is of one client process against one broker. Rounds are interleaved: each measures every
system once, so that other work on the machine disturbs all alike. Systems that are not installed
are listed as absent.
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

from broker import Server, server
from compare_report import Case, Measured, print_report, write_plot
from peer_servers import PEER_SERVERS, RunningServer, peer_server

HERE = Path(__file__).parent
WORKS = ("send", "batch", "drain", "latency")
LEVELS = (1, 8, 32, 64, 512)
OUR_LEVELS = (1, 8, 32, 512)
THREAD_LEVELS = (1, 8, 32)
BATCH_LEVELS = (1, 8)
BATCH = 16
QUEUES = 8
RATE = 200
FILL_BATCH = 200
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

    def __init__(self, options: argparse.Namespace, systems: Systems) -> None:
        self._options = options
        self._systems = systems
        timed = [f"--seconds={options.seconds}", f"--warm-up={options.warm_up}"]
        self._sent = [*timed, f"--size={options.size}"]
        self._ours = [f"--cpu-of={systems.broker.process.pid}"]

    def runs(self, works: Sequence[str]) -> Iterator[Run]:
        makers = {
            "send": self._sends,
            "batch": self._batches,
            "drain": self._drains,
            "latency": self._latencies,
        }
        for work in works:
            yield from makers[work]()

    def fill(self) -> None:
        """Store the backlog that consumers drain."""
        batches = [f"--batch={FILL_BATCH}", "--concurrency=8", "--warm-up=0"]
        amount = [f"--count={self._options.backlog}", f"--size={self._options.size}"]
        subprocess.run(
            self._turbopump("produce", "Drain", *batches, *amount), check=True, capture_output=True
        )

    def _turbopump(self, work: str, topic: str, *options: str) -> list[str]:
        words = [sys.executable, "-m", "turbopump", "bench", work, topic, *options]
        return [*words, "--json", f"--nameserver={self._systems.nameserver}", *self._ours]

    def _bare(self, *options: str) -> list[str]:
        script = [sys.executable, str(HERE / "bare_frames.py")]
        return [*script, f"--address={self._systems.broker.address}", *options, *self._ours]

    def _peer(self, name: str, work: str, running: RunningServer, *options: str) -> list[str]:
        script = [sys.executable, str(HERE / "peers.py"), name, work]
        watched = [f"--cpu-of={pid}" for pid in running.pids]
        return [*script, f"--server={running.address}", *options, *watched]

    def _sends(self) -> Iterator[Run]:
        for level in LEVELS:
            options = [f"--concurrency={level}", *self._sent]
            yield Run(Case("send", "bare frames", level), self._bare(*options))
            if level in OUR_LEVELS:
                command = self._turbopump("produce", "Bench", *options)
                yield Run(Case("send", "turbopump asyncio", level), command)
            if level in THREAD_LEVELS:
                command = self._turbopump("produce", "Bench", "--mode=threads", *options)
                yield Run(Case("send", "turbopump threads", level), command)
                if find_spec("rocketmq") is not None:
                    ours = RunningServer(
                        self._systems.nameserver, (self._systems.broker.process.pid,)
                    )
                    command = self._peer("cpp", "produce", ours, *options)
                    yield Run(Case("send", "C++ client", level), command)
            if level in OUR_LEVELS:
                for name, running in self._systems.peers.items():
                    command = self._peer(name, "produce", running, *options)
                    yield Run(Case("send", name, level), command)

    def _batches(self) -> Iterator[Run]:
        for level in BATCH_LEVELS:
            options = [f"--concurrency={level}", f"--batch={BATCH}", *self._sent]
            yield Run(Case("batch", "bare frames", level), self._bare(*options))
            command = self._turbopump("produce", "Bench", *options)
            yield Run(Case("batch", "turbopump asyncio", level), command)
            command = self._turbopump("produce", "Bench", "--mode=threads", *options)
            yield Run(Case("batch", "turbopump threads", level), command)

    def _drains(self) -> Iterator[Run]:
        for batch in (1, 32):
            options = [f"--batch={batch}", "--warm-up=0"]
            for mode in ("asyncio", "threads"):
                command = self._turbopump("consume", "Drain", f"--mode={mode}", *options)
                yield Run(Case("drain", f"turbopump {mode}", batch), command)
            command = self._turbopump("consume", "Drain", "--processes=2", *options)
            yield Run(Case("drain", "turbopump asyncio, 2 processes", batch), command)
        for name, running in self._systems.peers.items():
            count = [f"--count={self._options.backlog // 10}", f"--size={self._options.size}"]
            yield Run(Case("drain", name, 1), self._peer(name, "consume", running, *count))

    def _latencies(self) -> Iterator[Run]:
        for mode in ("asyncio", "threads"):
            options = [f"--mode={mode}", f"--rate={RATE}", *self._sent]
            command = self._turbopump("latency", "Latency", *options)
            yield Run(Case("latency", f"turbopump {mode}", RATE), command)


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
        for topic in ("Bench", "Drain", "Latency"):
            create = [sys.executable, "-m", "turbopump", "topic", "create", topic]
            where = [f"--queues={QUEUES}", f"--nameserver={broker.nameserver}"]
            subprocess.run([*create, *where], check=True, capture_output=True)
        plan = Plan(options, Systems(broker.nameserver, broker, peers))
        runs = list(plan.runs(options.only))
        if "drain" in options.only:
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


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds before each")
    parser.add_argument("--size", type=int, default=128, help="bytes of each body")
    parser.add_argument("--backlog", type=int, default=1_000_000, help="messages to drain")
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
