"""The two ids of a message: where it is stored (offset id), and its origin (unique id)."""

from __future__ import annotations

import datetime
import itertools
import struct
from collections.abc import Sequence

from turbopump import core
from turbopump.clock import Clock
from turbopump.errors import InvalidArgument
from turbopump.message import PhysicalOffset
from turbopump.wire.hosts import V4_BYTES, V6_BYTES, Host

_OFFSET_ID_TAIL = struct.Struct(">iq")
COUNTER_MASK = 0xFFFF
COUNTER_DIGITS = 4
"""Length of a unique id's counter, in hexadecimal digits."""

_CLOCK_SLIP_MS = 1_000_000
"""A clock set back by less than this keeps ids at the month's first instant."""


def offset_id(store_host: Host, offset: PhysicalOffset) -> str:
    """Return the id that contains a message's broker and position."""
    return core.offset_id(store_host.ip, store_host.port, offset)


def offset_ids(store_host: Host, offsets: Sequence[PhysicalOffset]) -> str:
    """Return the ids of messages on one broker, separated by commas."""
    return core.offset_ids(store_host.ip, store_host.port, offsets)


def parse_offset_id(text: str) -> tuple[Host, PhysicalOffset]:
    """Parse an offset id; raises InvalidArgument."""
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raw = b""
    ip_bytes = len(raw) - _OFFSET_ID_TAIL.size
    if ip_bytes not in {V4_BYTES, V6_BYTES} or len(text) != 2 * len(raw):
        raise InvalidArgument(f"offset message id must be 32 or 56 hex digits, got {text!r}")
    port, offset = _OFFSET_ID_TAIL.unpack_from(raw, ip_bytes)
    return Host(raw[:ip_bytes], port), PhysicalOffset(offset)


class UniqueIds:
    """Creates the unique ids of one process: no duplicates, up to 65,536 a millisecond.

    Threads may share it for `next` and `many`; `claim` is for one thread.
    """

    def __init__(self, clock: Clock, ip: bytes, process: int, maker: int) -> None:
        self._clock = clock
        self._maker = ip + struct.pack(">HI", process & 0xFFFF, maker & 0xFFFF_FFFF)
        # An iterator advances atomically.
        self._counters = itertools.count()
        self._month_ms = self._next_month_ms = 0
        self._prefix: tuple[int, str] = -1, ""
        """The prefix of ids of one millisecond; replaced as a whole, as threads read it."""

    def next(self) -> str:
        now_ms = self._clock.now_ms()
        at_ms, prefix = self._prefix
        if at_ms != now_ms:
            prefix = self._prefix_at(now_ms)
        return core.unique_id(prefix, next(self._counters))

    def many(self, count: int) -> list[str]:
        prefix = self._prefix_at(self._clock.now_ms())
        # Drawn in one call, which no other thread interrupts.
        numbers = list(itertools.islice(self._counters, count))
        return core.unique_ids(prefix, numbers)

    def claim(self, count: int) -> tuple[str, int]:
        """Claim many ids in one call: their common prefix, and the first one's counter.

        The others count up from there, see `with_counter`; more than 65,536 would repeat.
        """
        if not 0 < count <= COUNTER_MASK + 1:
            raise InvalidArgument(f"count must be 1 to {COUNTER_MASK + 1}, got {count}")
        first = next(self._counters) & COUNTER_MASK
        self._counters = itertools.count(first + count)
        return self._prefix_at(self._clock.now_ms()), first

    def _prefix_at(self, now_ms: int) -> str:
        """Return the prefix of ids created at a timestamp."""
        prefix = core.unique_id_prefix(self._maker, self._elapsed_ms(now_ms))
        self._prefix = now_ms, prefix
        return prefix

    def _elapsed_ms(self, now_ms: int) -> int:
        """Return the milliseconds since the start of the month."""
        if 0 < self._month_ms - now_ms < _CLOCK_SLIP_MS:
            return 0
        if not self._month_ms <= now_ms < self._next_month_ms:
            self._month_ms = _month_start_ms(now_ms)
            self._next_month_ms = _month_start_ms(self._month_ms + 32 * 24 * 3600 * 1000)
        return now_ms - self._month_ms


def with_counter(prefix: str, counter: int) -> str:
    """Return one of the ids that `UniqueIds.claim` has reserved."""
    return core.unique_id(prefix, counter)


def _month_start_ms(at_ms: int) -> int:
    # The protocol counts from the local month, in the machine's time zone.
    local = datetime.datetime.fromtimestamp(at_ms / 1000).astimezone()
    start = local.replace(day=1, hour=0, minute=0, second=0, microsecond=0, tzinfo=None)
    return int(start.timestamp()) * 1000
