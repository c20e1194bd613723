"""Store settings. In brackets: Apache RocketMQ's name for the same setting."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Self

from turbopump.errors import InvalidArgument
from turbopump.machine.process import memory_bytes
from turbopump.wire.delay_levels import DELAY_LEVELS, parse_delay_levels

UNIT_BYTES = 20
"""Size of one entry of a consume queue."""

_BLANK_BYTES = 8

DEFAULT_DELAY_LEVELS = parse_delay_levels(DELAY_LEVELS)


def _check_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value <= 0:
            raise InvalidArgument(f"{name} must be positive, got {value}")


class FlushMode(Enum):
    """When a message counts as stored."""

    ASYNC = "async"
    """Once the operating system has it: it survives a crash of the process, not a power failure."""
    SYNC = "sync"
    """Once the disk has it; until then it cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushConfig:
    """When written data is forced to disk."""

    mode: FlushMode = FlushMode.ASYNC
    """Whether messages wait for the disk [flushDiskType]."""
    interval_ms: int = 500
    """Asynchronous mode: how often the log is checked [flushIntervalCommitLog]."""
    dirty_bytes_min: int = 4 * 4096
    """Asynchronous mode: fewer unflushed bytes wait longer [flushCommitLogLeastPages]."""
    thorough_interval_ms: int = 10_000
    """Asynchronous mode: no byte waits longer than this [flushCommitLogThoroughInterval]."""
    queue_interval_ms: int = 1000
    """How long queue units and index entries may stay unwritten [flushIntervalConsumeQueue]."""
    heal_interval_ms: int = 1000
    """Interval of repair attempts after a failed write or flush."""

    def __post_init__(self) -> None:
        _check_positive(
            self, "interval_ms", "thorough_interval_ms", "queue_interval_ms", "heal_interval_ms"
        )
        if self.dirty_bytes_min < 0:
            raise InvalidArgument(f"dirty_bytes_min must be 0 or more, got {self.dirty_bytes_min}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """How much one read may return; the first message is always returned."""

    memory_bytes_max: int = 256 * 1024
    """Bytes of messages recent enough to be in memory [maxTransferBytesOnMessageInMemory]."""
    memory_count_max: int = 32
    """Messages recent enough to be in memory [maxTransferCountOnMessageInMemory]."""
    disk_bytes_max: int = 64 * 1024
    """Bytes of older messages [maxTransferBytesOnMessageInDisk]."""
    disk_count_max: int = 8
    """Older messages [maxTransferCountOnMessageInDisk]."""
    scan_units_max: int = 800
    """Units that a filter examines in one read [maxFilterMessageSize / 20]."""
    recent_bytes: int = field(default_factory=lambda: memory_bytes() * 40 // 100)
    """How far from the end of the log messages count as being in memory; by default 40 % of the
    machine's memory [accessMessageInMemoryMaxRatio]."""

    @classmethod
    def uniform(cls, *, bytes_max: int, count_max: int) -> Self:
        """Return the same limits for recent and old messages, for the broker's internal readers."""
        return cls(
            memory_bytes_max=bytes_max,
            memory_count_max=count_max,
            disk_bytes_max=bytes_max,
            disk_count_max=count_max,
            scan_units_max=count_max,
        )

    def __post_init__(self) -> None:
        names = ("memory_bytes_max", "memory_count_max", "disk_bytes_max", "disk_count_max")
        _check_positive(self, *names, "scan_units_max", "recent_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionConfig:
    """When the oldest segments are deleted, and when the disk counts as full."""

    reserved_ms: int = 72 * 3_600_000
    """Age of its newest message at which a segment may be deleted [fileReservedTime]."""
    delete_hours: frozenset[int] = frozenset({4})
    """Local hours of the day at which expired segments are deleted [deleteWhen]."""
    early_ratio: float = 0.75
    """Disk usage above which expired segments are deleted at any hour [diskMaxUsedSpaceRatio]."""
    forced_ratio: float = 0.85
    """Disk usage above which the oldest segment is deleted at any age [forcible clean ratio]."""
    full_ratio: float = 0.90
    """Disk usage above which messages are refused [disk full ratio]."""
    segments_per_run_max: int = 10
    """Segments that one run deletes at most, so that a run stays short."""

    def __post_init__(self) -> None:
        _check_positive(self, "reserved_ms", "segments_per_run_max")
        if not all(0 <= hour < 24 for hour in self.delete_hours):
            raise InvalidArgument(f"delete_hours must be 0 to 23, got {sorted(self.delete_hours)}")
        if not 0 < self.early_ratio <= self.forced_ratio <= self.full_ratio <= 1:
            raise InvalidArgument(
                f"disk ratios {self.early_ratio}, {self.forced_ratio}, {self.full_ratio}:"
                " expected 0 < early_ratio <= forced_ratio <= full_ratio <= 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Sizes of files and tables; a directory must always be opened with the same ones."""

    segment_bytes: int = 1024 * 1024 * 1024
    """Size of a commit log file [mappedFileSizeCommitLog]."""
    queue_segment_units: int = 300_000
    """Units in a consume queue file [mappedFileSizeConsumeQueue / 20]."""
    index_slots: int = 5_000_000
    """Hash slots of a key index file [maxHashSlotNum]."""
    index_entries: int = 20_000_000
    """Entries of a key index file, the unused first one included [maxIndexNum]."""
    index_enabled: bool = True
    """Whether messages can be found by key [messageIndexEnable]."""
    record_bytes_max: int = 4 * 1024 * 1024 + 64 * 1024
    """The largest stored message [maxMessageSize + 64 KiB]."""
    delay_levels: tuple[int, ...] = DEFAULT_DELAY_LEVELS
    """Milliseconds of delay of levels 1, 2, ...; for delivery times [messageDelayLevel]."""
    open_files_max: int = 512
    """Open queue and index files; opening one more closes the least recently used."""
    mapped_segments_max: int = 64
    """Commit log files mapped for reading."""
    check_crc_on_recovery: bool = True
    """Whether recovery compares bodies with their checksums [checkCRCOnRecover]."""
    clean_check_segments: int = 1
    """Last commit log files that are checked after a clean stop (Apache RocketMQ: 3)."""
    scrub_bytes_per_s: int = 0
    """Bytes of the log checked for damage each second, in the background; 0 turns it off."""
    flush: FlushConfig = FlushConfig()
    limits: ReadLimits = field(default_factory=ReadLimits)
    retention: RetentionConfig = RetentionConfig()

    def __post_init__(self) -> None:
        _check_positive(self, "segment_bytes", "queue_segment_units", "index_slots")
        _check_positive(self, "record_bytes_max", "mapped_segments_max", "clean_check_segments")
        if self.index_entries < 2:
            raise InvalidArgument(f"index_entries must be at least 2, got {self.index_entries}")
        if self.scrub_bytes_per_s < 0:
            raise InvalidArgument(
                f"scrub_bytes_per_s must be 0 or more, got {self.scrub_bytes_per_s}"
            )
        if self.open_files_max < 8:
            raise InvalidArgument(f"open_files_max must be at least 8, got {self.open_files_max}")
        if any(delay_ms < 0 for delay_ms in self.delay_levels):
            raise InvalidArgument(f"delay_levels must not be negative, got {self.delay_levels}")

    @property
    def queue_segment_bytes(self) -> int:
        return self.queue_segment_units * UNIT_BYTES

    @property
    def group_bytes_max(self) -> int:
        """The largest message or batch: it must fit into one file together with the filler."""
        return self.segment_bytes - _BLANK_BYTES

    @property
    def segment_bytes_min(self) -> int:
        """The smallest file that holds the largest message and the filler."""
        return self.record_bytes_max + _BLANK_BYTES
