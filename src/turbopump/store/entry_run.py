"""Runs of consecutive log records, checked and read by column.

Examining records one by one costs more than everything else that a start does with them. So sizes
are followed, or only counted where records are equally long, and every other field is one array.
`find_run` stops before the first unusual record; the caller examines that one individually.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import final

import numpy as np
from isal.isal_zlib import crc32
from msgspec import Struct
from numpy.typing import NDArray

from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store.outcomes import UNIT_DTYPE, Units
from turbopump.wire import sysflag
from turbopump.wire.aligned_properties import Ints
from turbopump.wire.hashing import INT_MAX
from turbopump.wire.property_texts import PropertyTexts
from turbopump.wire.record import FIXED_BYTES, MAGIC, RecordEntry
from turbopump.wire.record_arrays import HEAD_BYTES, are_same, follow_sizes, heads_at, read_at

_RUN_MIN = 16
"""Fewer records are examined faster one by one."""

_TRIED_FIRST = 256
"""Records of one size after which the next ones are expected to have it too."""

_RECORDS_AT_ONCE = 2048
"""Their properties are parsed together, which takes up to 40 times as much memory."""

_ANY_V6 = sysflag.BORN_HOST_V6 | sysflag.STORE_HOST_V6
_PROPERTIES_LENGTH_BYTES = 2
_QUEUE_ID_BITS = 32


# Final, so that its type can be compared, as with EntryBatch.
@final
class EntryRun(Struct, frozen=True, eq=False):
    """What queues and index need of records: a `RecordEntry` for each of them."""

    view: memoryview
    base: int
    """Position of the view's first byte in the log."""
    starts: Ints
    """Where records begin in the view."""
    sizes: Ints
    queue_ids: Ints
    queue_offsets: Ints
    sys_flags: Ints
    times_ms: Ints
    """When they were stored."""
    texts_at: Ints
    """Where properties begin in the view; they end with their record."""
    topics: tuple[bytes, ...]
    """The distinct ones."""
    topic_numbers: Ints | None
    """Index of each record's topic; None if there is only one."""

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def positions(self) -> Ints:
        return self.starts + self.base

    @property
    def physical_offset(self) -> PhysicalOffset:
        """Position of the first record."""
        return PhysicalOffset(self.base + int(self.starts[0]))

    @property
    def size(self) -> int:
        """Bytes of all records."""
        return int(self.starts[-1] + self.sizes[-1] - self.starts[0])

    @property
    def end(self) -> PhysicalOffset:
        """Position after the last record."""
        return PhysicalOffset(self.physical_offset + self.size)

    @property
    def store_timestamp_ms(self) -> int:
        """Store timestamp of the last record."""
        return int(self.times_ms[-1])

    @property
    def newest_ms(self) -> int:
        """The latest store timestamp; the last record's, unless the clock was set back."""
        return int(self.times_ms.max())

    def parts(self) -> Iterator[EntryRun]:
        """Split it into runs that can be entered in one step."""
        for first in range(0, len(self), _RECORDS_AT_ONCE):
            yield self.part(slice(first, first + _RECORDS_AT_ONCE))

    def count_before(self, end: PhysicalOffset) -> int:
        """Return how many records end at a position or before it."""
        return int(np.searchsorted(self.starts + self.sizes, end - self.base, "right"))

    def part(self, some: slice) -> EntryRun:
        """Return some of the records."""
        numbers = self.topic_numbers
        return EntryRun(
            self.view,
            self.base,
            self.starts[some],
            self.sizes[some],
            self.queue_ids[some],
            self.queue_offsets[some],
            self.sys_flags[some],
            self.times_ms[some],
            self.texts_at[some],
            self.topics,
            None if numbers is None else numbers[some],
        )

    def texts(self) -> PropertyTexts:
        """Return the properties of each record."""
        lengths = self.starts + self.sizes - self.texts_at
        return PropertyTexts(_parts(self.view, self.texts_at, lengths))

    def units(self, codes: Ints) -> Units:
        """Return the queue units for records with these tag hashes."""
        units = np.empty(len(self), UNIT_DTYPE)
        units["physical_offset"] = self.positions
        units["size"] = self.sizes
        units["tags_code"] = codes
        return units

    def topic_of_each(self) -> list[bytes]:
        """Return the topic of each record, or only one if all share it."""
        if self.topic_numbers is None:
            return [self.topics[0]]
        return [self.topics[number] for number in self.topic_numbers.tolist()]

    def by_queue(self) -> Iterator[tuple[bytes, int, Ints]]:
        """Return topic and id of each queue, and the indexes of its records, in order."""
        keys, numbers = self.queue_ids, self.topic_numbers
        if numbers is not None:
            keys = (numbers << _QUEUE_ID_BITS) + keys
        order = np.argsort(keys, kind="stable")
        cuts = np.flatnonzero(np.diff(keys[order])) + 1
        for start, end in pairwise((0, *cuts.tolist(), len(order))):
            first = order[start]
            topic = self.topics[0 if numbers is None else numbers[first]]
            yield topic, int(self.queue_ids[first]), order[start:end]

    def entries(self) -> list[RecordEntry]:
        """Return the records one by one."""
        topics = self.topic_of_each()
        return [
            RecordEntry(
                size, queue_id, QueueOffset(queue_offset), PhysicalOffset(position), flags, time_ms,
                topic, text,
            )
            for size, queue_id, queue_offset, position, flags, time_ms, topic, text in zip(
                self.sizes.tolist(),
                self.queue_ids.tolist(),
                self.queue_offsets.tolist(),
                self.positions.tolist(),
                self.sys_flags.tolist(),
                self.times_ms.tolist(),
                topics if len(topics) == len(self) else topics * len(self),
                self.texts().parts,
                strict=True,
            )
        ]  # fmt: skip


def find_run(
    view: memoryview, at: int, end: int, base: int, *, check_crc: bool, stop_at_zero: bool
) -> EntryRun | None:
    """Find intact, ordinary records from a place in a view on; None if there are too few.

    Not ordinary are those with IPv6 hosts, or with ``stop_at_zero`` a zero in their properties.
    ``base`` is where the view begins in the log.
    """
    starts = _starts(view, at, end)
    run = _with_good_parts(view, starts, base) if len(starts) >= _RUN_MIN else None
    if run is None:
        return None
    good = len(run)
    if check_crc:
        good = _with_good_bodies(run)
    if stop_at_zero:
        good = min(good, _without_zeros(run))
    if good < _RUN_MIN:
        return None
    return run if good == len(run) else run.part(slice(good))


def _starts(view: memoryview, at: int, end: int) -> Ints:
    """Return where records that end before a place seem to begin."""
    if end - at < FIXED_BYTES:
        return np.empty(0, np.int64)
    size = int.from_bytes(view[at : at + 4], "big", signed=True)
    count = (end - at) // size if size >= FIXED_BYTES else 0
    if count >= _TRIED_FIRST and _of_one_size(view, at, size, _TRIED_FIRST) == _TRIED_FIRST:
        return np.arange(_of_one_size(view, at, size, count)) * size + at
    found: list[int] = []
    follow_sizes(view, at, end, found)
    # Through an array, which takes half the time.
    return np.frombuffer(array("q", found), np.int64)


def _of_one_size(view: memoryview, at: int, size: int, count: int) -> int:
    """Return how many consecutive records have a size, up to ``count``."""
    sizes = np.ndarray((count,), ">i4", view, at, (size,))
    return leading(sizes == size)


def _with_good_parts(view: memoryview, starts: Ints, base: int) -> EntryRun | None:
    """Read the records up to the first whose parts do not add up."""
    heads = heads_at(view, starts)
    sizes, bodies = heads["size"].astype(np.int64), heads["body_length"].astype(np.int64)
    good = heads["magic"] == MAGIC
    good &= heads["physical_offset"] == starts + base
    good &= (heads["queue_id"] >= 0) & (bodies >= 0) & (heads["sys_flag"] & _ANY_V6 == 0)
    ends = starts + sizes
    topics_at = starts + (HEAD_BYTES + 1) + bodies
    good &= topics_at < ends
    count = leading(good)
    topics_at, ends = topics_at[:count], ends[:count]
    topic_lengths = read_at(view, "u1", topics_at - 1)
    texts_at = topics_at + topic_lengths + _PROPERTIES_LENGTH_BYTES
    count = leading(texts_at <= ends)
    lengths = read_at(view, ">i2", texts_at[:count] - _PROPERTIES_LENGTH_BYTES)
    count = leading(lengths == ends[:count] - texts_at[:count])
    if not count:
        return None
    topics, numbers, count = _topics(view, topics_at[:count], topic_lengths[:count])
    if not count:
        return None
    heads = heads[:count]
    return EntryRun(
        view,
        base,
        starts[:count],
        sizes[:count],
        heads["queue_id"].astype(np.int64),
        heads["queue_offset"].astype(np.int64),
        heads["sys_flag"].astype(np.int64),
        heads["store_time"].astype(np.int64),
        texts_at[:count],
        topics,
        numbers,
    )


def _topics(
    view: memoryview, topics_at: Ints, lengths: NDArray[np.uint8]
) -> tuple[tuple[bytes, ...], Ints | None, int]:
    """Return the distinct topics, the topic of each record, and how many have valid ones."""
    width = int(lengths[0])
    if width and (lengths == width).all():
        found = read_at(view, f"V{width}", topics_at)
        if are_same(found):
            topic = found[0].tobytes()
            return (topic,), None, len(topics_at) if is_topic_name(topic) else 0
    numbers: dict[bytes, int] = {}
    of_each = [
        numbers.setdefault(topic, len(numbers))
        for topic in PropertyTexts(_parts(view, topics_at, lengths.astype(np.int64))).parts
    ]
    bad = [number for topic, number in numbers.items() if not is_topic_name(topic)]
    array_of_each = np.array(of_each, np.int64)
    count = leading(~np.isin(array_of_each, bad)) if bad else len(of_each)
    return tuple(numbers), array_of_each[:count], count


def _with_good_bodies(run: EntryRun) -> int:
    """Return how many records have bodies that match their checksums."""
    heads = heads_at(run.view, run.starts)
    at, lengths = run.starts + HEAD_BYTES, heads["body_length"].astype(np.int64)
    bodies = _parts(run.view, at, lengths)
    if isinstance(bodies, np.ndarray):
        bodies = bodies.tolist()
    sums = np.fromiter(map(crc32, bodies), np.int64, len(run))
    return leading(sums & INT_MAX == heads["crc"])


def _without_zeros(run: EntryRun) -> int:
    """Count the records before the first that has a zero in its properties."""
    lengths = run.starts + run.sizes - run.texts_at
    texts = _parts(run.view, run.texts_at, lengths)
    if isinstance(texts, np.ndarray):
        zeros = texts.view(np.uint8) == 0
        return int(zeros.argmax()) // texts.itemsize if zeros.any() else len(run)
    if b"\0" not in b"".join(texts):
        return len(run)
    return next(number for number, text in enumerate(texts) if b"\0" in text)


def _parts(view: memoryview, starts: Ints, lengths: Ints) -> Sequence[bytes] | NDArray[np.void]:
    """Return the bytes at each place: as an array if all have the same nonzero length."""
    width = int(lengths[0])
    if width and (lengths == width).all():
        return read_at(view, f"V{width}", starts)
    ends = (starts + lengths).tolist()
    return [bytes(view[start:end]) for start, end in zip(starts.tolist(), ends, strict=True)]


def leading(good: NDArray[np.bool_]) -> int:
    """Return how many are true before the first that is not."""
    return len(good) if good.all() else int(good.argmin())


@lru_cache(maxsize=4096)
def is_topic_name(topic: bytes) -> bool:
    """Whether a topic can name a directory; a damaged or hostile one must not lead elsewhere."""
    if not topic or b"/" in topic or b"\0" in topic or topic in {b".", b".."}:
        return False
    try:
        topic.decode()
    except UnicodeDecodeError:
        return False
    return True
