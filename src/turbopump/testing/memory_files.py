"""Files and directories in memory that know what would survive a power failure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

SECTOR_BYTES = 512
"""What a disk writes atomically."""
BLOCK_BYTES = 4096
"""What a file system allocates in one step."""


class MemoryFile:
    """The bytes of a file, and what the disk has instead of those not synced yet."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.blocks: set[int] = set()
        """Blocks that have ever been written; all others are a hole, which takes no space."""
        self.durable_size = 0
        self._unsynced: dict[int, bytes] = {}
        """What the disk has in sectors that were written since the last sync, oldest first."""
        self._dropped: dict[int, bytes] = {}
        """The same for sectors dropped by a failed sync: no later sync restores them."""
        self._syncs: list[Sync] = []
        """Syncs in progress."""
        self.locked_by: int | None = None
        self.cold: set[int] = set()
        """Blocks that are not in the machine's memory."""

    def is_cold(self, at: int, size: int) -> bool:
        """Whether reading some bytes takes an access to the disk."""
        return bool(self.cold) and not self.cold.isdisjoint(_blocks(at, size))

    def warm(self, at: int, size: int) -> bool:
        """Bring bytes into memory; return whether they were not there."""
        is_cold = self.is_cold(at, size)
        if is_cold:
            self.cold.difference_update(_blocks(at, size))
        return is_cold

    def write(self, data: bytes | bytearray | memoryview, at: int) -> None:
        end = at + len(data)
        if end > len(self.data):
            self._resize(end)
        if not data:
            return
        self._remember(at, end)
        self.data[at:end] = data
        self.blocks.update(_blocks(at, len(data)))
        self.warm(at, len(data))

    def truncate(self, size: int) -> None:
        """Cut the file, or extend it by a hole. A new size is on disk before a new name is."""
        if size < len(self.data):
            self._remember(size, len(self.data))
            self.blocks = {block for block in self.blocks if block * BLOCK_BYTES < size}
        self._resize(size)
        self.durable_size = max(self.durable_size, size)

    def new_blocks(self, at: int, size: int) -> int:
        """Return how many more blocks a write would take."""
        if not size:
            return 0
        return sum(block not in self.blocks for block in _blocks(at, size))

    def data_ranges(self, at: int, size: int) -> Iterator[tuple[int, int]]:
        """Return start and end of each range ever written from a position on."""
        start = end = -1
        for block in sorted(self.blocks):
            first, behind = max(block * BLOCK_BYTES, at), min((block + 1) * BLOCK_BYTES, size)
            if first >= behind:
                continue
            if first != end:
                if end > start:
                    yield start, end
                start = first
            end = behind
        if end > start:
            yield start, end

    def _resize(self, size: int) -> None:
        if size == len(self.data):
            return
        # Never in place: views into a map would forbid it. They keep what they show.
        resized = bytearray(size)
        kept = min(size, len(self.data))
        resized[:kept] = self.data[:kept]
        self.data = resized

    def _remember(self, at: int, end: int) -> None:
        unsynced, data = self._unsynced, self.data
        for sector in range(at // SECTOR_BYTES, (end + SECTOR_BYTES - 1) // SECTOR_BYTES):
            if sector not in unsynced:
                dropped = self._dropped.pop(sector, None)
                first = sector * SECTOR_BYTES
                before = data[first : first + SECTOR_BYTES]
                unsynced[sector] = bytes(before) if dropped is None else dropped

    # --- what the disk has ------------------------------------------------------------------------

    def begin_sync(self) -> Sync:
        """Note what a sync that begins now will have put on disk when it ends."""
        sync = Sync(self, self._unsynced, len(self.data))
        self._unsynced = {}
        self._syncs.append(sync)
        return sync

    def lose_power(self, random: Random | None) -> None:
        """Reset the file to what the disk has; by chance this includes unsynced data."""
        for sync in tuple(self._syncs):
            sync.abandon()
        size = len(self.data)
        if random is None or random.random() < 1 / 2:
            size = self.durable_size
        unsynced = {**self._dropped, **self._unsynced}
        for sector in _lost(list(unsynced), random):
            first = sector * SECTOR_BYTES
            before = unsynced[sector]
            if first + len(before) > len(self.data):
                self._resize(first + len(before))
            self.data[first : first + len(before)] = before
            self.blocks.add(first // BLOCK_BYTES)
        self._resize(size)
        self._unsynced, self._dropped = {}, {}
        self.durable_size = size

    def end_sync(self, sync: Sync, size: int | None, lost: dict[int, bytes]) -> None:
        """Note the end of a sync, with the size that is on disk now and what is not on disk."""
        self._syncs.remove(sync)
        if size is not None:
            self.durable_size = size
        # What was written since knows only what was to be on disk by now.
        self._unsynced = {**self._unsynced, **lost}

    def drop(self, sectors: dict[int, bytes]) -> None:
        """Drop sectors: they never reach the disk unless they are written again."""
        for sector, before in sectors.items():
            known = self._unsynced if sector in self._unsynced else self._dropped
            known[sector] = before


class Sync:
    """A sync in progress, until one of its methods ends it."""

    def __init__(self, file: MemoryFile, sectors: dict[int, bytes], size: int) -> None:
        self._file = file
        self._sectors = sectors
        self._size = size
        self._is_over = False

    def succeed(self) -> None:
        """Put everything on disk that was written before it began."""
        self._end(self._size, {})

    def fail(self) -> None:
        """Lose the data: the operating system reports it once, and then treats it as clean."""
        if self._end(None, {}):
            self._file.drop(self._sectors)

    def abandon(self) -> None:
        """End it without effect: the machine is gone."""
        self._end(None, self._sectors)

    def _end(self, size: int | None, lost: dict[int, bytes]) -> bool:
        was_over, self._is_over = self._is_over, True
        if not was_over:
            self._file.end_sync(self, size, lost)
        return not was_over


class MemoryDirectory:
    """Names, and which of them would survive a power failure."""

    def __init__(self) -> None:
        self.entries: dict[str, MemoryFile | MemoryDirectory] = {}
        self._durable: dict[str, MemoryFile | MemoryDirectory] = {}
        self._changes: list[tuple[str, MemoryFile | MemoryDirectory | None]] = []
        self.locked_by: int | None = None

    def put(self, name: str, node: MemoryFile | MemoryDirectory) -> None:
        self.entries[name] = node
        self._changes.append((name, node))

    def drop(self, name: str) -> None:
        del self.entries[name]
        self._changes.append((name, None))

    def sync(self) -> None:
        self._durable = dict(self.entries)
        self._changes.clear()

    def lose_power(self, random: Random | None) -> None:
        """Reset the names, and everything below them, to what the disk has.

        By chance, the disk has some of the changes that were not synced, but none without those
        before it in the same directory.
        """
        kept = 0 if random is None else random.randint(0, len(self._changes))
        for name, node in self._changes[:kept]:
            if node is None:
                self._durable.pop(name, None)
            else:
                self._durable[name] = node
        self.entries = dict(self._durable)
        self._changes.clear()
        for node in self.entries.values():
            node.lose_power(random)

    def walk(self) -> Iterator[MemoryFile | MemoryDirectory]:
        """Return everything below, and the directory itself."""
        yield self
        for node in self.entries.values():
            if isinstance(node, MemoryDirectory):
                yield from node.walk()
            else:
                yield node


def names_in(path: Path) -> tuple[str, ...]:
    """Return the names from the root to a path; a relative path begins at the root."""
    return path.parts[1:] if path.anchor else path.parts


def _blocks(at: int, size: int) -> range:
    """Return the blocks that some bytes lie in."""
    return range(at // BLOCK_BYTES, (at + size - 1) // BLOCK_BYTES + 1)


def _lost(sectors: list[int], random: Random | None) -> list[int]:
    """Choose the sectors that the disk lacks: all, none, by chance, one, or from one on."""
    if random is None:
        return sectors
    match random.randrange(5):
        case 0:
            return sectors
        case 1:
            return []
        case 2:
            return [sector for sector in sectors if random.random() < 1 / 2]
        case 3:
            # Such as in the middle of a body, with all that describes it in place.
            return random.sample(sectors, min(1, len(sectors)))
        case _:
            return sectors[random.randint(0, len(sectors)) :]
