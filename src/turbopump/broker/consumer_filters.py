"""The SQL92 subscription of each group and topic in its newest version, kept in a file.

The file is `consumerFilter.json` as Apache RocketMQ 4.9 writes and reads it. A subscription
outlives its group for a day, so that a member with an older version cannot restore what was
replaced.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from functools import lru_cache

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from turbopump.broker.clients import ConsumerGroup
from turbopump.clock import Clock
from turbopump.errors import InvalidExpression
from turbopump.filters.sql92 import compile_sql
from turbopump.filters.tags import SQL92
from turbopump.store.outcomes import Filter
from turbopump.tables import Table, TableFile
from turbopump.wire import properties as names
from turbopump.wire.bodies import Subscription
from turbopump.wire.hashing import bloom_positions
from turbopump.wire.schema import I32, I64, Body

KEPT_MS = 24 * 3600 * 1000
"""How long the subscription of a group without members is kept [filterDataCleanTimeSpan]."""

FILTERS_MAX = 4096
"""Most subscriptions in the file; each may have 16,384 characters."""

_BLOOM_BITS = 112
_BLOOM_HASHES = 3
"""What RocketMQ derives from its defaults of 32 consumers and 20 % errors."""

_DEAD_BEFORE_START_MS = 30_000
"""How long before a start the last heartbeat is assumed to have been; as in RocketMQ."""


class BloomFilterData(Body, frozen=True, kw_only=True):
    """Positions in a bit map that brokers may keep for each message; RocketMQ requires them."""

    bit_num: I32
    bit_pos: list[I32]


class ConsumerFilter(Body, frozen=True, kw_only=True):
    """A subscription of a group to a topic, with its filter."""

    bloom_filter_data: BloomFilterData | None = None
    born_time: I64
    client_version: I64
    """The version of the subscription: a timestamp in ms set by the client."""
    consumer_group: str
    dead: bool = False
    dead_time: I64 = 0
    expression: str
    expression_type: str
    topic: str

    @property
    def is_dead(self) -> bool:
        """Whether its group has no members, or has unsubscribed from the topic."""
        return self.dead_time >= self.born_time


class FiltersOfTopic(Body, frozen=True, kw_only=True):
    group_filter_data: dict[str, ConsumerFilter]
    topic: str


class ConsumerFilterTable(Body, frozen=True, kw_only=True):
    """The file (consumerFilter.json)."""

    filter_data_by_topic: dict[str, FiltersOfTopic]


class Registered(Struct, frozen=True):
    """A subscription in effect, and its filter."""

    data: ConsumerFilter
    wanted: Filter


class ConsumerFilters:
    """SQL92 subscriptions by group and topic; a newer version replaces an older one."""

    def __init__(self, file: TableFile, clock: Clock) -> None:
        self._file = file
        self._clock = clock
        self._groups: dict[str, dict[str, Registered]] = {}
        self.saving = Table("consumer filters", file, self.encoded)

    def load(self) -> None:
        """Load the subscriptions of an earlier run; all are dead until a heartbeat.

        An unreadable file does not prevent the start: heartbeats restore everything.
        """
        saved = self._file.load_expendable(
            ConsumerFilterTable, "versions of SQL92 subscriptions are not kept over this restart"
        )
        if saved is None:
            return
        seen_ms = self._clock.now_ms() - _DEAD_BEFORE_START_MS
        for topic in saved.filter_data_by_topic.values():
            for data in topic.group_filter_data.values():
                if data.expression_type == SQL92:
                    self._keep(data if data.is_dead else _died(data, seen_ms))

    def find(self, group: str, topic: str) -> Registered | None:
        """Return the newest version of a subscription."""
        return self._groups.get(group, {}).get(topic)

    # --- changes ----------------------------------------------------------------------------------

    def register(self, group: str, subscriptions: Iterable[Subscription]) -> None:
        """Register a heartbeat's subscriptions; the group's other topics become dead."""
        wanted = {each.topic: each for each in subscriptions if each.expression_type == SQL92}
        for subscription in wanted.values():
            self._register(group, subscription)
        self._end(group, wanted)
        self.saving.save_soon()

    def merge_copy(self, copied: ConsumerFilterTable) -> None:
        """Merge a master's subscriptions, unless a heartbeat has brought a newer version here."""
        for topic in copied.filter_data_by_topic.values():
            for data in topic.group_filter_data.values():
                known = self.find(data.consumer_group, data.topic)
                is_newer = known is None or data.client_version > known.data.client_version
                if data.expression_type == SQL92 and is_newer:
                    if known is not None:
                        self._remove(known.data)
                    self._keep(data)
        self.saving.save_soon()

    def group_changed(self, group: str, members: ConsumerGroup | None) -> None:
        """Mark the subscriptions of a group without members as dead."""
        if members is None:
            self._end(group, {})
            self.saving.save_soon()

    def remove_expired(self) -> None:
        """Remove subscriptions that have been dead for a day."""
        now_ms = self._clock.now_ms()
        for data in self._all():
            if data.is_dead and now_ms - data.dead_time >= KEPT_MS:
                self._remove(data)
        self.saving.save_soon()

    def _register(self, group: str, subscription: Subscription) -> None:
        version, known = subscription.sub_version, self.find(group, subscription.topic)
        if known is None:
            self._keep(_filter_of(group, subscription, self._clock.now_ms()))
            return
        old = known.data
        if version < old.client_version or (version == old.client_version and not old.is_dead):
            return
        if version > old.client_version and subscription.sub_string != old.expression:
            # One that does not compile also removes the old one: pulls report the error.
            self._remove(old)
            self._keep(_filter_of(group, subscription, self._clock.now_ms()))
        else:
            self._replace(known, replace(old, client_version=version, dead=False, dead_time=0))

    def _keep(self, data: ConsumerFilter) -> None:
        """Register a subscription, unless it cannot be evaluated or written, or the table is full.

        Pulls work without it: they evaluate the last heartbeat's subscription.
        """
        try:
            wanted = sql_filter(data.expression)
            msgspec.json.encode(data)
        except (InvalidExpression, UnicodeEncodeError):
            return
        if sum(map(len, self._groups.values())) >= FILTERS_MAX:
            dead = (each for each in self._all() if each.is_dead)
            oldest = min(dead, key=lambda each: each.dead_time, default=None)
            if oldest is None:
                return
            self._remove(oldest)
        topics = self._groups.setdefault(data.consumer_group, {})
        topics[data.topic] = Registered(data, wanted)
        self.saving.changes += 1

    def _end(self, group: str, still_wanted: Container[str]) -> None:
        for topic, each in self._groups.get(group, {}).items():
            if topic not in still_wanted and not each.data.is_dead:
                self._replace(each, _died(each.data, self._clock.now_ms()))

    def _replace(self, known: Registered, data: ConsumerFilter) -> None:
        self._groups[data.consumer_group][data.topic] = replace(known, data=data)
        self.saving.changes += 1

    def _remove(self, data: ConsumerFilter) -> None:
        topics = self._groups[data.consumer_group]
        del topics[data.topic]
        if not topics:
            del self._groups[data.consumer_group]
        self.saving.changes += 1

    def _all(self) -> list[ConsumerFilter]:
        return [each.data for topics in self._groups.values() for each in topics.values()]

    def encoded(self) -> bytes:
        """Return everything as JSON, the form of the file."""
        by_topic: dict[str, dict[str, ConsumerFilter]] = {}
        for each in self._all():
            by_topic.setdefault(each.topic, {})[each.consumer_group] = each
        tables = {
            topic: FiltersOfTopic(topic=topic, group_filter_data=groups)
            for topic, groups in by_topic.items()
        }
        return ConsumerFilterTable(filter_data_by_topic=tables).encode()


def _filter_of(group: str, subscription: Subscription, now_ms: int) -> ConsumerFilter:
    topic = subscription.topic
    positions = bloom_positions(f"{group}#{topic}", _BLOOM_BITS, _BLOOM_HASHES)
    return ConsumerFilter(
        bloom_filter_data=BloomFilterData(bit_num=_BLOOM_BITS, bit_pos=positions),
        born_time=now_ms,
        client_version=subscription.sub_version,
        consumer_group=group,
        expression=subscription.sub_string,
        expression_type=SQL92,
        topic=topic,
    )


def _died(data: ConsumerFilter, at_ms: int) -> ConsumerFilter:
    # Not before its birth, which would count as alive.
    return replace(data, dead=True, dead_time=max(at_ms, data.born_time))


@lru_cache(maxsize=128)
def sql_filter(expression: str) -> Filter:
    """Return the filter of an SQL92 expression; raises InvalidExpression."""
    matches = compile_sql(expression).matches
    return Filter(properties=lambda data: matches(parsed(data)), weight=len(expression))


@lru_cache(maxsize=16)
def parsed(data: bytes) -> Mapping[str, str]:
    """Parse properties; cached, since pulls that wait for the same message ask in turn."""
    return names.decode(data.decode(errors="replace"))
