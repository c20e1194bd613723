"""A writing process is killed repeatedly: no acknowledged message is ever lost."""

from __future__ import annotations

import os
import random
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import turbopump
from faults.store import killed_writer
from faults.store.killed_writer import CONFIG, QUEUES, body_of
from turbopump.message import QueueOffset
from turbopump.store import Found, Store
from turbopump.wire.record import decode_record

pytestmark = pytest.mark.slow

Acknowledged = dict[int, tuple[int, int]]
"""By message number: queue and offset from the acknowledgement."""

_SOURCES = Path(turbopump.__file__).parents[1]


KEYS_EVERY = 97


def run_and_kill(directory: Path, first: int, chosen: random.Random) -> Acknowledged:
    """Let a writer run for a while, sometimes not even until it is open, and kill it."""
    command = [sys.executable, killed_writer.__file__, str(directory), str(first)]
    environment = {**os.environ, "PYTHONPATH": str(_SOURCES)}
    # Unbuffered: what a buffered reader has read ahead would come after what `read_for` reads.
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0, env=environment) as process:
        assert process.stdout is not None
        # Some are killed while they recover, most while they write.
        starting = chosen.random() < 0.2
        if not starting:
            assert process.stdout.readline() == b"open\n"
        life_s = chosen.uniform(0.05, 0.4) if starting else chosen.uniform(0.0, 0.15)
        output = read_for(process.stdout.fileno(), life_s)
        process.send_signal(signal.SIGKILL)
        output += process.stdout.read()
    # A truncated report may be of an acknowledged message, but no reader has seen it.
    lines = output.decode().split("\n")[:-1]
    reports = (line.split() for line in lines if line != "open")
    return {int(number): (int(queue), int(offset)) for number, queue, offset in reports}


def read_for(fd: int, seconds: float) -> bytes:
    """Read for a duration, so that the writer never blocks on its reader."""
    output = b""
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if selector.select(left):
                output += os.read(fd, 1 << 16)
    return output


def verify(store: Store, acknowledged: Acknowledged) -> None:
    for number, (queue_id, offset) in acknowledged.items():
        outcome = store.read("Killed", queue_id, QueueOffset(offset), 1)
        assert isinstance(outcome, Found), (number, queue_id, offset, outcome)
        view = decode_record(outcome.messages[0], check_crc=True)
        assert (view.queue_offset, view.stored_body) == (offset, body_of(number))
        if number % KEYS_EVERY == 0:
            # Each lookup searches thousands of small index files: for all keys it would take hours.
            assert store.messages_by_key("Killed", f"{number:032d}", 9, 0, 1 << 60), number


def kill_loop(directory: Path, kills: int, seed: int) -> int:
    chosen = random.Random(seed)
    acknowledged: Acknowledged = {}
    for kill in range(kills):
        # Far apart, so that the number of a stored but unreported message is not reused.
        first = (kill + 1) * 1_000_000
        new = run_and_kill(directory, first, chosen)
        assert not set(new.values()) & set(acknowledged.values()), "an offset was assigned twice"
        acknowledged |= new
        if kill % 2:
            # Otherwise the next writer recovers, and may be killed meanwhile.
            with Store.open(directory, CONFIG) as store:
                verify(store, new)
    with Store.open(directory, CONFIG) as store:
        verify(store, acknowledged)
        for queue_id in range(QUEUES):
            check_row(store, queue_id)
    return len(acknowledged)


def check_row(store: Store, queue_id: int) -> None:
    """Check that the queue holds each of its messages once, in order."""
    offset, end = store.queue_range("Killed", queue_id)
    numbers = []
    while offset < end:
        outcome = store.read("Killed", queue_id, offset, 32)
        assert isinstance(outcome, Found)
        views = [decode_record(message, check_crc=True) for message in outcome.messages]
        assert [view.queue_offset for view in views] == list(outcome.queue_offsets)
        numbers += [int(view.stored_body.partition(b":")[0]) for view in views]
        offset = outcome.next_offset
    assert numbers == sorted(set(numbers))


def test_kill_loop(tmp_path: Path) -> None:
    assert kill_loop(tmp_path / "store", kills=10, seed=1) > 50


@pytest.mark.long
def test_long_kill_loop(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    count = kill_loop(tmp_path / "store", kills=150, seed=2)
    record_property("acknowledged", count)
    assert count > 1000
