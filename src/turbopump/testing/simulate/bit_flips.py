"""Flips bits in the files of a broker that is down, and records what that damages.

Only where damage can be detected: bodies have a checksum, units are compared with their records,
and a table is no longer valid JSON. Bodies only up to the checkpoint: beyond it, a start cannot
distinguish damage from a write that a crash has torn.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

from turbopump.errors import RecordError
from turbopump.machine.files import closing, read_file
from turbopump.machine.text_files import backup_of
from turbopump.message import MessageQueue
from turbopump.store.checkpoint import read_checkpoint
from turbopump.store.config import UNIT_BYTES
from turbopump.testing.simulate.bodies import key_of
from turbopump.testing.simulate.events import BitFlipped
from turbopump.testing.simulate.store_contents import offsets_in
from turbopump.testing.simulate.world import World
from turbopump.wire import properties
from turbopump.wire.bodies import ConsumerOffsets
from turbopump.wire.names import TRANSACTION_TOPICS
from turbopump.wire.record import MessageView, decode_record

_OFFSETS = "consumerOffset.json"
_TOPICS = "topics.json"
_TABLES = (_OFFSETS, _TOPICS, "delayOffset.json", "subscriptionGroup.json")
_UNIT_CHECKED_BYTES = 12
"""Position and size; what follows is the hash of the tag, or a time."""
_NOT_ASCII_BIT = 7


def flip_bits(world: World, name: str, count: int) -> int:
    """Flip bits of a broker's files; return how many, as there may be no files to damage yet."""
    chance = Random(f"{world.plan.seed} {name} {world.now_us}")  # noqa: S311 - the same in every run
    flips = BitFlips(world, name, chance)
    kinds = [flips.body, flips.body, flips.unit, flips.table]
    if not world.plan.transactions.keys:
        # Brokers find in the index which transactions have committed before a crash.
        kinds.append(flips.index)
    with world.reads_succeeding():
        return sum(chance.choice(kinds)() for _ in range(count))


class BitFlips:
    """Flips bits of one broker."""

    def __init__(self, world: World, name: str, chance: Random) -> None:
        self._world = world
        self._name = name
        self._chance = chance
        self._disk = world.disk(name)
        self._directory = world.store_directory(name)

    def body(self) -> bool:
        """Damage the body of a message."""
        found = list(self._messages())
        if not found:
            return False
        # The newest ones often: groups have not consumed those yet.
        path, at, view, key = self._chance.choice(found[-self._chance.choice((2, len(found))) :])
        around = len(view.topic.encode()) + 1 + len(view.stored_properties) + 2
        body_at = at + view.size - around - view.body_length
        flipped_at = body_at + self._chance.randrange(view.body_length)
        queue = MessageQueue(view.topic, self._name, view.queue_id)
        topic = view.properties.get(properties.REAL_TOPIC, view.topic)
        self._flip(
            path, flipped_at, self._chance.randrange(8), queue, view.queue_offset, key, topic
        )
        damaged = read_file(self._disk, path)[body_at : body_at + view.body_length]
        self._world.damaged[damaged] = key
        return True

    def unit(self) -> bool:
        """Damage a unit of a queue."""
        found = [
            (path, at)
            for path in self._files_below(self._directory.queues)
            for at in _used_units(read_file(self._disk, path))
        ]
        if found:
            path, at = self._chance.choice(found)
            at += self._chance.randrange(_UNIT_CHECKED_BYTES)
            self._flip(path, at, self._chance.randrange(8))
        return bool(found)

    def index(self) -> bool:
        """Damage a file of the key index."""
        found = [
            (path, span)
            for path in self._files_below(self._directory.index)
            for span in self._data_ranges(path)
        ]
        if found:
            path, span = self._chance.choice(found)
            self._flip(path, self._chance.randrange(*span), self._chance.randrange(8))
        return bool(found)

    def table(self) -> bool:
        """Damage a table that has a backup, so that it is no longer text."""
        found = [path for path in map(self._directory.config.joinpath, _TABLES) if self._may(path)]
        if not found:
            return False
        path = self._chance.choice(found)
        at, committed = self._chance.randrange(self._disk.file_size(path)), None
        if path.name == _OFFSETS:
            backup = ConsumerOffsets.decode(read_file(self._disk, backup_of(path)))
            committed = offsets_in(backup, self._name)
        self._flip(path, at, _NOT_ASCII_BIT, committed=committed)
        return True

    def _may(self, table: Path) -> bool:
        """Whether a table may be replaced by its backup; topics are not in any queue at first."""
        disk, backup = self._disk, backup_of(table)
        if not disk.exists(table) or not disk.exists(backup):
            return False
        text = read_file(disk, table)
        return text.isascii() and (table.name != _TOPICS or text == read_file(disk, backup))

    def _messages(self) -> Iterator[tuple[Path, int, MessageView, str]]:
        """Return the messages that may be damaged: file, position in it, message and key."""
        damaged = self._world.damaged
        for path, at, view in self._records():
            key = key_of(view.body) or damaged.get(view.body)
            if key is not None and view.topic not in TRANSACTION_TOPICS:
                yield path, at, view, key

    def _records(self) -> Iterator[tuple[Path, int, MessageView]]:
        end = read_checkpoint(self._disk, self._directory.checkpoint).log_end
        for path in self._disk.entries(self._directory.commit_log):
            data, start, at = read_file(self._disk, path), int(path.name), 0
            try:
                while start + at + (view := decode_record(data, at)).size <= end:
                    yield path, at, view
                    at += view.size
            except RecordError:
                # The filler at the end of the file.
                continue

    def _files_below(self, path: Path) -> list[Path]:
        if not self._disk.is_directory(path):
            return [path]
        return [file for each in self._disk.entries(path) for file in self._files_below(each)]

    def _data_ranges(self, path: Path) -> list[tuple[int, int]]:
        with closing(self._disk, self._disk.open_to_read(path)) as fd:
            return list(self._disk.data_ranges(fd, 0, self._disk.size(fd)))

    def _flip(
        self,
        path: Path,
        at: int,
        bit: int,
        queue: MessageQueue | None = None,
        offset: int = 0,
        key: str = "",
        topic: str = "",
        committed: dict[tuple[str, MessageQueue], int] | None = None,
    ) -> None:
        self._disk.flip_bit(path, at, bit)
        file = str(path.relative_to(self._directory.root))
        now_us = self._world.now_us
        self._world.history.add(
            BitFlipped(now_us, self._name, file, at, queue, offset, key, topic, committed)
        )


def _used_units(data: bytes) -> list[int]:
    """Return where the units of a queue's file begin that were written."""
    return [at for at in range(0, len(data), UNIT_BYTES) if any(data[at : at + UNIT_BYTES])]
