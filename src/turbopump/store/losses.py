"""What a store has lost that no crash explains: missing log files, or a log that ends too early.

A start compares the log with the evidence: the checkpoint's position, or, for a store of Apache
RocketMQ, whose checkpoint has timestamps only, the units of the queues. Queue units alone prove
nothing after a crash: after a power failure they may be ahead of the log.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from turbopump.core import Records
from turbopump.errors import StoreDamaged
from turbopump.machine.files import Files, OpenFiles
from turbopump.message import PhysicalOffset
from turbopump.store.checkpoint import read_checkpoint
from turbopump.store.commit_log import CommitLog
from turbopump.store.config import UNIT_BYTES, StoreConfig
from turbopump.store.config_files import load_table
from turbopump.store.consume_queue import FILLER_SIZE, QueueKey
from turbopump.store.directory import StoreDirectory
from turbopump.store.log_end import LogEnd
from turbopump.store.outcomes import Units
from turbopump.store.segments import Segments, segment_files, segment_path
from turbopump.store.survey import expected_size, numbered_files, queue_directories, used_units
from turbopump.wire.bodies import ConsumerOffsets

_TOPICS_NAMED_MAX = 5
_FILES_NAMED_MAX = 3
_COPIED_AT_ONCE = 1024 * 1024
_POSITION_MAX = 1 << 60
"""A unit that points further is damaged, and proves nothing."""

Range = tuple[int, int]
"""Positions in the log: the first, and the one after the last."""

_EVERYWHERE: Range = (0, (1 << 63) - 1)


class Losses(Struct, frozen=True):
    """What a log lacks, and where it continues once the loss is accepted."""

    directory: Path
    segment_bytes: int
    reason: str
    topics: dict[str, int]
    """Approximate number of lost messages by topic."""
    queue_ends: dict[QueueKey, int]
    """The offset after the last known message of each queue."""
    lost: tuple[Range, ...] = ()
    """Ranges that have no messages any more."""
    missing: tuple[Range, ...] = ()
    """Those of them that are missing files, followed by others."""
    cut: tuple[int, ...] = ()
    """Starts of files that are too short."""
    ends_at: int = 0
    resume_at: int = 0
    """Where the log ends too early, and where the next message goes; 0 if its end is intact."""
    has_log: bool = True
    """Whether the log has any files."""
    is_size_known: bool = True
    """Whether the remaining files show what size they should have."""

    @property
    def messages(self) -> int:
        return sum(self.topics.values())

    def __str__(self) -> str:
        command = f"turbopump store repair {self.directory}"
        if not self.is_size_known:
            command += f" --segment-bytes {self.segment_bytes}"
        return (
            f"{self.directory}: {self.reason}\n"
            f"  Lost: {_topics_text(self.topics)}.\n"
            "  Is a file system not mounted? Nothing was changed: mount it, or restore the files,"
            " and start again.\n"
            f"  To continue without these messages: {command}"
        )


def check_files(directory: StoreDirectory, segment_bytes: int) -> None:
    """Refuse a log that lacks files; changes nothing on disk."""
    found = segment_files(directory.files, directory.commit_log)
    if found and found[-1][1] == 0:
        # Killed between creating the file and setting its size.
        found.pop()
    sizes = [size for _, size in found]
    steps = [right[0] - left[0] for left, right in itertools.pairwise(found)]
    if found and all(each == segment_bytes for each in (*sizes, *steps)):
        return
    if any(size > segment_bytes for size in sizes) or any(step % segment_bytes for step in steps):
        # The configured size differs, which loading the log reports.
        return
    losses = find_losses(directory.files, directory.root, segment_bytes)
    if losses is not None:
        raise StoreDamaged(str(losses))


def find_losses(files: Files, root: Path, segment_bytes: int | None = None) -> Losses | None:
    """Compare the log with the evidence for its end; None if nothing is missing."""
    directory = StoreDirectory(root, files)
    row = [file for file in numbered_files(files, directory.commit_log, []) if file[2]]
    guess = expected_size([row]) or StoreConfig().segment_bytes
    size = segment_bytes or guess
    queues = list(queue_units(files, directory.queues))
    if not row:
        losses = _losses_of_all(directory, size, queues)
    else:
        for path, _, found in row:
            if found > size:
                raise StoreDamaged(f"{path} has {found} bytes instead of {size}: restore it")
        sizes = {start: found for _, start, found in row}
        losses = _Search(directory, size, sizes, queues).run()
    return losses and replace(losses, is_size_known=size == guess)


# --- a log without files --------------------------------------------------------------------------


def _losses_of_all(
    directory: StoreDirectory, segment_bytes: int, queues: Sequence[QueueUnits]
) -> Losses | None:
    evidence = _evidence(directory, queues)
    if evidence is None:
        return None
    checkpoint = read_checkpoint(directory.files, directory.checkpoint)
    end = max([checkpoint.log_end, *(queue.physical_end for queue in queues)])
    has_directory = directory.files.is_directory(directory.commit_log)
    state = "has no files" if has_directory else "does not exist"
    # After everything that existed: the units of the queues then point to deleted messages.
    resume_at = -(-max(end, 1) // segment_bytes) * segment_bytes
    return Losses(
        directory=directory.root,
        segment_bytes=segment_bytes,
        reason=f"{directory.commit_log} {state}, but {evidence}",
        topics=_lost_by_topic(queues, [_EVERYWHERE]),
        queue_ends={queue.key: queue.end for queue in queues},
        resume_at=resume_at,
        has_log=False,
    )


def _evidence(directory: StoreDirectory, queues: Sequence[QueueUnits]) -> str | None:
    """Return the evidence that a log without files had messages that no crash explains."""
    files = directory.files
    checkpoint = read_checkpoint(files, directory.checkpoint)
    if checkpoint.log_ms or checkpoint.log_end:
        to = f" up to position {checkpoint.log_end:,}" if checkpoint.log_end else ""
        return f"{directory.checkpoint} says that messages were on disk{to}"
    has_directory = files.is_directory(directory.commit_log)
    if directory.has_crashed and has_directory:
        # The very first messages, and the power failed before the log was synced.
        return None
    used = [queue for queue in queues if queue.physical_end > 0]
    if used:
        return f"{len(used)} queues in {directory.queues} refer to its messages"
    offsets = directory.config / "consumerOffset.json"
    if has_directory:
        # Groups may commit any offset before the first message arrives.
        return None
    table = load_table(files, offsets, ConsumerOffsets) or ConsumerOffsets()
    if any(offset > 0 for queues in table.offset_table.values() for offset in queues.values()):
        return f"{offsets} says that groups have consumed messages"
    return None


# --- a log that lacks some ------------------------------------------------------------------------


class _Search:
    """Scans a log that has files once: for gaps between them, and an end that is too early."""

    def __init__(
        self,
        directory: StoreDirectory,
        segment_bytes: int,
        sizes: Mapping[int, int],
        queues: Sequence[QueueUnits],
    ) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._sizes = sizes
        self._starts = sorted(sizes)
        self._queues = queues
        self._queue_ends = {queue.key: queue.end for queue in queues}

    def run(self) -> Losses | None:
        size = self._segment_bytes
        gaps = [
            (left + size, right)
            for left, right in itertools.pairwise(self._starts)
            if right - left != size
        ]
        if any((end - start) % size for start, end in gaps):
            raise StoreDamaged(f"{self._directory.commit_log}: file names do not match file sizes")
        cut = [start for start in self._starts if self._sizes[start] < size]
        cut_before = [(start + self._sizes[start], start + size) for start in cut]
        end, vouched = self._find_end()
        resume_at = 0
        lost = [*gaps, *(each for each in cut_before if each[1] <= self._starts[-1])]
        if end < vouched:
            lost.append((end, _EVERYWHERE[1]))
            resume_at = end - end % size + size if end < self._starts[-1] + size else end
        if not lost and not cut:
            return None
        return Losses(
            directory=self._directory.root,
            segment_bytes=size,
            reason=self._reason(gaps, cut, end, vouched),
            topics=_lost_by_topic(self._queues, lost),
            queue_ends=self._queue_ends,
            lost=tuple(lost),
            missing=tuple(gaps),
            cut=tuple(cut),
            ends_at=end if resume_at else 0,
            resume_at=resume_at,
        )

    def _find_end(self) -> tuple[int, int]:
        """Return where the log ends, and where it should."""
        files = self._directory.files
        segments = Segments(
            self._directory.commit_log, self._segment_bytes, files, self._directory.spare
        )
        segments.starts = tuple(self._last_run())
        mapped_max = StoreConfig().mapped_segments_max
        log = _PaddedLog(segments, files, OpenFiles(files, 8), mapped_max, nullcontext())
        queues_end = max((queue.physical_end for queue in self._queues), default=-1)
        checkpoint = read_checkpoint(files, self._directory.checkpoint)
        crashed = self._directory.has_crashed
        found = LogEnd(log, checkpoint, PhysicalOffset(queues_end), crashed=crashed)
        try:
            return found.find(self._note), found.vouched
        finally:
            log.close()

    def _last_run(self) -> list[int]:
        run = [self._starts[-1]]
        for start in reversed(self._starts[:-1]):
            if run[0] - start != self._segment_bytes:
                break
            run.insert(0, start)
        return run

    def _note(self, found: Records) -> None:
        for topic, queue_id, part in found.by_queue():
            key = topic.decode(), queue_id
            end = max(part.queue_offsets()) + 1
            self._queue_ends[key] = max(self._queue_ends.get(key, 0), end)

    def _reason(self, gaps: list[Range], cut: list[int], end: int, vouched: int) -> str:
        size = self._segment_bytes
        missing = [start for gap in gaps for start in range(*gap, size)]
        missing += range(self._starts[-1] + size, vouched, size)
        parts = []
        if missing:
            names = [_name(start) for start in missing[:_FILES_NAMED_MAX]]
            more = len(missing) - _FILES_NAMED_MAX
            names += [f"{more:,} more"] if more > 0 else []
            parts.append(f"files are missing: {', '.join(names)}")
        parts += [
            f"{_name(start)} has {self._sizes[start]} bytes instead of {size}" for start in cut
        ]
        if end < vouched:
            parts.append(f"it ends at position {end:,}, but {vouched:,} was on disk")
        return f"{self._directory.commit_log} is not complete: {'; '.join(parts)}"


def _name(start: int) -> str:
    return segment_path(Path(), start).name


class _PaddedLog(CommitLog):
    """A log that reads files that are too short as if they ended with zeros."""

    def _view(self, start: int) -> memoryview:
        segment = self._segment(start)
        found = self._files.size(segment.fd)
        if segment.mapped is None and found < segment.size:
            padded = bytearray(segment.size)
            for at in range(0, found, _COPIED_AT_ONCE):
                data = self._files.read(segment.fd, _COPIED_AT_ONCE, at)
                padded[at : at + len(data)] = data
            segment.mapped = memoryview(padded)
        return super()._view(start)


def _topics_text(topics: dict[str, int]) -> str:
    if not topics:
        return "an unknown number of messages"
    most = sorted(topics.items(), key=lambda each: -each[1])
    named = ", ".join(f"{topic} {count:,}" for topic, count in most[:_TOPICS_NAMED_MAX])
    left = len(most) - _TOPICS_NAMED_MAX
    more = f" and {left:,} more topics" if left > 0 else ""
    return f"about {sum(topics.values()):,} messages ({named}{more})"


def _lost_by_topic(queues: Sequence[QueueUnits], lost: Sequence[Range]) -> dict[str, int]:
    topics = Counter[str]()
    for queue in queues:
        topics[queue.topic] += queue.count_in(lost)
    return {topic: count for topic, count in sorted(topics.items()) if count}


# --- queues ---------------------------------------------------------------------------------------


class QueueUnits:
    """The units of one queue, read from its files without opening the store."""

    def __init__(self, topic: str, queue_id: int, files: list[tuple[Path, int, Units]]) -> None:
        self.topic = topic
        self.key: QueueKey = (topic, queue_id)
        self.files = files
        """Path, first offset and units of each file."""

    @property
    def end(self) -> int:
        """The offset after the last unit."""
        return max((first + len(units) for _, first, units in self.files if len(units)), default=0)

    @property
    def physical_end(self) -> int:
        """Position after the last message of the queue; -1 if it has none."""
        ends = [
            int(units["physical_offset"][-1]) + int(units["size"][-1])
            for _, _, units in self.files
            if len(units) and units["size"][-1] != FILLER_SIZE
        ]
        return max((end for end in ends if end < _POSITION_MAX), default=-1)

    def count_in(self, ranges: Sequence[Range]) -> int:
        """Count the messages that lie in some ranges of the log."""
        return sum(int(np.count_nonzero(lost_in(units, ranges))) for _, _, units in self.files)


def lost_in(units: Units, ranges: Sequence[Range]) -> NDArray[np.bool_]:
    """Return which units point into some ranges of the log."""
    positions = units["physical_offset"]
    ends = positions + units["size"]
    lost = np.zeros(len(units), np.bool_)
    for start, end in ranges:
        lost |= (ends > start) & (positions < end)
    lost &= units["size"] != FILLER_SIZE
    return lost


def queue_units(files: Files, directory: Path) -> Iterator[QueueUnits]:
    """Read all queues."""
    for topic, queue_id, path in queue_directories(files, directory, []):
        found = [
            (file, start // UNIT_BYTES, used_units(files, file)[0])
            for file, start, _ in numbered_files(files, path, [])
        ]
        yield QueueUnits(topic, queue_id, found)
