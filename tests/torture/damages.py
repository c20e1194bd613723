"""Kinds of damage to a stopped store, each with what it may cost."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

UNIT = 20
TABLES = ("topics.json", "consumerOffset.json", "subscriptionGroup.json", "delayOffset.json")


@dataclass(frozen=True, slots=True)
class Stored:
    """A message as it was stored before the damage."""

    topic: str
    queue_id: int
    offset: int
    position: int
    size: int
    body: bytes


@dataclass
class Damaged:
    """A store, and what was done to it."""

    store: Path
    messages: Sequence[Stored]
    segment_bytes: int
    chance: random.Random
    harmed: set[tuple[str, int, int]] = field(default_factory=set)
    """Messages whose bytes in the log were altered."""
    names: set[str] = field(default_factory=set)
    """Texts of which an error must mention at least one."""
    may_refuse: bool = False
    """Whether the broker may refuse to start, and wait for an operator."""
    offsets_may_change: bool = False
    only_verify_notices: bool = False
    """Whether a start mistakes the damage for retention, so that only verify finds it."""
    must_report: bool = False
    """Whether the log must report something although no message is damaged."""
    what: str = ""

    @property
    def log_files(self) -> list[Path]:
        return sorted((self.store / "commitlog").iterdir())

    @property
    def end(self) -> int:
        """Where the log's last record ends."""
        return max(each.position + each.size for each in self.messages)

    def some_message(self) -> Stored:
        return self.chance.choice(self.messages)

    def harm(self, begin: int, end: int) -> None:
        """Record that these bytes of the log are damaged."""
        for each in self.messages:
            if each.position < end and begin < each.position + each.size:
                self.harmed.add((each.topic, each.queue_id, each.offset))
        self.names |= {"commitlog", f"{begin // self.segment_bytes * self.segment_bytes:020d}"}

    def overwrite_log(self, position: int, data: bytes) -> None:
        first = position // self.segment_bytes * self.segment_bytes
        path = self.store / "commitlog" / f"{first:020d}"
        overwrite(path, position - first, data)
        self.harm(position, position + len(data))


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def flip(path: Path, at: int, bit: int) -> None:
    byte = path.read_bytes()[at]
    overwrite(path, at, bytes([byte ^ 1 << bit]))


def truncate(path: Path, length: int) -> None:
    with path.open("r+b") as file:
        file.truncate(length)


# --- the log --------------------------------------------------------------------------------------


def log_bit(case: Damaged) -> None:
    """A flipped bit anywhere in one record."""
    message = case.some_message()
    at = message.position + case.chance.choice(
        (case.chance.randrange(message.size), case.chance.randrange(min(88, message.size)))
    )
    first = at // case.segment_bytes * case.segment_bytes
    bit = case.chance.randrange(8)
    flip(case.store / "commitlog" / f"{first:020d}", at - first, bit)
    case.harm(at, at + 1)
    case.what = f"bit {bit} of byte {at - message.position} of the record at {message.position}"
    case.may_refuse = True


def log_garbage(case: Damaged) -> None:
    """Noise over some records."""
    _over_records(case, case.chance.randbytes)


def log_zeroes(case: Damaged) -> None:
    """Zeroes over some records, as from a lost page."""
    _over_records(case, bytes)


def _over_records(case: Damaged, content: Callable[[int], bytes]) -> None:
    first = case.some_message().position
    last = first // case.segment_bytes * case.segment_bytes + case.segment_bytes
    length = min(4096, last - first, case.end - first)
    case.overwrite_log(first, content(length))
    case.what = f"{length} bytes at {first}"
    case.may_refuse = True


def log_cut_last(case: Damaged) -> None:
    """The newest file is shorter than what the checkpoint vouches for."""
    path = case.log_files[-1]
    first = int(path.name)
    length = case.chance.randrange(max(1, case.end - first))
    truncate(path, length)
    case.harm(first + length, case.end)
    case.what = f"{path.name} cut to {length} bytes"
    case.may_refuse = True


def log_cut_middle(case: Damaged) -> None:
    """A file in the middle is shorter than it was."""
    path = case.chance.choice(case.log_files[1:-1])
    first, length = int(path.name), case.chance.randrange(case.segment_bytes)
    truncate(path, length)
    case.harm(first + length, first + case.segment_bytes)
    case.what = f"{path.name} cut to {length} bytes"
    case.may_refuse = True


def log_lost_middle(case: Damaged) -> None:
    """A file in the middle is gone."""
    _lose(case, case.chance.choice(case.log_files[1:-1]))


def log_lost_last(case: Damaged) -> None:
    """The newest file with messages is gone."""
    _lose(case, [path for path in case.log_files if int(path.name) < case.end][-1])


def _lose(case: Damaged, path: Path) -> None:
    path.unlink()
    case.harm(int(path.name), int(path.name) + case.segment_bytes)
    case.what = path.name
    case.may_refuse = True


def log_empty(case: Damaged) -> None:
    """The log's directory is empty, as when a mount is missing."""
    for path in case.log_files:
        path.unlink()
    case.harm(0, case.end)
    case.may_refuse = True


def log_missing(case: Damaged) -> None:
    """The log's directory is gone."""
    shutil.rmtree(case.store / "commitlog")
    case.harm(0, case.end)
    case.may_refuse = True


# --- what can be rebuilt --------------------------------------------------------------------------


def queue_bit(case: Damaged) -> None:
    """A flipped bit in one unit of a queue."""
    path, units = _queue_file(case)
    at, bit = case.chance.randrange(units * UNIT), case.chance.randrange(8)
    flip(path, at, bit)
    case.what = f"bit {bit} of byte {at % UNIT} of a unit"


def queue_garbage(case: Damaged) -> None:
    """Noise over units of a queue."""
    path, units = _queue_file(case)
    at = case.chance.randrange(units) * UNIT
    overwrite(path, at, case.chance.randbytes(min(400, units * UNIT - at)))


def queue_cut(case: Damaged) -> None:
    """A queue's file is shorter than it was."""
    path, units = _queue_file(case)
    truncate(path, case.chance.randrange(units * UNIT))


def queue_file_lost(case: Damaged) -> None:
    """A file of a queue other than the first is gone."""
    path, _ = _queue_file(case)
    max(path, sorted(path.parent.iterdir())[1]).unlink()


def queue_begin_lost(case: Damaged) -> None:
    """The first file of a queue is gone, as after retention."""
    message = case.some_message()
    queue = case.store / "consumequeue" / message.topic / str(message.queue_id)
    min(queue.iterdir()).unlink()
    case.only_verify_notices = True


def queue_lost(case: Damaged) -> None:
    """A whole queue is gone."""
    shutil.rmtree(_queue_file(case)[0].parent)


def queues_lost(case: Damaged) -> None:
    """All queues are gone."""
    shutil.rmtree(case.store / "consumequeue")


def _queue_file(case: Damaged) -> tuple[Path, int]:
    """Return a file of a queue, and the number of its used units."""
    message = case.some_message()
    queue = case.store / "consumequeue" / message.topic / str(message.queue_id)
    path = case.chance.choice(sorted(queue.iterdir()))
    count = 1 + max(
        each.offset
        for each in case.messages
        if (each.topic, each.queue_id) == (message.topic, message.queue_id)
    )
    size = path.stat().st_size // UNIT
    return path, max(1, min(size, count - int(path.name) // UNIT))


def index_garbage(case: Damaged) -> None:
    """Noise over the newest file of the key index."""
    path = max((case.store / "index").iterdir())
    overwrite(path, 0, case.chance.randbytes(min(4096, path.stat().st_size)))
    case.names |= {"index", path.name}


def index_lost(case: Damaged) -> None:
    """The key index is gone."""
    shutil.rmtree(case.store / "index")
    case.names.add("index")


def checkpoint_garbage(case: Damaged) -> None:
    """Noise in the checkpoint."""
    path = case.store / "checkpoint"
    overwrite(path, 0, case.chance.randbytes(min(64, path.stat().st_size)))
    case.names.add("checkpoint")
    case.may_refuse = True


def checkpoint_lost(case: Damaged) -> None:
    """The checkpoint is gone."""
    (case.store / "checkpoint").unlink()
    case.names.add("checkpoint")


# --- tables ---------------------------------------------------------------------------------------


def table_empty(case: Damaged) -> None:
    """An empty table file."""
    _table(case).write_bytes(b"")


def table_object(case: Damaged) -> None:
    """A table without entries."""
    _table(case).write_bytes(b"{}")


def table_garbage(case: Damaged) -> None:
    """A table that is not JSON."""
    _table(case).write_bytes(case.chance.randbytes(200))


def table_lost(case: Damaged) -> None:
    """A table that is gone."""
    _table(case).unlink()


def tables_lost(case: Damaged) -> None:
    """All tables are gone, with their backups."""
    shutil.rmtree(case.store / "config")
    case.names.add("config")
    case.may_refuse = case.offsets_may_change = case.must_report = True


def _table(case: Damaged) -> Path:
    path = case.store / "config" / case.chance.choice(TABLES[:2])
    backup = path.with_name(path.name + ".bak")
    if case.chance.random() < 0.5 and backup.exists():
        backup.unlink()
    case.what = f"{path.name}, {'with' if backup.exists() else 'without'} a backup"
    case.names |= {path.name, "config"}
    case.may_refuse = case.must_report = True
    case.offsets_may_change = path.name == "consumerOffset.json"
    return path


Damage = Callable[[Damaged], None]

DAMAGES: tuple[Damage, ...] = (
    log_bit, log_garbage, log_zeroes, log_cut_last, log_cut_middle, log_lost_middle, log_lost_last,
    log_empty, log_missing, queue_bit, queue_garbage, queue_cut, queue_file_lost, queue_begin_lost,
    queue_lost, queues_lost, index_garbage, index_lost, checkpoint_garbage, checkpoint_lost,
    table_empty, table_object, table_garbage, table_lost, tables_lost,
)  # fmt: skip


def endless(chance: random.Random) -> Iterator[Damage]:
    """Yield all kinds of damage repeatedly, in a new random order each time."""
    while True:
        yield from chance.sample(DAMAGES, len(DAMAGES))
