"""A streaming query as a member of its consumer group.

Brokers list it beside other consumers, operators see its lag, and other consumers of the same group
are detected: push consumers would share the queues among themselves and with the query, while the
query reads all of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import count

from turbopump.client.calls import require_success
from turbopump.client.members import ConsumerMember
from turbopump.client.names import with_namespace
from turbopump.client.routes import MASTER_ID
from turbopump.client.session import Session
from turbopump.client.subscriptions import subscription
from turbopump.errors import GroupInUse, NetworkError, NoRoute, RemoteError, TurbopumpError
from turbopump.message import MessageQueue
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.reading.retry import backoff_s, gather_available, with_retries
from turbopump.wire.bodies import (
    ConsumeFrom,
    ConsumerConnections,
    ConsumerData,
    ConsumeType,
    MessageModel,
)
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import request, whole_body
from turbopump.wire.headers import ConsumerGroup

_log = logging.getLogger(__name__)

_Answers = tuple[Mapping[str, ConsumerConnections | None], Mapping[str, TurbopumpError]]
"""Responses of brokers by address, and why others did not respond."""


class QueryMember(ConsumerMember):
    """What brokers see of a query: it pulls, and it subscribes to these topics."""

    def __init__(
        self, session: Session, group: str, options: SourceOptions, topics: Iterable[str]
    ) -> None:
        self.group = group
        self._session = session
        self._pulling = options.pulling
        self._topics = tuple(topics)
        # Brokers keep versions of SQL92 subscriptions: another query's must be newer.
        self._version_ms = session.clock.now_ms()
        self._positions: Mapping[MessageQueue, int] = {}
        self._noticing: asyncio.Task[None] | None = None

    def heartbeat_data(self) -> ConsumerData:
        namespace = self._session.config.namespace
        return ConsumerData(
            group_name=self.group,
            consume_type=ConsumeType.PULL,
            message_model=MessageModel.CLUSTERING,
            consume_from_where=ConsumeFrom.LAST_OFFSET,
            subscription_data_set=[
                subscription(
                    with_namespace(namespace, topic),
                    self._pulling.of(topic).expression,
                    self._version_ms,
                )
                for topic in self._topics_read()
            ],
        )

    def reached(self, positions: Mapping[MessageQueue, int]) -> None:
        """Record the query's position and topics, for operators who ask."""
        self._positions = positions

    def _topics_read(self) -> list[str]:
        return sorted({*self._topics, *(queue.topic for queue in self._positions)})

    def progress(self, topic: str) -> Mapping[MessageQueue, int]:
        namespace = self._session.config.namespace
        return {
            MessageQueue(topic, queue.broker, queue.queue_id): at
            for queue, at in self._positions.items()
            if with_namespace(namespace, queue.topic) == topic
        }

    def members_changed(self) -> None:
        """Check for new members; only warn, since the query cannot know which should stay."""
        if self._noticing is None or self._noticing.done():
            self._noticing = self._session.work.keep(f"members of {self.group}", self._notice)

    async def _notice(self) -> None:
        try:
            others = await other_members(self._session, self.group, self._topics_read())
        except TurbopumpError as error:
            _log.info("group %s: cannot look up its other consumers: %s", self.group, error)
            return
        if others:
            _log.warning(
                "group %s of this query has other consumers, %s: they get only part of the "
                "messages, and some messages are handled twice; give them another group",
                self.group,
                " and ".join(others),
            )


class GroupJoin:
    """Joins a query to its group: immediately, or in the background once all brokers respond."""

    def __init__(
        self,
        session: Session,
        options: SourceOptions,
        topics: Callable[[], Awaitable[Iterable[str]]],
    ) -> None:
        self._session = session
        self._options = options
        self._topics = topics
        self.has_joined = False
        """Whether it is a member; without a group, or with a shared one, it need not be."""
        self._trying: asyncio.Task[None] | None = None
        self.member: QueryMember | None = None

    async def join(self, *, is_patient: bool) -> None:
        """Join unless done; raises GroupInUse and, while patient, any other final failure.

        Otherwise unavailable brokers are retried in the background.
        """
        if self.has_joined:
            return
        if self._trying is not None:
            if self._trying.done():
                self._trying.result()
            return
        try:
            await self._join(self._options.pulling.retries if is_patient else 0)
        except TurbopumpError as error:
            if is_patient or not error.retriable:
                raise
            _log.warning("group %s not joined yet: %s", self._options.group, error)
            self._trying = self._session.work.start(self._keep_trying())

    async def _keep_trying(self) -> None:
        clock, wait_ms = self._session.clock, self._session.config.route_interval_ms
        lost_ms = clock.monotonic_ms() + wait_ms
        for attempt in count():
            await asyncio.sleep(backoff_s(attempt))
            try:
                # Not immediately: name servers also lose a broker that is only restarting.
                await self._join(0, without_lost=clock.monotonic_ms() >= lost_ms)
            except TurbopumpError as error:
                if not error.retriable:
                    raise
            else:
                return

    async def _join(self, retries: int, *, without_lost: bool = False) -> None:
        if _own_group(self._options) is not None:
            self.member = await join_group(
                self._session,
                self._options,
                await self._topics(),
                retries,
                without_lost=without_lost,
            )
        self.has_joined = True

    async def leave(self) -> None:
        """Leave the group, or abandon joining it."""
        if self._trying is not None:
            self._trying.cancel()
            await asyncio.gather(self._trying, return_exceptions=True)
        member, self.member = self.member, None
        if member is not None:
            await self._session.leave(member)


async def join_group(
    session: Session,
    options: SourceOptions,
    topics: Iterable[str],
    retries: int = 0,
    *,
    without_lost: bool = False,
) -> QueryMember | None:
    """Make a query a member of its group; raises GroupInUse if push consumers have it.

    None if it has no group, or shares it: a member that reads all queues would only keep the push
    consumers from the queues that they attribute to it. ``without_lost`` does not wait for an
    unavailable broker that no name server knows.
    """
    own = _own_group(options)
    if own is None:
        return None
    group = with_namespace(session.config.namespace, own)
    wanted = tuple(topics)
    pushing = await other_members(
        session, group, wanted, retries, that_push=True, without_lost=without_lost
    )
    if pushing:
        raise GroupInUse(
            f"group {own!r} already has push consumers: {', '.join(pushing)}; stop them, choose "
            "another group, or set allowSharedGroup=true: then this query also gets every message, "
            "and only the push consumers commit offsets"
        )
    member = QueryMember(session, group, options, wanted)
    try:
        await session.join(member)
    except BaseException:
        # Abandoned halfway, some brokers may already know of it.
        await session.leave(member)
        raise
    return member


def _own_group(options: SourceOptions) -> str | None:
    return None if options.allow_shared_group else options.group


async def other_members(
    session: Session,
    group: str,
    topics: Iterable[str],
    retries: int = 1,
    *,
    that_push: bool = False,
    without_lost: bool = False,
) -> list[str]:
    """Return the client ids of a group's other members, or of those that do not pull.

    Raises failures only if no member is found: an unavailable broker does not disprove a member
    that was found.
    """
    reports, failures = await _connections(
        session, group, topics, retries, without_lost=without_lost
    )
    found = {
        member.client_id
        for each in reports
        if each is not None and not (that_push and each.consume_type is ConsumeType.PULL)
        for member in each.connection_set
    }
    found.discard(session.client_id)
    if failures and not found:
        raise failures[0]
    return sorted(found)


async def _connections(
    session: Session, group: str, topics: Iterable[str], retries: int, *, without_lost: bool
) -> tuple[list[ConsumerConnections | None], list[TurbopumpError]]:
    """Ask each broker of the topics for the consumers of a group; return errors separately.

    ``without_lost`` skips one that does not respond and that name servers do not know: it is gone
    for good, though the route of a topic that only it had is kept.
    """

    async def ask(addresses: Iterable[str]) -> _Answers:
        return await gather_available(
            sorted(addresses),
            lambda address: with_retries(
                lambda: _connections_at(session, address, group), retries, f"members of {group}"
            ),
        )

    names = {with_namespace(session.config.namespace, topic) for topic in topics}
    masters = {name: await _masters(session, name) for name in sorted(names)}
    asked = frozenset[str]().union(*masters.values())
    found, failed = await ask(asked)
    if not (failed and without_lost):
        return list(found.values()), list(failed.values())
    doubtful = {name: known for name, known in masters.items() if known & failed.keys()}
    now = [await _masters_now(session, *each) for each in doubtful.items()]
    listed = frozenset[str]().union(*now)
    moved, moved_failed = await ask(listed - asked)
    away = [error for address, error in failed.items() if address in listed]
    return [*found.values(), *moved.values()], [*away, *moved_failed.values()]


async def _masters(session: Session, name: str) -> frozenset[str]:
    """Return the masters' addresses of a topic, named as brokers know it."""
    try:
        route = await session.route(name)
    except NoRoute:
        # It has no consumers: it was deleted, or is a retry topic, which brokers create when the
        # group's first member joins. Looking up its queues reports a wrong name.
        return frozenset()
    return frozenset(by_id[MASTER_ID] for by_id in route.brokers.values() if MASTER_ID in by_id)


async def _masters_now(session: Session, name: str, known: frozenset[str]) -> frozenset[str]:
    """Return the masters' addresses of a topic by a name server; ``known`` if none responds."""
    try:
        has_route = await session.refresh_route(name)
    except (NetworkError, RemoteError) as error:
        _log.info("topic %s: cannot look up its brokers: %s", name, error)
        return known
    return await _masters(session, name) if has_route else frozenset()


async def _connections_at(session: Session, address: str, group: str) -> ConsumerConnections | None:
    """Return the members that a broker knows, or None if there are none."""
    command = request(RequestCode.GET_CONSUMER_CONNECTION_LIST, ConsumerGroup(consumer_group=group))
    answer = await session.request(address, command, session.config.request_timeout_ms)
    if answer.code == ResponseCode.CONSUMER_NOT_ONLINE:
        return None
    return ConsumerConnections.decode(whole_body(require_success(answer)))
