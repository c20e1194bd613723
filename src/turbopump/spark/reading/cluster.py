"""What the driver of a query asks of a cluster: which queues there are, and positions in them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import TypeVar, assert_never

from turbopump.client import calls
from turbopump.client.calls import Found, require_success
from turbopump.client.names import is_system, with_namespace, without_namespace
from turbopump.client.pull_config import PullTimes
from turbopump.client.queue_reader import QueueReader
from turbopump.client.route_cache import NameServers
from turbopump.client.session import Session
from turbopump.client.subscriptions import subscription
from turbopump.errors import (
    DamagedMessage,
    NetworkError,
    NoRoute,
    RemoteError,
    RequestTimeout,
    TurbopumpError,
)
from turbopump.message import MessageQueue, QueueOffset
from turbopump.spark.reading import offset_commit
from turbopump.spark.reading.offsets import Limits, Mark, Offsets, inside, inside_for_group
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.reading.positions import (
    EARLIEST_OFFSET,
    LATEST_OFFSET,
    AtTime,
    Earliest,
    Explicit,
    Latest,
    OfGroup,
    Position,
    offsets_named,
)
from turbopump.spark.reading.queue_selection import (
    Assigned,
    TopicPattern,
    Topics,
    assigned,
    assigned_among,
)
from turbopump.spark.reading.retry import gather_available, gather_by_key, with_retries
from turbopump.spark.reading.unreadable_queues import QueueChecks, Unreadable, unreadable_reason
from turbopump.wire.bodies import ConsumerOffsets, TopicList
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import request, whole_body
from turbopump.wire.names import RETRY_PREFIX

T = TypeVar("T")

_log = logging.getLogger(__name__)

_NO_OFFSETS = "no consumer offset"
"""The words, under a code for everything, of a broker where no group has committed anything."""
_REPLY_TOPIC_SUFFIX = "_REPLY_TOPIC"
_ANSWER_MARGIN_MS = 10_000
_SAMPLE_ROWS = 32
_SILENCE_TIMEOUTS = 3


class Cluster:
    """Asks about the queues that options choose; outside of it, names are the application's."""

    def __init__(self, session: Session, options: SourceOptions) -> None:
        self._session = session
        self._options = options
        timeout_ms = options.pulling.timeout_ms
        times = PullTimes(
            timeout_ms, options.idle_wait_ms, options.idle_wait_ms + _ANSWER_MARGIN_MS
        )
        group = with_namespace(session.config.namespace, options.reader_group)
        self._group = group
        self._reader = QueueReader(session, group, times)
        self._servers = NameServers(session.config.nameserver_addresses, session.random)
        self._checks = QueueChecks(session, self._reader)
        self._unknown: frozenset[MessageQueue] = frozenset()
        self._routeless: frozenset[str] = frozenset()
        self._uncommitted: dict[MessageQueue, str] = {}
        self._silent_until_ms: dict[str, int] = {}
        self._topics_found: tuple[int, tuple[str, ...]] | None = None

    # --- queues -----------------------------------------------------------------------------------

    async def queues(self) -> tuple[MessageQueue, ...]:
        """Return the queues to read, sorted; raises NoRoute for a topic that nobody knows."""
        queues = await self._queues_of(await self._topics())
        if isinstance(self._options.chosen, Assigned):
            return assigned(self._options.chosen, queues)
        return queues

    async def known_queues(self, at: Offsets | None = None) -> tuple[MessageQueue, ...]:
        """Return the queues to read of the topics that have some now; the others are logged.

        Brokers may be away, or a topic deleted: that is no reason to miss queues of the others.
        ``at`` is where a stream is that has begun, and keeps to its brokers.
        """
        routeless: dict[str, NoRoute] = {}

        async def routed(topic: str) -> Collection[MessageQueue]:
            try:
                return await self._queues_of([topic])
            except NoRoute as error:
                routeless[topic] = error
                return ()

        found = await gather_by_key(await self._topics(), routed)
        if routeless.keys() - self._routeless:
            text = "; ".join(map(str, routeless.values()))
            _log.warning("cannot look up new queues: %s", text)
        self._routeless = frozenset(routeless)
        named = sorted(queue for each in found.values() for queue in each)
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

    async def _queues_of(self, topics: Iterable[str]) -> tuple[MessageQueue, ...]:
        found = await gather_by_key(
            topics,
            lambda topic: with_retries(
                lambda: self._queues_in(topic),
                self._options.pulling.retries,
                topic,
                # A wrong name is told at once.
                fatal=NoRoute,
            ),
        )
        return tuple(sorted(queue for queues in found.values() for queue in queues))

    async def _queues_in(self, topic: str) -> Collection[MessageQueue]:
        try:
            return await self._reader.queues(topic)
        except NoRoute:
            if not topic.startswith(RETRY_PREFIX):
                raise
            # Brokers make it when the first message of the group is sent back.
            return ()

    async def _topics_like(self, pattern: TopicPattern) -> tuple[str, ...]:
        """Return the topics that match, asking again by the interval of routes."""
        now_ms = self._session.clock.monotonic_ms()
        if self._topics_found is None:
            names: Iterable[str] = await self._with_retries(self._topic_names, "topics")
        else:
            asked_ms, topics = self._topics_found
            if now_ms - asked_ms < self._session.config.route_interval_ms:
                return topics
            names = await self._topic_names_or(topics)
        topics = tuple(sorted(name for name in names if pattern.matches(name)))
        self._topics_found = now_ms, topics
        return topics

    async def _topic_names_or(self, known: Iterable[str]) -> Iterable[str]:
        """Return all topics, or those known while no name server answers."""
        try:
            return await self._topic_names()
        except NetworkError as error:
            _log.warning("cannot look up new topics: %s", error)
            return known

    async def _topic_names(self) -> list[str]:
        """Return all topics but those that brokers have for themselves."""
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

    async def unreadable(
        self, queues: Iterable[MessageQueue], doubtful: Collection[MessageQueue]
    ) -> dict[MessageQueue, Unreadable]:
        """Return those of the queues that can be read no longer.

        Only those are asked about that are doubtful, or whose brokers refused to wait for news.
        """
        asked = self._checks.refused.union(doubtful).intersection(queues)
        return await self._checks.find_unreadable(
            sorted(queue for queue in asked if not self._is_silent(queue.broker))
        )

    # --- positions --------------------------------------------------------------------------------

    async def limits(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, Limits]:
        """Return the ends of queues; raises when a broker does not answer for long."""
        return await gather_by_key(
            queues, lambda queue: self._with_retries(lambda: self._limits(queue), str(queue))
        )

    async def known_limits(
        self, queues: Iterable[MessageQueue], at: Offsets
    ) -> dict[MessageQueue, Limits]:
        """Return the ends of queues whose brokers answer; the others are logged.

        Of a queue that ends ``at`` where it has been read to, the beginning is not asked for: it
        is said to be there, too.
        """
        wanted = frozenset(queues)
        asked = sorted(queue for queue in wanted if not self._is_silent(queue.broker))
        found, failed = await gather_available(
            asked, lambda queue: self._limits(queue, at.get(queue))
        )
        for queue, error in failed.items():
            self._note_silence(queue.broker, error)
        if failed.keys() - self._unknown:
            queue, error = next(iter(failed.items()))
            _log.warning(
                "%d queues are unavailable, the first is %s: %s", len(failed), queue, error
            )
        self._unknown = (self._unknown - wanted) | (wanted - found.keys())
        return dict(found)

    async def _limits(self, queue: MessageQueue, at: int | None = None) -> Limits:
        wire_queue = self._reader.wire_queue(queue)
        replica = await self._session.replica_of(wire_queue)
        asked = replica.address, wire_queue, self._session.config.request_timeout_ms
        high = await calls.max_offset(self._session, *asked)
        low = high if high == at else await calls.min_offset(self._session, *asked)
        return Limits(low, high, is_certain=replica.is_master)

    def _is_silent(self, broker: str) -> bool:
        return self._silent_until_ms.get(broker, 0) > self._session.clock.monotonic_ms()

    def _note_silence(self, broker: str, error: TurbopumpError) -> None:
        """Leave a broker that does not answer in time alone for a while.

        The other queues would wait for it in every batch. One that is known to be away costs no
        time.
        """
        if isinstance(error, RequestTimeout):
            pause_ms = _SILENCE_TIMEOUTS * self._session.config.request_timeout_ms
            self._silent_until_ms[broker] = self._session.clock.monotonic_ms() + pause_ms

    async def resolve(
        self, name: str, position: Position, queues: Iterable[MessageQueue]
    ) -> dict[MessageQueue, int]:
        """Return the offset of a position in each queue; ``name`` is the option's.

        Raises DataLost or InvalidArgument for one outside its queue, if losses matter.
        """
        limits = await self.limits(queues)
        found = await self._resolve(name, position, limits)
        fails = self._options.fail_on_data_loss
        if isinstance(position, OfGroup):
            return inside_for_group(
                self._options.reader_group, found, limits, fail_on_data_loss=fails
            )
        return inside(name, found, limits, fail_on_data_loss=fails)

    async def _resolve(
        self, name: str, position: Position, limits: Mapping[MessageQueue, Limits]
    ) -> dict[MessageQueue, int]:
        is_start = name == "startingOffsets"
        match position:
            case Earliest():
                return {queue: ends.low for queue, ends in limits.items()}
            case Latest():
                return {queue: ends.high for queue, ends in limits.items()}
            case AtTime(timestamp_ms):
                return await self.since(timestamp_ms, limits)
            case OfGroup(otherwise):
                return await self._or_else(otherwise, limits, is_start=is_start)
            case Explicit():
                named = offsets_named(name, position, limits)
                return {
                    queue: _at(
                        named.get(queue, EARLIEST_OFFSET if is_start else LATEST_OFFSET), ends
                    )
                    for queue, ends in limits.items()
                }
            case _:
                assert_never(position)

    async def _or_else(
        self,
        otherwise: Earliest | Latest | AtTime | None,
        limits: Mapping[MessageQueue, Limits],
        *,
        is_start: bool,
    ) -> dict[MessageQueue, int]:
        """Return how far the group has come, and fill in where it has committed nothing yet.

        Unless something else is said, a group that has never read begins as it would without one;
        what it has not read is not before its end. What was sent back is to be tried in any case.
        """
        committed = await self.committed(limits)
        unread = {queue: ends for queue, ends in limits.items() if committed[queue] is None}
        goes_to_end = is_start and self._options.is_stream
        default = otherwise or (Latest() if goes_to_end else Earliest())
        unsure = [queue for queue, ends in unread.items() if not ends.is_certain]
        if unsure and isinstance(default, Latest) and is_start:
            # What the group has committed lately may not have reached the slave.
            raise NoRoute(
                f"{unsure[0]}: a slave knows no offset of group {self._options.reader_group!r} and"
                " the master is away; start when it is back, or set startingOffsets"
            )
        begun = await self._resolve("", default, unread)
        return {queue: at for queue, at in committed.items() if at is not None} | {
            queue: ends.low if queue.topic.startswith(RETRY_PREFIX) else begun[queue]
            for queue, ends in unread.items()
        }

    async def committed(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int | None]:
        """Return how far the group has come, None where it has committed nothing.

        Brokers answer 0 as well for a group that they do not know, while a queue still has its
        first message; so a 0 is looked up among all that was committed.
        """
        found: Mapping[MessageQueue, int | None] = await gather_by_key(
            queues,
            lambda queue: self._with_retries(lambda: self._reader.committed(queue), str(queue)),
        )
        doubtful = {queue.broker: queue for queue, at in found.items() if at == 0}
        tables = await gather_by_key(doubtful, lambda broker: self._all_committed(doubtful[broker]))
        return {
            queue: None if at == 0 and not self._is_in(tables[queue.broker], queue) else at
            for queue, at in found.items()
        }

    async def _all_committed(self, queue: MessageQueue) -> ConsumerOffsets:
        address = await self._session.address_of(self._reader.wire_queue(queue))
        command = request(RequestCode.GET_ALL_CONSUMER_OFFSET)
        timeout_ms = self._options.pulling.timeout_ms
        answer = await self._with_retries(
            lambda: self._session.request(address, command, timeout_ms), queue.broker
        )
        if _NO_OFFSETS in (answer.remark or "").lower():
            return ConsumerOffsets()
        return ConsumerOffsets.decode(whole_body(require_success(answer)))

    def _is_in(self, table: ConsumerOffsets, queue: MessageQueue) -> bool:
        name = f"{self._reader.wire_topic(queue.topic)}@{self._group}"
        return queue.queue_id in table.offset_table.get(name, {})

    async def commit(self, offsets: Offsets) -> Offsets:
        """Tell brokers how far the group has come; return what they have noted.

        One that does not is logged once: the checkpoint knows, and the next batch tells again.
        """
        noted = await gather_by_key(offsets, lambda queue: self._commit(queue, offsets[queue]))
        return {queue: offsets[queue] for queue, is_noted in noted.items() if is_noted}

    async def _commit(self, queue: MessageQueue, offset: int) -> bool:
        if self._is_silent(queue.broker):
            return False
        try:
            await offset_commit.commit(
                self._session, self._reader, self._group, queue, QueueOffset(offset)
            )
        except TurbopumpError as error:
            self._note_silence(queue.broker, error)
            if self._uncommitted.get(queue) != str(error):
                _log.warning("%s: offset %d not committed: %s", queue, offset, error)
            self._uncommitted[queue] = str(error)
            return False
        self._uncommitted.pop(queue, None)
        return True

    # --- times ------------------------------------------------------------------------------------

    async def since(
        self, timestamp_ms: int, limits: Mapping[MessageQueue, Limits]
    ) -> dict[MessageQueue, int]:
        """Return the first offset of each queue that was stored at a time or after it."""
        return await gather_by_key(
            limits, lambda queue: self._first_since(queue, timestamp_ms, limits[queue])
        )

    async def _first_since(self, queue: MessageQueue, timestamp_ms: int, ends: Limits) -> int:
        """Search from where the broker says: it returns any message near the time, not the first.

        ``low`` is always before what is looked for, ``high`` never.
        """
        low, high = ends.low - 1, ends.high
        if ends.low == ends.high:
            return ends.high
        hint = await self._with_retries(
            lambda: self._reader.offset_at_ms(queue, timestamp_ms), str(queue)
        )
        step, at = 1, min(max(hint, ends.low), ends.high - 1)
        while low + 1 < high:
            if await self._stored_ms(queue, at) >= timestamp_ms:
                high, aim = at, at - step
            else:
                low, aim = at, at + step
            # Away from the hint in growing steps until it lies between, then by halves.
            step *= 2
            at = aim if low < aim < high else (low + high) // 2
        return high

    async def _stored_ms(self, queue: MessageQueue, offset: int) -> int:
        found = await self._messages(queue, offset, 1)
        if found is None:
            # Deleted from the front, hence older than whatever is left.
            return -1
        return found.messages[0].store_timestamp_ms

    async def marks(self, offsets: Offsets) -> dict[MessageQueue, Mark | None]:
        """Return the mark of the message before each offset, None where there is none.

        Queues are missing whose broker does not answer.
        """
        found, failed = await gather_available(
            offsets, lambda queue: self._mark(queue, offsets[queue] - 1)
        )
        for queue, error in failed.items():
            _log.info("%s: cannot check for a re-created topic: %s", queue, error)
        return dict(found)

    async def _mark(self, queue: MessageQueue, offset: int) -> Mark | None:
        if offset < 0:
            return None
        try:
            found = await self._messages(queue, offset, 1, retries=1)
        except RemoteError as error:
            if error.retriable:
                raise
            return None
        if found is None or found.messages[0].queue_offset != offset:
            return None
        return found.messages[0].store_timestamp_ms, found.messages[0].physical_offset

    async def bytes_per_row(self, queue: MessageQueue, offset: int) -> int:
        """Return how large the next messages of a queue are, on the average.

        Why a broker refuses to show them is found out by who reads them.
        """
        try:
            found = await self._messages(queue, offset, _SAMPLE_ROWS)
        except RemoteError as error:
            _log.warning("%s: cannot sample message sizes: %s", queue, error)
            return 1
        if found is None:
            return 1
        return sum(message.size for message in found.messages) // len(found.messages)

    async def _messages(
        self, queue: MessageQueue, offset: int, count: int, retries: int | None = None
    ) -> Found | None:
        everything, at = (
            subscription(self._reader.wire_topic(queue.topic), "*", 0),
            QueueOffset(offset),
        )
        try:
            outcome = await with_retries(
                lambda: self._reader.pull(queue, at, everything, count, is_held=False),
                self._options.pulling.retries if retries is None else retries,
                queue,
            )
        except DamagedMessage as error:
            # Its size and time will do; reading it fails.
            view = error.message
            return view and Found(QueueOffset(error.next_offset), at, at, 0, messages=(view,))
        return outcome if isinstance(outcome, Found) and outcome.messages else None

    # --- waiting ----------------------------------------------------------------------------------

    async def wait_for_messages(self, at: Offsets, wait_ms: int) -> bool:
        """Return True when a message comes at one of the offsets, False when the time is over.

        Brokers hold a pull of each queue and answer the one that has news. A queue that is said to
        be gone has none: whether it is, `unreadable` finds out. Other refusals are raised.
        """
        held = [asyncio.ensure_future(self._held(queue, at[queue], wait_ms)) for queue in at]
        sleeping = asyncio.ensure_future(asyncio.sleep(wait_ms / 1000))
        try:
            pending = {sleeping, *held}
            while sleeping in pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if any(task.result() for task in done if task is not sleeping):
                    return True
            return False
        finally:
            for task in (sleeping, *held):
                task.cancel()
            await asyncio.gather(sleeping, *held, return_exceptions=True)

    async def _held(self, queue: MessageQueue, offset: int, wait_ms: int) -> bool:
        pulling = self._options.pulling.of(queue.topic)
        wanted = subscription(self._reader.wire_topic(queue.topic), pulling.expression, 0)
        try:
            outcome = await self._reader.pull_records(
                queue, QueueOffset(offset), wanted, 1, is_held=True, timeout_ms=wait_ms
            )
        except TurbopumpError as error:
            if isinstance(error, RemoteError) and unreadable_reason(queue, error) is not None:
                self._checks.refuse(queue, error)
            elif not error.retriable:
                raise
            return False
        return outcome.max_offset > offset

    # --- inside -----------------------------------------------------------------------------------

    async def _with_retries(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        return await with_retries(call, self._options.pulling.retries, what)


def _at(offset: int, ends: Limits) -> int:
    return {EARLIEST_OFFSET: ends.low, LATEST_OFFSET: ends.high}.get(offset, offset)
