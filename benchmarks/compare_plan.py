"""What `benchmarks/run` measures: each case, and the client command that measures it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from broker_process import Server, environment
from compare_report import Case
from peer_servers import RunningServer
from recover import STATES

HERE = Path(__file__).parent
LEVELS = (1, 8, 32, 64, 512)
OUR_LEVELS = (1, 8, 32, 512)
THREAD_LEVELS = (1, 8, 32)
BATCH_LEVELS = (1, 8)
BATCHES = {"batch": 16, "batch32": 32}
QUEUES = 8
RATE = 200
LATENCY_TIMES = 3
"""Duration relative to other work, so that there are enough messages for a p99."""
FILL_BATCH = 200
WARM_DRAIN_MIN = 500_000
"""The smallest backlog that is drained with a warm-up."""
TIMEOUT_S = 900


class ClientFailed(Exception):
    """A client exited with an error."""


@dataclass(frozen=True, slots=True)
class Systems:
    """The servers that run during the benchmark."""

    broker: Server
    peers: dict[str, RunningServer]
    core: str = ""
    """That of the broker and its clients, if it is not the usual one; peers run beside that."""


class Run(Protocol):
    """Measures one case, once per call."""

    @property
    def case(self) -> Case: ...

    def measure(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class ClientRun:
    """A case and the command of its client, which prints one line of JSON."""

    case: Case
    command: list[str]

    def measure(self) -> dict[str, Any]:
        done = subprocess.run(
            self.command,
            env=environment(self.case.core),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
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
            if work in makers:
                yield from makers[work]()

    def _case(self, work: str, system: str, level: int) -> Case:
        return Case(work, system, level, self._size, self._systems.core)

    def fill(self) -> None:
        """Store the backlog that consumers drain."""
        batches = [f"--batch={FILL_BATCH}", "--concurrency=8", "--warm-up=0"]
        amount = [f"--count={self._options.backlog}", f"--size={self._size}"]
        command = self._turbopump("produce", self._backlog_topic, *batches, *amount)
        where = environment(self._systems.core)
        subprocess.run(command, env=where, check=True, capture_output=True)

    def _turbopump(self, work: str, topic: str, *options: str) -> list[str]:
        words = [sys.executable, "-m", "turbopump", "bench", work, topic, *options]
        return [*words, "--json", f"--nameserver={self._systems.broker.nameserver}", *self._ours]

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
            yield ClientRun(self._case("send", "bare frames", level), self._bare(*options))
            if level in OUR_LEVELS:
                command = self._turbopump("produce", "Bench", *options)
                yield ClientRun(self._case("send", "turbopump asyncio", level), command)
            if level in THREAD_LEVELS:
                command = self._turbopump("produce", "Bench", "--mode=threads", *options)
                yield ClientRun(self._case("send", "turbopump threads", level), command)
                if find_spec("rocketmq") is not None and not self._systems.core:
                    ours = RunningServer(
                        self._systems.broker.nameserver, (self._systems.broker.process.pid,)
                    )
                    command = self._peer("cpp", "produce", ours, *options)
                    yield ClientRun(self._case("send", "C++ client", level), command)
            if level in OUR_LEVELS:
                for name, running in self._systems.peers.items():
                    command = self._peer(name, "produce", running, *options)
                    yield ClientRun(self._case("send", name, level), command)

    def _batches(self, work: str) -> Iterator[Run]:
        for level in BATCH_LEVELS:
            options = [f"--concurrency={level}", f"--batch={BATCHES[work]}", *self._sent]
            yield ClientRun(self._case(work, "bare frames", level), self._bare(*options))
            command = self._turbopump("produce", "Bench", *options)
            yield ClientRun(self._case(work, "turbopump asyncio", level), command)
            command = self._turbopump("produce", "Bench", "--mode=threads", *options)
            yield ClientRun(self._case(work, "turbopump threads", level), command)

    def _drain(self, *options: str) -> list[str]:
        """Return the command that drains the backlog, with a warm-up for a large one."""
        is_large = self._options.backlog >= WARM_DRAIN_MIN
        warm_up_s = min(self._options.warm_up, 0.5) if is_large else 0
        return self._turbopump("consume", self._backlog_topic, f"--warm-up={warm_up_s}", *options)

    def _drains(self) -> Iterator[Run]:
        for batch in (1, 32):
            of_batch = f"--batch={batch}"
            for mode in ("asyncio", "threads"):
                command = self._drain(f"--mode={mode}", of_batch)
                yield ClientRun(self._case("drain", f"turbopump {mode}", batch), command)
            command = self._drain("--processes=2", of_batch)
            yield ClientRun(self._case("drain", "turbopump asyncio, 2 processes", batch), command)
        for name, running in self._systems.peers.items():
            count = [f"--count={self._options.backlog // 10}", f"--size={self._size}"]
            yield ClientRun(
                self._case("drain", name, 1), self._peer(name, "consume", running, *count)
            )

    def _orderly_drains(self) -> Iterator[Run]:
        for batch in (1, 32):
            for mode in ("asyncio", "threads"):
                command = self._drain("--orderly", f"--mode={mode}", f"--batch={batch}")
                yield ClientRun(self._case("orderly", f"turbopump {mode}", batch), command)

    def _recoveries(self) -> Iterator[Run]:
        mib = self._options.log_mib
        for state in STATES:
            script = [sys.executable, str(HERE / "recover.py"), f"--state={state}"]
            command = [*script, f"--mib={mib}", f"--size={self._size}"]
            yield ClientRun(self._case("recovery", f"turbopump store, {state}", mib), command)

    def _latencies(self) -> Iterator[Run]:
        for mode in ("asyncio", "threads"):
            seconds = f"--seconds={LATENCY_TIMES * self._options.seconds}"
            options = [f"--mode={mode}", f"--rate={RATE}", *self._sent, seconds]
            command = self._turbopump("latency", "Latency", *options)
            yield ClientRun(self._case("latency", f"turbopump {mode}", RATE), command)
