"""What a store has lost that no crash explains: missing log files, or a log that ends too early.

A start compares the log with what vouches for it: the checkpoint's position, or, for a store of
Apache RocketMQ, whose checkpoint has timestamps only, the units of the queues. Queue units alone
prove nothing after a crash: after a power failure they may be ahead of the log.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from turbopump.errors import StoreDamaged
from turbopump.message import PhysicalOffset
from turbopump.store.checkpoint import Checkpoint, read_checkpoint
from turbopump.store.commit_log import CommitLog, scan
from turbopump.store.config import UNIT_BYTES, StoreConfig
from turbopump.store.config_files import load_table
from turbopump.store.consume_queue import FILLER_SIZE, QueueKey
from turbopump.store.directory import StoreDirectory
from turbopump.store.files import Files, OpenFiles
from turbopump.store.outcomes import Units
from turbopump.store.scan_start import scan_start
from turbopump.store.segments import Segments, segment_files
from turbopump.store.survey import expected_size, numbered_files, queue_directories, used_units
from turbopump.wire.bodies import ConsumerOffsets
from turbopump.wire.record import RecordEntry

_TOPICS_TOLD = 5
_FILES_TOLD = 3
_POSITION_MAX = 1 << 60
"""A unit that points further is damaged, and proves nothing."""

Range = tuple[int, int]
"""Positions of the log: the first, and the one behind the last."""

_EVERYWHERE: Range = (0, (1 << 63) - 1)


class Losses(Struct, frozen=True):
    """What is missing of a log, and where the log continues once that is accepted."""

    directory: Path
    segment_bytes: int
    reason: str
    topics: dict[str, int]
    """About how many messages of each topic are lost."""
    queue_ends: dict[QueueKey, int]
    """The offset behind the last message that is known of each queue."""
    lost: tuple[Range, ...] = ()
    """Where no messages are any more."""
    missing: tuple[Range, ...] = ()
    """Which of that is missing files, with others behind them."""
    damaged: tuple[Range, ...] = ()
    """From where to the end of a file it cannot be read."""
    resume_at: int = 0
    """Where the next message goes; 0 if the log's end is intact."""
    has_log: bool = True
    """Whether the log has any files."""

    @property
    def messages(self) -> int:
        return sum(self.topics.values())

    def __str__(self) -> str:
        command = f"turbopump store repair {self.directory}"
        if not self.has_log and self.segment_bytes != StoreConfig().segment_bytes:
            command += f" --segment-bytes {self.segment_bytes}"
        return (
            f"{self.directory}: {self.reason}\n"
            f"  Lost: {_told_topics(self.topics)}.\n"
            "  Is a file system not mounted? Nothing was changed: mount it, or restore the files,"
            " and start again.\n"
            f"  To continue without these messages: {command}"
        )


def vouched_end(
    checkpoint: Checkpoint, queues_end: PhysicalOffset, newest_ms: int, *, crashed: bool
) -> PhysicalOffset:
    """Return the position that the log must reach, whatever a crash may have taken.

    ``queues_end`` is where the last message ends that a queue has a unit of, ``newest_ms`` the
    store time of the last message found in the log.
    """
    if checkpoint.log_end:
        return checkpoint.log_end
    if not crashed or checkpoint.log_ms > newest_ms:
        return max(queues_end, PhysicalOffset(0))
    return PhysicalOffset(0)


def check_files(directory: StoreDirectory, segment_bytes: int) -> None:
    """Refuse a log that lacks files; changes nothing on disk."""
    found = segment_files(directory.commit_log)
    starts = [start for start, _ in found]
    steps = [right - left for left, right in itertools.pairwise(starts)]
    if starts and all(step == segment_bytes for step in steps):
        return
    if any(size not in {0, segment_bytes} for _, size in found):
        # A matter of configuration or of single files, which loading the log reports.
        return
    losses = find_losses(directory.root, segment_bytes)
    if losses is not None:
        raise StoreDamaged(str(losses))


def find_losses(root: Path, segment_bytes: int | None = None) -> Losses | None:
    """Compare the log with what vouches for it; None when nothing is missing."""
    directory = StoreDirectory(root, Files())
    row = [(path, start, size) for path, start, size in _log_files(directory) if size]
    size = segment_bytes or expected_size([row]) or StoreConfig().segment_bytes
    queues = list(queue_units(directory.queues))
    if not row:
        return _losses_of_all(directory, size, queues)
    for path, _, found in row:
        if found != size:
            raise StoreDamaged(f"{path} has {found} bytes instead of {size}: restore it")
    return _Search(directory, size, [start for _, start, _ in row], queues).run()


def _log_files(directory: StoreDirectory) -> list[tuple[Path, int, int]]:
    return numbered_files(directory.commit_log, [])


# --- a log without files --------------------------------------------------------------------------


def _losses_of_all(
    directory: StoreDirectory, segment_bytes: int, queues: Sequence[QueueUnits]
) -> Losses | None:
    evidence = _evidence(directory, queues)
    if evidence is None:
        return None
    checkpoint = read_checkpoint(directory.checkpoint)
    end = max([checkpoint.log_end, *(queue.physical_end for queue in queues)])
    state = "has no files" if directory.commit_log.is_dir() else "does not exist"
    topics = Counter[str]()
    for queue in queues:
        topics[queue.topic] += queue.count_in([_EVERYWHERE])
    # Behind whatever was there: the units of the queues then lead to messages that are deleted.
    resume_at = -(-max(end, 1) // segment_bytes) * segment_bytes
    return Losses(
        directory=directory.root,
        segment_bytes=segment_bytes,
        reason=f"{directory.commit_log} {state}, but {evidence}",
        topics=_without_zeros(topics),
        queue_ends={queue.key: queue.end for queue in queues},
        resume_at=resume_at,
        has_log=False,
    )


def _evidence(directory: StoreDirectory, queues: Sequence[QueueUnits]) -> str | None:
    """Return what says that a log without files had messages that no crash takes away."""
    checkpoint = read_checkpoint(directory.checkpoint)
    if checkpoint.log_ms or checkpoint.log_end:
        to = f" up to position {checkpoint.log_end:,}" if checkpoint.log_end else ""
        return f"{directory.checkpoint} says that messages were on disk{to}"
    is_new = directory.commit_log.is_dir()
    if directory.abort.exists() and is_new:
        # The first messages of all, and the power failed before the log was forced to disk.
        return None
    used = [queue for queue in queues if queue.physical_end > 0]
    if used:
        return f"{len(used)} queues in {directory.queues} refer to its messages"
    offsets = directory.config / "consumerOffset.json"
    if is_new:
        # Groups may commit whatever they like before the first message comes.
        return None
    table = load_table(offsets, ConsumerOffsets) or ConsumerOffsets()
    if any(offset > 0 for queues in table.offset_table.values() for offset in queues.values()):
        return f"{offsets} says that groups have consumed messages"
    return None


# --- a log that lacks some ------------------------------------------------------------------------


class _Search:
    """One pass over a log that has files: gaps between them, damage, an end that is too early."""

    def __init__(
        self,
        directory: StoreDirectory,
        segment_bytes: int,
        starts: list[int],
        queues: Sequence[QueueUnits],
    ) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._starts = starts
        self._queues = queues
        self._checkpoint = read_checkpoint(directory.checkpoint)
        self._crashed = directory.abort.exists()
        self._newest_ms = 0
        self._queue_ends = {queue.key: queue.end for queue in queues}

    def run(self) -> Losses | None:
        size = self._segment_bytes
        gaps = [
            (left + size, right)
            for left, right in itertools.pairwise(self._starts)
            if right - left != size
        ]
        if any((end - start) % size for start, end in gaps):
            raise StoreDamaged(
                f"{self._directory.commit_log}: names of files do not fit their size"
            )
        damaged, end = self._scan_last_run()
        lost, resume_at, vouched = [*gaps, *damaged], 0, self._vouched()
        if end < vouched:
            lost.append((end, _EVERYWHERE[1]))
            resume_at = end - end % size + size if end < self._starts[-1] + size else end
            if end < resume_at:
                damaged.append((end, resume_at))
        if not lost:
            return None
        reason = self._reason(gaps, damaged, end if end < vouched else None)
        return self._losses(reason, lost, gaps, damaged, resume_at)

    def _vouched(self) -> int:
        queues_end = max((queue.physical_end for queue in self._queues), default=-1)
        return vouched_end(
            self._checkpoint, PhysicalOffset(queues_end), self._newest_ms, crashed=self._crashed
        )

    def _scan_last_run(self) -> tuple[list[Range], int]:
        """Return what is damaged in the part that a start reads, and where the log ends."""
        files = Files()
        segments = Segments(
            self._directory.commit_log, self._segment_bytes, files, self._directory.spare
        )
        segments.starts = tuple(self._last_run())
        log = CommitLog(segments, files, OpenFiles(files, 8), StoreConfig().mapped_segments_max)
        try:
            return self._scan(log)
        finally:
            log.close()

    def _last_run(self) -> list[int]:
        run = [self._starts[-1]]
        for start in reversed(self._starts[:-1]):
            if run[0] - start != self._segment_bytes:
                break
            run.insert(0, start)
        return run

    def _scan(self, log: CommitLog) -> tuple[list[Range], int]:
        damaged: list[Range] = []
        position = scan_start(log, self._checkpoint, crashed=self._crashed)
        synced_to = (self._checkpoint.log_end or None) if self._crashed else None
        while True:
            end = position
            for found in scan(log, position, check_crc=True, synced_to=synced_to):
                if isinstance(found, RecordEntry):
                    self._note(found)
                else:
                    end = found
            following = PhysicalOffset(end + -end % self._segment_bytes)
            more = any(log.first_store_timestamp_ms(one) for one in log.starts if one > end)
            if not more or end >= self._vouched():
                return damaged, end
            if end == following:
                following = PhysicalOffset(end + self._segment_bytes)
            damaged.append((end, following))
            position = following

    def _note(self, entry: RecordEntry) -> None:
        self._newest_ms = max(self._newest_ms, entry.store_timestamp_ms)
        key = entry.topic.decode(), entry.queue_id
        self._queue_ends[key] = max(self._queue_ends.get(key, 0), entry.queue_offset + 1)

    def _losses(
        self,
        reason: str,
        lost: list[Range],
        gaps: list[Range],
        damaged: list[Range],
        resume_at: int,
    ) -> Losses:
        topics = Counter[str]()
        for queue in self._queues:
            topics[queue.topic] += queue.count_in(lost)
        return Losses(
            directory=self._directory.root,
            segment_bytes=self._segment_bytes,
            reason=reason,
            topics=_without_zeros(topics),
            queue_ends=self._queue_ends,
            lost=tuple(lost),
            missing=tuple(gaps),
            damaged=tuple(damaged),
            resume_at=resume_at,
        )

    def _reason(self, gaps: list[Range], damaged: list[Range], early_end: int | None) -> str:
        size, vouched = self._segment_bytes, self._vouched()
        last_end = self._starts[-1] + size
        missing = [start for gap in gaps for start in range(*gap, size)]
        parts = []
        if early_end is not None:
            parts.append(f"it ends at position {early_end:,}, but {vouched:,} was on disk")
            missing += range(last_end, vouched, size)
        elif damaged:
            parts.append(f"no message can be read at position {damaged[0][0]:,}")
        if missing:
            names = [Segments.path_in(Path(), start).name for start in missing[:_FILES_TOLD]]
            more = len(missing) - _FILES_TOLD
            names += [f"{more:,} more"] if more > 0 else []
            parts.insert(0, f"files are missing: {', '.join(names)}")
        return f"{self._directory.commit_log} is not complete: {'; '.join(parts)}"


def _told_topics(topics: dict[str, int]) -> str:
    if not topics:
        return "an unknown number of messages"
    most = sorted(topics.items(), key=lambda each: -each[1])
    told = ", ".join(f"{topic} {count:,}" for topic, count in most[:_TOPICS_TOLD])
    more = f" and {len(most) - _TOPICS_TOLD:,} more topics" if len(most) > _TOPICS_TOLD else ""
    return f"about {sum(topics.values()):,} messages ({told}{more})"


def _without_zeros(topics: Counter[str]) -> dict[str, int]:
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
        """The offset behind the last unit."""
        return max((first + len(units) for _, first, units in self.files if len(units)), default=0)

    @property
    def physical_end(self) -> int:
        """Position behind the last message of the queue; -1 when it has none."""
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
    """Tell which units lead into some ranges of the log."""
    positions = units["physical_offset"]
    lost = np.zeros(len(units), np.bool_)
    for start, end in ranges:
        lost |= (positions >= start) & (positions < end)
    lost &= units["size"] != FILLER_SIZE
    return lost


def queue_units(directory: Path) -> Iterator[QueueUnits]:
    """Read all queues."""
    for topic, queue_id, path in queue_directories(directory, []):
        files = [
            (file, start // UNIT_BYTES, used_units(file)[0])
            for file, start, _ in numbered_files(path, [])
        ]
        yield QueueUnits(topic, queue_id, files)
