"""Filters of a query that narrow what is read of a topic; Spark still applies them itself. Pure.

So a filter may be understood in part or not at all, and the result is the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from pyspark.sql import datasource
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from turbopump.filters.sql92 import Sql
from turbopump.message import MessageQueue
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.reading.partition_planner import QueueRange

Values = frozenset[Any]

_TAG = re.compile(r"[^|*\s]+")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Whole numbers from ``low`` to before ``high``; None is no bound."""

    low: int | None = None
    high: int | None = None

    def __and__(self, other: Bounds) -> Bounds:
        lows = [low for low in (self.low, other.low) if low is not None]
        highs = [high for high in (self.high, other.high) if high is not None]
        return Bounds(max(lows, default=None), min(highs, default=None))

    def has(self, number: int) -> bool:
        return (self.low is None or number >= self.low) and (
            self.high is None or number < self.high
        )


@dataclass(frozen=True, slots=True)
class ScanBounds:
    """What rows must be like to pass the filters, as far as that tells where to read."""

    one_of: Mapping[str, Values] = field(default_factory=dict)
    """Values of ``topic``, ``broker``, ``tags``, ``keys``."""
    offsets: Bounds = Bounds()
    queue_ids: Bounds = Bounds()
    queue_id_values: Values | None = None
    stored_ms: Bounds = Bounds()

    def has_queue(self, queue: MessageQueue) -> bool:
        """Whether a queue may have such rows."""
        topics, brokers = self.one_of.get("topic"), self.one_of.get("broker")
        return (
            (topics is None or queue.topic in topics)
            and (brokers is None or queue.broker in brokers)
            and (self.queue_id_values is None or queue.queue_id in self.queue_id_values)
            and self.queue_ids.has(queue.queue_id)
        )


def scan_bounds(filters: Iterable[datasource.Filter]) -> ScanBounds:
    """Return what filters, all of which rows must pass, say about where to read."""
    found = ScanBounds()
    for each in filters:
        found = _narrowed(found, each)
    return found


def _narrowed(so_far: ScanBounds, by: datasource.Filter) -> ScanBounds:
    match by:
        case (
            EqualTo(attribute=(name,), value=value) | EqualNullSafe(attribute=(name,), value=value)
        ):
            return _with_values(so_far, name, frozenset({value}))
        case In(attribute=(name,), value=values):
            return _with_values(so_far, name, frozenset(values))
        case GreaterThan(attribute=(name,), value=value):
            return _with_bounds(so_far, name, value, is_low=True, is_open=True)
        case GreaterThanOrEqual(attribute=(name,), value=value):
            return _with_bounds(so_far, name, value, is_low=True, is_open=False)
        case LessThan(attribute=(name,), value=value):
            return _with_bounds(so_far, name, value, is_low=False, is_open=True)
        case LessThanOrEqual(attribute=(name,), value=value):
            return _with_bounds(so_far, name, value, is_low=False, is_open=False)
    return so_far


def _with_values(so_far: ScanBounds, name: str, values: Values) -> ScanBounds:
    if name in ("topic", "broker", "tags", "keys"):
        # Null equals nothing, unless it is asked for; then the filter says nothing about places.
        if None in values or not all(isinstance(value, str) for value in values):
            return so_far
        known = so_far.one_of.get(name, values)
        return replace(so_far, one_of={**so_far.one_of, name: known & values})
    if not values or not all(_is_number(name, value) for value in values):
        return so_far
    if name == "queueId":
        known = values if so_far.queue_id_values is None else so_far.queue_id_values
        return replace(so_far, queue_id_values=known & values)
    so_far = _with_bounds(so_far, name, min(values), is_low=True, is_open=False)
    return _with_bounds(so_far, name, max(values), is_low=False, is_open=False)


def _with_bounds(
    so_far: ScanBounds, name: str, value: object, *, is_low: bool, is_open: bool
) -> ScanBounds:
    if not _is_number(name, value):
        return so_far
    if name == "storeTimestamp":
        limit = _bound(_micros(value), 1000, is_low=is_low, is_open=is_open)
    else:
        limit = _bound(int(value), 1, is_low=is_low, is_open=is_open)  # type: ignore[call-overload]
    bounds = Bounds(low=limit) if is_low else Bounds(high=limit)
    match name:
        case "queueOffset":
            return replace(so_far, offsets=so_far.offsets & bounds)
        case "queueId":
            return replace(so_far, queue_ids=so_far.queue_ids & bounds)
        case "storeTimestamp":
            return replace(so_far, stored_ms=so_far.stored_ms & bounds)
    return so_far


def _bound(value: int, unit: int, *, is_low: bool, is_open: bool) -> int:
    """Return the first whole unit that passes a lower bound, or the first that fails an upper one.

    Both are the first number above ``value``, or from it on, counted in units.
    """
    is_above = is_open if is_low else not is_open
    return value // unit + 1 if is_above else -(-value // unit)


def _is_number(name: str, value: object) -> bool:
    if name == "storeTimestamp":
        return isinstance(value, datetime) and value.tzinfo is not None
    return isinstance(value, int) and not isinstance(value, bool)


def _micros(value: object) -> int:
    assert isinstance(value, datetime), "it was tested before"
    return round(value.timestamp() * 1_000_000)


def with_tags(options: SourceOptions, filters: Iterable[datasource.Filter]) -> SourceOptions:
    """Return options that let the broker leave out other tags than the filters want."""
    wanted = scan_bounds(filters).one_of.get("tags")
    pulling = options.pulling
    if wanted is None or isinstance(pulling.expression, Sql) or pulling.by_topic:
        return options
    if pulling.tags is not None:
        wanted &= pulling.tags
    # Others cannot be written in an expression; Spark finds them by itself.
    if not wanted or not all(_TAG.fullmatch(tag) for tag in wanted):
        return options
    return replace(options, pulling=pulling.only(sorted(wanted)))


def cut(
    ranges: Iterable[QueueRange], by: ScanBounds, stored: Mapping[MessageQueue, tuple[int, int]]
) -> list[QueueRange]:
    """Return what is left of ranges; ``stored`` are the offsets of the wanted times by queue."""
    left = []
    for each in ranges:
        if not by.has_queue(each.queue):
            continue
        first, last = stored.get(each.queue, (each.start, each.end))
        start = max(each.start, first, by.offsets.low or 0)
        end = min(each.end, last, each.end if by.offsets.high is None else by.offsets.high)
        if start < end:
            left.append(replace(each, start=start, end=end))
    return left


def ranges_at_offsets(
    ranges: Iterable[QueueRange], places: Iterable[tuple[MessageQueue, int]]
) -> list[QueueRange]:
    """Return the parts of ranges that hold messages at given places, neighbours put together."""
    by_queue: dict[MessageQueue, set[int]] = {}
    for queue, offset in places:
        by_queue.setdefault(queue, set()).add(offset)
    left: list[QueueRange] = []
    for each in ranges:
        for offset in sorted(by_queue.get(each.queue, ())):
            if not each.start <= offset < each.end:
                continue
            if left and left[-1].queue == each.queue and left[-1].end == offset:
                left[-1] = replace(left[-1], end=offset + 1)
            else:
                left.append(replace(each, start=offset, end=offset + 1))
    return left
