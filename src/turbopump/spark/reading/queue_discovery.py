"""Looks up the topics and queues that the options of a query select."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from functools import partial
from typing import assert_never

from turbopump.client.calls import require_success
from turbopump.client.concurrent_calls import gather_by_key
from turbopump.client.names import is_system, without_namespace
from turbopump.client.queue_reader import QueueReader
from turbopump.client.route_cache import NameServers
from turbopump.client.session import Session
from turbopump.errors import NetworkError, NoRoute
from turbopump.message import MessageQueue
from turbopump.spark.reading.offsets import Offsets
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.reading.queue_selection import (
    Assigned,
    TopicPattern,
    Topics,
    assigned,
    assigned_among,
)
from turbopump.spark.reading.retry import with_retries
from turbopump.spark.reading.unreadable_queues import QueueChecks
from turbopump.wire.bodies import TopicList
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import request, whole_body
from turbopump.wire.names import RETRY_PREFIX

_log = logging.getLogger(__name__)

_REPLY_TOPIC_SUFFIX = "_REPLY_TOPIC"


def _sorted(*found: Collection[MessageQueue]) -> tuple[MessageQueue, ...]:
    return tuple(sorted(queue for each in found for queue in each))


class QueueDiscovery:
    """Finds the queues to read; remembers topics that matched a pattern, and those not found."""

    def __init__(
        self, session: Session, options: SourceOptions, reader: QueueReader, checks: QueueChecks
    ) -> None:
        self._session = session
        self._options = options
        self._reader = reader
        self._checks = checks
        self._servers = NameServers(session.name_servers, session.random)
        self._routeless: frozenset[str] = frozenset()
        self._topics_found: tuple[int, tuple[str, ...]] | None = None

    async def queues(self) -> tuple[MessageQueue, ...]:
        """Return the queues to read, sorted; raises NoRoute for an unknown topic."""
        found = await gather_by_key(await self._topics(), self._queues_of_topic)
        queues, chosen = _sorted(*found.values()), self._options.chosen
        return assigned(chosen.queues, queues) if isinstance(chosen, Assigned) else queues

    async def known_queues(self, at: Offsets | None = None) -> tuple[MessageQueue, ...]:
        """Return the queues to read of topics that are known now; log the other topics.

        A topic without brokers, or a deleted one, must not keep the others from being read. ``at``
        are the offsets of a started stream, which stays with its brokers.
        """
        routeless: dict[str, NoRoute] = {}

        async def routed(topic: str) -> Collection[MessageQueue]:
            try:
                return await self._queues_of_topic(topic)
            except NoRoute as error:
                routeless[topic] = error
                return ()

        found = await gather_by_key(await self._topics(), routed)
        if routeless.keys() - self._routeless:
            text = "; ".join(map(str, routeless.values()))
            _log.warning("cannot look up new queues: %s", text)
        self._routeless = frozenset(routeless)
        named = _sorted(*found.values())
        queues = await self._checks.without_deleted(named)
        chosen = self._options.chosen
        return assigned_among(chosen, queues, at) if isinstance(chosen, Assigned) else queues

    async def _topics(self) -> Iterable[str]:
        match self._options.chosen:
            case Topics(names):
                return names
            case TopicPattern() as pattern:
                return await self._topics_like(pattern)
            case Assigned(wanted):
                return dict.fromkeys(topic for topic, _, _ in wanted)
            case _:
                assert_never(self._options.chosen)

    async def _queues_of_topic(self, topic: str) -> Collection[MessageQueue]:
        ask, retries = partial(self._reader.queues, topic), self._options.pulling.retries
        try:
            # A misspelt topic fails immediately.
            return await with_retries(ask, retries, topic, fatal=NoRoute)
        except NoRoute:
            if not topic.startswith(RETRY_PREFIX):
                raise
            # Brokers create it when the group's first message is sent back.
            return ()

    async def _topics_like(self, pattern: TopicPattern) -> tuple[str, ...]:
        """Return the topics that match, looked up once per route interval if possible."""
        now_ms = self._session.clock.monotonic_ms()
        if self._topics_found is None:
            names: Iterable[str] = await with_retries(
                self._topic_names, self._options.pulling.retries, "topics"
            )
        else:
            asked_ms, topics = self._topics_found
            if now_ms - asked_ms < self._session.config.route_interval_ms:
                return topics
            try:
                names = await self._topic_names()
            except NetworkError as error:
                _log.warning("cannot look up new topics: %s", error)
                names = topics
        topics = tuple(sorted(name for name in names if pattern.matches(name)))
        self._topics_found = now_ms, topics
        return topics

    async def _topic_names(self) -> list[str]:
        """Return all topics except the internal ones of brokers."""
        every = await self._topic_list(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        own = set(await self._topic_list(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS))
        namespace = self._session.config.namespace
        return [
            without_namespace(namespace, name)
            for name in every
            if name.removesuffix(_REPLY_TOPIC_SUFFIX) not in own
            and not is_system(name)
            and (not namespace or without_namespace(namespace, name) != name)
        ]

    async def _topic_list(self, code: RequestCode) -> list[str]:
        timeout_ms = self._options.pulling.timeout_ms
        answer = await self._servers.ask(
            lambda address: self._session.request(address, request(code), timeout_ms)
        )
        return TopicList.decode(whole_body(require_success(answer))).topic_list
