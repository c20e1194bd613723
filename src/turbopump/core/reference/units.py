"""Units of consume queues, compared with the records they point to."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from turbopump.core.reference.layout import (
    FIXED,
    FIXED_BYTES,
    HOST_BITS_SHIFT,
    MAGIC,
    STORE_TIME_AT,
    SYS_FLAG_LOW_BYTE_AT,
    TEXT_LENGTH,
    UNIT,
)

Buffer = bytes | bytearray | memoryview


class UnitLimits(NamedTuple):
    """When an answer is full; messages that begin at ``recent_from`` or later are in memory."""

    recent_from: int
    recent_bytes_max: int
    recent_count_max: int
    old_bytes_max: int
    old_count_max: int


class TakenUnits(NamedTuple):
    """The messages of an answer, in order."""

    stop: int
    """The first unit that was not examined: there is none, or why is in the next fields."""
    is_mismatch: bool
    """It is wanted, but the buffer does not have its record."""
    offsets: list[int]
    """Queue offset of each message."""
    sizes: list[int]
    pieces: list[memoryview]
    """All messages; contiguous ones share a piece."""
    cost: int
    """What its examined properties cost."""


def take_units(
    units: bytes,
    first: int,
    view: memoryview,
    base: int,
    stored_topic: bytes,
    queue_id: int,
    queue_offset: int,
    limits: UnitLimits,
    *,
    is_shifted: bool = False,
    codes: Collection[int] | None = None,
    mask: bytes | None = None,
    accepts: Callable[[bytes], bool] | None = None,
    accept_cost: int = 0,
    cost_max: int = 0,
    taken: int = 0,
    taken_bytes: int = 0,
) -> TakenUnits:
    """Take the wanted messages of a queue's units, from one on, until an answer is full.

    It stops at the first wanted unit that does not match its record in the buffer, whose first byte
    has the position ``base`` in the log. ``queue_offset`` is that of the first of all units, and
    records must have theirs unless they are ``is_shifted``. Wanted are units whose code is among
    ``codes``, compared as 32-bit numbers, and not zero in the ``mask``, and whose properties a
    function ``accepts``: each call costs ``accept_cost`` and the properties' length, and once all
    have cost ``cost_max``, nothing more is examined. An answer that has ``taken`` messages already
    is continued; it may be full before an unwanted unit, and gets at least one message.
    """
    wanted = None if codes is None else {code & 0xFFFF_FFFF for code in codes}
    offsets: list[int] = []
    sizes: list[int] = []
    places: list[int] = []
    cost = 0
    number, count, is_mismatch = first, len(units) // UNIT.size, False
    while number < count:
        position, size, code = UNIT.unpack_from(units, number * UNIT.size)
        if taken and _is_full(limits, position, size, taken, taken_bytes):
            break
        if (wanted is None or code & 0xFFFF_FFFF in wanted) and (mask is None or mask[number]):
            at = position - base
            expected = None if is_shifted else queue_offset + number
            text_at = _text_at(view, at, size, position, stored_topic, queue_id, expected)
            if text_at is None:
                is_mismatch = True
                break
            is_wanted = True
            if accepts is not None:
                text = bytes(view[text_at : at + size])
                cost += accept_cost + len(text)
                is_wanted = accepts(text)
            if is_wanted:
                places.append(at)
                offsets.append(queue_offset + number)
                sizes.append(size)
                taken, taken_bytes = taken + 1, taken_bytes + size
        number += 1
        if accepts is not None and cost >= cost_max:
            break
    pieces = _pieces(view, places, sizes)
    return TakenUnits(number, is_mismatch, offsets, sizes, pieces, cost)


def _pieces(view: memoryview, places: list[int], sizes: list[int]) -> list[memoryview]:
    """Return the parts of a buffer at some places, contiguous ones as one."""
    joined: list[list[int]] = []
    for at, size in zip(places, sizes, strict=True):
        if joined and joined[-1][1] == at:
            joined[-1][1] = at + size
        else:
            joined.append([at, at + size])
    return [view[begin:end] for begin, end in joined]


def _is_full(limits: UnitLimits, position: int, size: int, taken: int, taken_bytes: int) -> bool:
    if position >= limits.recent_from:
        return taken >= limits.recent_count_max or taken_bytes + size > limits.recent_bytes_max
    return taken >= limits.old_count_max or taken_bytes + size > limits.old_bytes_max


def unit_times(
    units: bytes,
    view: memoryview,
    base: int,
    stored_topic: bytes,
    queue_ids: Sequence[int],
    queue_offsets: Sequence[int],
) -> array[int]:
    """Return the store timestamps of messages of a topic; -1 for those the buffer does not have.

    ``queue_ids`` and ``queue_offsets`` are those of the units.
    """
    found = array("q")
    rows = zip(UNIT.iter_unpack(units), queue_ids, queue_offsets, strict=True)
    for (position, size, _), queue_id, offset in rows:
        at = position - base
        text_at = _text_at(view, at, size, position, stored_topic, queue_id, offset)
        if text_at is None:
            found.append(-1)
            continue
        time_at = at + STORE_TIME_AT[view[at + SYS_FLAG_LOW_BYTE_AT] >> HOST_BITS_SHIFT & 0b11]
        found.append(int.from_bytes(view[time_at : time_at + 8], "big", signed=True))
    return found


def _text_at(
    view: memoryview,
    at: int,
    size: int,
    position: int,
    stored_topic: bytes,
    queue_id: int,
    queue_offset: int | None,
) -> int | None:
    """Return where a record's properties begin; None if it is not the message of a unit.

    A record has no checksum over its header, so each field that a unit or its place implies is
    compared. None as queue offset stands for any.
    """
    if at < 0 or size < FIXED_BYTES or at + size > len(view):
        return None
    fixed = FIXED[view[at + SYS_FLAG_LOW_BYTE_AT] >> HOST_BITS_SHIFT & 0b11]
    if size < fixed.size:
        return None
    fields = fixed.unpack_from(view, at)
    if fields[:2] != (size, MAGIC) or fields[3] != queue_id or fields[6] != position:
        return None
    if queue_offset is not None and fields[5] != queue_offset:
        return None
    topic_at = at + fixed.size + fields[-1]
    topic_end = topic_at + len(stored_topic)
    left = at + size - topic_end - TEXT_LENGTH.size
    if fields[-1] < 0 or left < 0 or view[topic_at:topic_end] != stored_topic:
        return None
    return topic_end + 2 if TEXT_LENGTH.unpack_from(view, topic_end)[0] == left else None
