"""A name server and a broker as separate processes."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

from torture.messages import DELAY_LEVELS
from torture.peer import ask
from torture.processes import NotReady, Process, Processes

START_S = 60.0
"""Enough for a recovery on a busy machine."""

_CREATE_TOPIC = 17

SETTINGS = {
    # Small files, so that they fill up and disruptions hit the creation of new ones.
    "mappedFileSizeCommitLog": "1048576",
    "mappedFileSizeConsumeQueue": "20000",
    "maxHashSlotNum": "1000",
    "maxIndexNum": "4000",
    "maxMessageSize": "65536",
    # Short intervals, so that disruptions hit these writes.
    "flushConsumerOffsetInterval": "200",
    "flushDelayOffsetInterval": "200",
    "flushIntervalConsumeQueue": "100",
    "defaultTopicQueueNums": "8",
    "messageDelayLevel": DELAY_LEVELS,
    "brokerName": "broker-a",
    # The usage of the machine's disk must not matter.
    "diskMaxUsedSpaceRatio": "95",
    "diskSpaceCleanForciblyRatio": "97",
    "diskSpaceWarningLevelRatio": "99",
}


class Broker:
    """``turbopump broker`` on one directory and port, started and stopped repeatedly."""

    def __init__(
        self,
        processes: Processes,
        directory: Path,
        nameserver: str = "",
        settings: Mapping[str, str] | None = None,
        module: str = "turbopump",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.starts = 0
        self.address = ""
        self.texts: list[str] = []
        """What earlier broker processes wrote to their logs."""
        self._processes = processes
        self._nameserver = nameserver
        self._settings = {**SETTINGS, **(settings or {})}
        self._module = module
        self._env = env
        self._process: Process | None = None

    @property
    def store(self) -> Path:
        return self.directory / "store"

    @property
    def process(self) -> Process:
        assert self._process is not None, "the broker was not started"
        return self._process

    def start(self, wait_s: float = START_S) -> None:
        """Start, and wait until the broker is ready; raises `NotReady`."""
        self.launch()
        try:
            line = self.process.ready_line(wait_s)
        except NotReady:
            self._end()
            raise
        self.address = line.partition("broker=")[2].partition(" ")[0]

    def launch(self) -> None:
        """Start without waiting."""
        self.directory.mkdir(parents=True, exist_ok=True)
        config = self.directory / "broker.conf"
        lines = (f"{key}={value}\n" for key, value in self._settings.items())
        config.write_text("".join(lines))
        port = self.address.rpartition(":")[2] or "0"
        options = ["--dir", str(self.directory), "--port", port, "--config", str(config)]
        if self._nameserver:
            options += ["--nameserver", self._nameserver]
        name = f"broker-{self.directory.name}"
        self._process = self._processes.python(name, self._module, ["broker", *options], self._env)
        self.starts += 1

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.process.kill()
        self._end()

    def stop(self) -> int | None:
        """Stop it with SIGTERM; return the exit code, or None if it had to be killed."""
        code = self.process.terminate()
        self._end()
        return code

    def pause(self) -> None:
        """Suspend it with SIGSTOP."""
        self.process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume it."""
        self.process.signal(signal.SIGCONT)

    def create_topic(self, topic: str, queues: int) -> None:
        """Create a topic, as an operator would."""
        names = ("readQueueNums", "writeQueueNums")
        fields = {"topic": topic, "defaultTopic": "TBW102", **dict.fromkeys(names, queues)}
        fields |= {"perm": 6, "topicFilterType": "SINGLE_TAG"}
        answer, _ = ask(self.address, _CREATE_TOPIC, fields)
        assert answer["code"] == 0, answer

    def log_text(self) -> str:
        """Return what all starts of this broker wrote to the log."""
        running = self._process is not None and self._process.returncode is None
        return "".join([*self.texts, self.process.log_text() if running else ""])

    def _end(self) -> None:
        self.process.kill()
        self.texts.append(self.process.log_text())


class NameServer:
    """``turbopump nameserver`` on one port, started and stopped repeatedly."""

    def __init__(self, processes: Processes) -> None:
        self.address = ""
        self._processes = processes
        self.start()

    def start(self) -> None:
        """Start, and wait until the name server is ready; raises `NotReady`."""
        port = self.address.rpartition(":")[2] or "0"
        self.process = self._processes.turbopump("nameserver", "nameserver", "--port", port)
        line = self.process.ready_line(START_S)
        self.address = line.partition("nameserver=")[2].partition(" ")[0]
