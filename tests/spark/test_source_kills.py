"""The driver of a stream is killed in the middle of a batch: nothing is lost or duplicated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servers import Standalone
from source_topics import fill, fresh_topic, made_topic

PROGRAM = Path(__file__).with_name("source_to_kill.py")
PATIENCE_S = 120.0


@contextmanager
def driver(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run the program in its own process group, which is killed at the end."""
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def test_a_killed_driver_repeats_its_batch_and_resumes(broker: Standalone, tmp_path: Path) -> None:
    topic = made_topic(broker.nameserver, fresh_topic(), queues=2)
    fill(broker.nameserver, topic, range(1000, 1100))
    given = (broker.nameserver, topic, str(tmp_path))
    with driver(*given, "hang") as first:
        assert first.stdout is not None
        # The stream starts at the end of the topic, which only its first batch knows.
        assert first.stdout.readline() == "batch 0 0\n"
        fill(broker.nameserver, topic, range(100))
        assert first.stdout.readline().startswith("batch 1 ")
        os.killpg(first.pid, signal.SIGKILL)
        first.wait(PATIENCE_S)
    noted = {path.name for path in (tmp_path / "checkpoint" / "offsets").glob("[0-9]*")}
    done = {path.name for path in (tmp_path / "checkpoint" / "commits").glob("[0-9]*")}
    assert noted - done == {"1"}, "it was killed between the two"
    begun = numbers_of(tmp_path, 1)
    fill(broker.nameserver, topic, range(100, 200))
    with driver(*given) as second:
        output, _ = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 0, output
    assert output.startswith("batch 1 ")
    assert numbers_of(tmp_path, 1) == begun, "the same messages as the first time"
    batches = [numbers_of(tmp_path, int(path.stem)) for path in (tmp_path / "out").iterdir()]
    assert sorted(number for batch in batches for number in batch) == list(range(200))


def numbers_of(folder: Path, batch: int) -> list[int]:
    found: list[int] = json.loads((folder / "out" / f"{batch}.json").read_text())
    return found
