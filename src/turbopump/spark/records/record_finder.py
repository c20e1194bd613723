"""Find stored records and their fields in a buffer, and check that they are complete.

Records with the same layout are found by counting, which takes a third less time for all columns.
Others are found by following their sizes, the only step with a Python object per record.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from turbopump.errors import InvalidArgument, RecordError
from turbopump.spark.records.arrow_arrays import Int64s
from turbopump.spark.records.record_run import FieldSpans, Mask, RecordRun, Span
from turbopump.wire import sysflag
from turbopump.wire.hashing import INT_MAX
from turbopump.wire.hosts import V4_BYTES, V6_BYTES
from turbopump.wire.record import FIXED_BYTES, MAGIC, MAGIC_V2, decode_record
from turbopump.wire.record_arrays import HEAD_BYTES, are_same, follow_sizes, heads_at, read_at

_BODY_LENGTH_AT = 84
_V6_EXTRA = V6_BYTES - V4_BYTES
_PROPERTIES_LENGTH_BYTES = 2
_ANY_V6 = sysflag.BORN_HOST_V6 | sysflag.STORE_HOST_V6
_SIZE = struct.Struct(">i")
_LENGTH = struct.Struct(">h")


def find_records(
    data: bytes | memoryview, spans: Sequence[Span] | None = None
) -> tuple[RecordRun, int | None]:
    """Find records that lie back to back in a buffer, or in parts of it, given in its order.

    Returns those before the first damaged one, and its position, if there is one.
    """
    spans = [(0, len(data))] if spans is None else spans
    view = memoryview(data).cast("B") if isinstance(data, memoryview) else memoryview(data)
    if len(view) > INT_MAX:
        raise InvalidArgument(f"records must be at most {INT_MAX} bytes, got {len(view)}")
    uniform = _uniform_run(view, spans)
    if uniform is not None:
        return uniform, None
    starts, damaged_at = _found(view, spans)
    run, first = _checked(view, starts)
    return run, damaged_at if first is None else first


def damage_at(data: bytes | memoryview, at: int) -> RecordError:
    """Return why the bytes at a position are not a record."""
    try:
        decode_record(data, at, check_crc=True)
    except RecordError as error:
        return error
    return RecordError("incomplete record", at)


def _uniform_run(view: memoryview, spans: Sequence[Span]) -> RecordRun | None:
    """Find records of one topic with the layout of the first.

    None if layouts differ, or if something is wrong, which must be searched for in each record.
    """
    size = _common_size(view, spans)
    if size is None:
        return None
    starts = _in_steps(spans, size)
    heads = heads_at(view, starts)
    if (
        (heads["size"] != size).any()
        or (heads["magic"] != MAGIC).any()
        or np.bitwise_or.reduce(heads["sys_flag"]) & _ANY_V6
        or (heads["body_length"] != heads["body_length"][0]).any()
    ):
        return None
    body_end = HEAD_BYTES + int(heads["body_length"][0])
    if not HEAD_BYTES <= body_end < size:
        return None
    topic_end = body_end + 1 + view[int(starts[0]) + body_end]
    left = size - topic_end - _PROPERTIES_LENGTH_BYTES
    if left < 0:
        return None
    # The length of the topic, the topic, and the length of the properties.
    between = read_at(view, f"V{size - left - body_end}", starts + body_end)
    sample = between[0].tobytes()
    if not are_same(between) or _LENGTH.unpack_from(sample, topic_end - body_end)[0] != left:
        return None
    parts = (
        FieldSpans(starts + HEAD_BYTES, body_end - HEAD_BYTES),
        FieldSpans(starts + (body_end + 1), topic_end - body_end - 1),
        FieldSpans(starts + (size - left), left),
    )
    topic = sample[1:-_PROPERTIES_LENGTH_BYTES]
    sizes = np.full(len(starts), size, np.int64)
    return RecordRun(view, pa.py_buffer(view), starts, sizes, heads, None, *parts, topic)


def _common_size(view: memoryview, spans: Sequence[Span]) -> int | None:
    """Return the size of the first record, None unless all spans may consist of this size."""
    if not spans or spans[0][1] - spans[0][0] < FIXED_BYTES:
        return None
    size: int = _SIZE.unpack_from(view, spans[0][0])[0]
    if size < FIXED_BYTES or any((end - begin) % size for begin, end in spans):
        return None
    return size


def _in_steps(spans: Sequence[Span], size: int) -> Int64s:
    """Return where records of equal size start in the spans."""
    counts = [(end - begin) // size for begin, end in spans]
    before = accumulate(counts, initial=0)
    # Their distance from where they would be without gaps between the spans.
    moved = [begin - row * size for (begin, _), row in zip(spans, before, strict=False)]
    starts: Int64s = np.arange(sum(counts)) * size + np.repeat(moved, counts)
    return starts


def _found(view: memoryview, spans: Sequence[Span]) -> tuple[Int64s, int | None]:
    """Return where records start, and where something else lies."""
    found: list[int] = []
    damaged_at = None
    for at, end in spans:
        reached = follow_sizes(view, at, end, found)
        if reached < end:
            damaged_at = reached
            break
    # Through an array, which takes half the time.
    return np.frombuffer(array("q", found), np.int64), damaged_at


def _checked(view: memoryview, starts: Int64s) -> tuple[RecordRun, int | None]:
    """Find the parts of each record, up to the first damaged one; return where it is."""
    heads = heads_at(view, starts)
    sizes = heads["size"].astype(np.int64)
    bad = heads["magic"] != MAGIC
    two_bytes = bad & (heads["magic"] == MAGIC_V2) if bad.any() else None
    if two_bytes is not None:
        bad ^= two_bytes
    shifts = _v6_shifts(heads)
    if shifts is None:
        length, body_start = heads["body_length"], starts + HEAD_BYTES
    else:
        bad |= sizes < FIXED_BYTES + shifts[1]
        length = read_at(view, ">i4", _within(starts + shifts[1] + _BODY_LENGTH_AT, bad))
        body_start = starts + shifts[1] + HEAD_BYTES
    ends = starts + sizes

    body = FieldSpans(body_start, length.astype(np.int64))
    body_end = body.end
    topic_start = body_end + (1 if two_bytes is None else np.where(two_bytes, 2, 1))
    bad |= (body_end < body.start) | (topic_start > ends)

    topic_length = read_at(view, "u1", _within(topic_start - 1, bad)).astype(np.int64)
    if two_bytes is not None:
        long_length = read_at(view, ">i2", _within(topic_start - 2, bad)).astype(np.int64)
        topic_length = np.where(two_bytes, long_length, topic_length)
    topic_end = topic_start + topic_length
    properties_start = topic_end + _PROPERTIES_LENGTH_BYTES
    left = ends - properties_start
    bad |= (topic_length < 0) | (left < 0)

    bad |= read_at(view, ">i2", _within(topic_end, bad)) != left
    parts = (body, FieldSpans(topic_start, topic_length), FieldSpans(properties_start, left))
    run = RecordRun(view, pa.py_buffer(view), starts, sizes, heads, shifts, *parts)
    if not bad.any():
        return run, None
    first = int(bad.argmax())
    return run.where(slice(first)), int(starts[first])


def _v6_shifts(heads: npt.NDArray[Any]) -> tuple[Int64s, Int64s] | None:
    flags = heads["sys_flag"].astype(np.int32)
    if not (flags & _ANY_V6).any():
        return None
    born = np.where(flags & sysflag.BORN_HOST_V6, _V6_EXTRA, 0)
    return born, born + np.where(flags & sysflag.STORE_HOST_V6, _V6_EXTRA, 0)


def _within(positions: Int64s, bad: Mask) -> Int64s:
    """Redirect positions of damaged records, which may point anywhere, to the buffer's start."""
    return np.where(bad, 0, positions) if bad.any() else positions
