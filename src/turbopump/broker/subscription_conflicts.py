"""Members of one group with different subscriptions, which makes them miss messages.

Queues are shared among all members, whatever each wants, and the broker keeps one subscription for
a group and topic. So a member skips messages that only others want, and commits that for all of
them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from msgspec import Struct

from turbopump.broker.clients import ConsumerGroup, Peer
from turbopump.errors import InvalidArgument
from turbopump.filters import tags
from turbopump.wire.bodies import ConsumerData, ConsumeType, InconsistentSubscription, Subscription
from turbopump.wire.names import RETRY_PREFIX

_log = logging.getLogger(__name__)

_CODE = "CODE"
"""The kind of a code filter, whose subscription says TAG, and its name as the tag."""

_LISTED_MAX = 5
_SHOWN_CHARS_MAX = 200
_LOGGED_MAX = 100
"""Most inconsistencies of a group that are remembered as logged."""


class _Selection(Struct, frozen=True, order=True):
    """A member's subscription to a topic, normalized so that equivalent expressions are equal."""

    topic: str
    kind: str
    expression: str


class _Declared(Struct, frozen=True):
    """A member's latest subscriptions."""

    client_id: str
    source: ConsumerData
    """The raw data, to recognize an unchanged heartbeat."""
    selections: frozenset[_Selection]


class _Members:
    """The members of a group, and how many of them share each set of subscriptions."""

    def __init__(self) -> None:
        self.declared: dict[Peer, _Declared] = {}
        self.variants: Counter[frozenset[_Selection]] = Counter()

    def put(self, connection: Peer, declared: _Declared) -> None:
        self.remove(connection)
        self.declared[connection] = declared
        self.variants[declared.selections] += 1

    def remove(self, connection: Peer) -> bool:
        """Remove a member; return whether it was one."""
        old = self.declared.pop(connection, None)
        if old is None:
            return False
        self.variants[old.selections] -= 1
        if not self.variants[old.selections]:
            del self.variants[old.selections]
        return True


class SubscriptionConflicts:
    """Compares the subscriptions of the members of each group, and logs when they differ."""

    def __init__(self) -> None:
        self._groups: dict[str, _Members] = {}
        self._logged: dict[str, set[frozenset[frozenset[_Selection]]]] = {}
        """The inconsistencies of each group that have been logged since its members agreed."""

    def heartbeat(self, connection: Peer, client_id: str, data: ConsumerData) -> None:
        """Register a member's subscriptions."""
        name = data.group_name
        members = self._groups.setdefault(name, _Members())
        known = members.declared.get(connection)
        if known is not None and known.source is data:
            return
        selections = _selections(data.subscription_data_set)
        if selections or data.consume_type is not ConsumeType.PULL:
            members.put(connection, _Declared(client_id, data, selections))
        elif known is not None:
            # It chooses its queues itself, and each of its pulls says what it wants.
            members.remove(connection)
        if known is None or known.selections != selections:
            self._compare(name)

    def group_changed(self, name: str, group: ConsumerGroup | None) -> None:
        """Forget a group without members."""
        if group is None:
            self._groups.pop(name, None)
            self._logged.pop(name, None)

    def leave(self, connection: Peer, name: str) -> None:
        """Forget a member that leaves its group."""
        members = self._groups.get(name)
        if members is not None and members.remove(connection):
            self._compare(name)

    def of_group(self, name: str) -> list[InconsistentSubscription]:
        """Return the differing subscriptions of members, by topic."""
        group = self._groups.get(name)
        if group is None or len(group.variants) < 2:
            return []
        members = group.declared.values()
        wanted: dict[str, dict[_Selection | None, list[str]]] = {}
        topics = {selection.topic for each in members for selection in each.selections}
        for each in members:
            by_topic = {selection.topic: selection for selection in each.selections}
            for topic in topics:
                selection = by_topic.get(topic)
                wanted.setdefault(topic, {}).setdefault(selection, []).append(each.client_id)
        return [
            InconsistentSubscription(
                topic=topic,
                expression_type=None if selection is None else selection.kind,
                sub_string=None if selection is None else selection.expression,
                client_ids=sorted(client_ids),
            )
            for topic, selections in sorted(wanted.items())
            if len(selections) > 1
            for selection, client_ids in selections.items()
        ]

    def _compare(self, name: str) -> None:
        variants = frozenset(self._groups[name].variants)
        if len(variants) < 2:
            if self._logged.pop(name, None):
                _log.info("group %s: all members have the same subscriptions again", name)
            return
        logged = self._logged.setdefault(name, set())
        if variants in logged:
            return
        if len(logged) >= _LOGGED_MAX:
            logged.clear()
        logged.add(variants)
        _log.warning(
            "group %s: members have different subscriptions, so messages are skipped: %s",
            name,
            _listed(self.of_group(name)),
        )


def _selections(subscriptions: Iterable[Subscription]) -> frozenset[_Selection]:
    return frozenset(
        _Selection(each.topic, _kind(each), _meaning(each))
        for each in subscriptions
        if not each.topic.startswith(RETRY_PREFIX)
    )


def _kind(subscription: Subscription) -> str:
    return _CODE if subscription.class_filter_mode else subscription.expression_type or tags.TAG


def _meaning(subscription: Subscription) -> str:
    """Return the expression; tags in one order."""
    if _kind(subscription) != tags.TAG:
        return subscription.sub_string
    try:
        wanted = tags.parse_tags(subscription.sub_string)
    except InvalidArgument:
        return subscription.sub_string
    return tags.EVERYTHING if wanted.everything else " || ".join(sorted(wanted.tags))


def _listed(rows: list[InconsistentSubscription]) -> str:
    texts = [f"{each.topic}: {_shown(each)} by {_some(each.client_ids)}" for each in rows]
    return "; ".join(texts[:_LISTED_MAX]) + ("; ..." if len(texts) > _LISTED_MAX else "")


def _shown(row: InconsistentSubscription) -> str:
    if row.sub_string is None:
        return "not subscribed"
    return f"{row.expression_type} {row.sub_string[:_SHOWN_CHARS_MAX]!r}"


def _some(client_ids: list[str]) -> str:
    more = len(client_ids) - _LISTED_MAX
    return ", ".join(client_ids[:_LISTED_MAX]) + (f" and {more} more" if more > 0 else "")
