"""Queries of the driver to name servers and brokers: queues, offsets, commits, long polls."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import TypeVar, assert_never

from turbopump.client import calls
from turbopump.client.concurrent_calls import gather_by_key
from turbopump.client.names import with_namespace
from turbopump.client.pull_config import PullTimes
from turbopump.client.queue_reader import QueueReader
from turbopump.client.session import Session
from turbopump.errors import InvalidArgument, NoRoute, RemoteError, RequestTimeout, TurbopumpError
from turbopump.message import MessageQueue, QueueOffset
from turbopump.spark.reading.arrival_wait import ArrivalWait
from turbopump.spark.reading.commit_routes import CommitRoutes
from turbopump.spark.reading.message_probes import MessageProbes
from turbopump.spark.reading.offsets import (
    Limits,
    Mark,
    Offsets,
    Place,
    by_place,
    inside,
    inside_for_group,
    values_by_place,
)
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
from turbopump.spark.reading.queue_discovery import QueueDiscovery
from turbopump.spark.reading.retry import gather_all, gather_available, with_retries
from turbopump.spark.reading.topic_queries import Newest, TopicQueries
from turbopump.spark.reading.unreadable_queues import (
    QueueChecks,
    Unreadable,
    first_of,
    master_address,
)
from turbopump.wire.bodies import ConsumerOffsets
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import request, whole_body
from turbopump.wire.names import RETRY_PREFIX

T = TypeVar("T")

_log = logging.getLogger(__name__)

_NO_OFFSETS = "no consumer offset"
"""The error text, under a generic code, of a 0.1 broker without any committed offset."""
_NOTHING_KEPT = (ResponseCode.TOPIC_NOT_EXIST, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST)
_ANSWER_MARGIN_MS = 10_000
_SILENCE_TIMEOUTS = 3

_Cause = tuple[type[TurbopumpError], int | None]
"""The type of an error, and its code."""


class Cluster:
    """Queries the queues that options select; topics are named without the namespace."""

    def __init__(self, session: Session, options: SourceOptions) -> None:
        self._session = session
        self._options = options
        timeout_ms = options.pulling.timeout_ms
        idle_ms = options.idle_wait_ms
        times = PullTimes(timeout_ms / 1000, idle_ms / 1000, (idle_ms + _ANSWER_MARGIN_MS) / 1000)
        group = with_namespace(session.config.namespace, options.reader_group)
        self._group = group
        self._reader = QueueReader(session, group, times)
        self._checks = QueueChecks(session, self._reader)
        self._discovery = QueueDiscovery(session, options, self._reader, self._checks)
        self._topics = TopicQueries(session, self._reader, group)
        self._probes = MessageProbes(self._reader, self._topics, options.pulling.retries)
        self._commit_routes = CommitRoutes(session)
        self.lost_commits = self._commit_routes.take_lost
        self._arrivals = ArrivalWait(session, options, self._reader, self._topics, self._checks)
        self._unavailable: dict[str, _Cause] = {}
        self._uncommitted: dict[str, _Cause] = {}
        self._unsampled: dict[str, _Cause] = {}
        self._unmarked: dict[str, _Cause] = {}
        """Why brokers last did not respond or commit; each reason is logged once."""
        self._silent_until_ms: dict[str, int] = {}

    # --- queues -----------------------------------------------------------------------------------

    async def queues(self) -> tuple[MessageQueue, ...]:
        """Return the queues to read, sorted; raises NoRoute for an unknown topic."""
        return await self._discovery.queues()

    async def known_queues(self, at: Offsets | None = None) -> tuple[MessageQueue, ...]:
        """Return the queues to read whose topics are known now; see `QueueDiscovery`."""
        return await self._discovery.known_queues(at)

    async def unreadable(
        self, queues: Iterable[MessageQueue], doubtful: Collection[MessageQueue]
    ) -> dict[MessageQueue, Unreadable]:
        """Return those of the queues that can no longer be read.

        Checks only doubtful queues, and those whose brokers refused a long poll.
        """
        refused = self._checks.refused
        if not (refused or doubtful):
            return {}
        asked = refused.union(doubtful).intersection(queues)
        return await self._checks.find_unreadable(
            sorted(queue for queue in asked if not self._is_silent(queue.broker))
        )

    # --- positions --------------------------------------------------------------------------------

    async def limits(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, Limits]:
        """Return the ends of queues; raises if a broker does not respond after all retries."""
        return await gather_all(
            by_place(queues).values(),
            lambda each: self._with_retries(
                lambda: self._topics.limits(each), f"{each[0].topic}@{each[0].broker}"
            ),
        )

    async def known_limits(self, queues: Iterable[MessageQueue]) -> Mapping[MessageQueue, Limits]:
        """Return the ends of queues whose brokers respond; log the others."""
        places = by_place(queues)
        asked = [place for place in places if not self._is_silent(place[1])]
        found, failed = await gather_available(
            asked, lambda place: self._topics.limits(places[place])
        )
        errors = ((queue, error) for place, error in failed.items() for queue in places[place])
        self._log_once(self._unavailable, (broker for _, broker in asked), errors, "not available")
        return dict(chain(*(each.items() for each in found.values())))

    def newest(self) -> Mapping[Place, Newest] | None:
        """Return which message was the last one of each topic when its ends were asked for.

        None if that is unknown.
        """
        return self._topics.newest()

    def _log_once(
        self,
        causes: dict[str, _Cause],
        brokers: Iterable[str],
        errors: Iterable[tuple[MessageQueue, TurbopumpError]],
        what: str,
    ) -> None:
        """Log errors of queues by broker, unless they had the same cause last time."""
        failed: dict[str, list[tuple[MessageQueue, TurbopumpError]]] = {b: [] for b in brokers}
        for queue, error in errors:
            failed[queue.broker].append((queue, error))
        for broker, found in failed.items():
            if not found:
                causes.pop(broker, None)
                continue
            queues, (error, *_) = zip(*found, strict=True)
            if isinstance(error, RequestTimeout):
                # Skip it for a while: the other queues would wait for it each time. A broker that
                # refuses connections costs no time.
                pause_ms = _SILENCE_TIMEOUTS * self._session.config.request_timeout_ms
                self._silent_until_ms[broker] = self._session.clock.monotonic_ms() + pause_ms
            cause = type(error), error.code if isinstance(error, RemoteError) else None
            if causes.get(broker) != cause:
                _log.warning("%s: %s: %s", first_of(queues), what, error)
            causes[broker] = cause

    def _is_silent(self, broker: str) -> bool:
        return self._silent_until_ms.get(broker, 0) > self._session.clock.monotonic_ms()

    async def resolve(
        self, name: str, position: Position, queues: Iterable[MessageQueue]
    ) -> dict[MessageQueue, int]:
        """Return the offset of a position in each queue; ``name`` is that of the option.

        Raises DataLost or InvalidArgument for one outside its queue, if losses are errors.
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
                return await self._at_time(timestamp_ms, limits, is_start=is_start)
            case OfGroup(otherwise):
                return await self._or_else(name, otherwise, limits)
            case Explicit():
                named = offsets_named(name, position, limits)
                default = EARLIEST_OFFSET if is_start else LATEST_OFFSET
                places = {queue: named.get(queue, default) for queue in limits}
                return await self._named(places, limits, is_start=is_start)
            case _:
                assert_never(position)

    async def _at_time(
        self, timestamp_ms: int, limits: Mapping[MessageQueue, Limits], *, is_start: bool
    ) -> dict[MessageQueue, int]:
        """Return where a time is in each queue; raises InvalidArgument if it must be a message."""
        found = await self.since(timestamp_ms, limits)
        if is_start and self._options.starts_at_message:
            after = [queue for queue, ends in limits.items() if found[queue] >= ends.high]
            if after:
                since = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
                raise InvalidArgument(
                    f"option startingOffsets: {first_of(after)}: no message was stored at or after "
                    f"{since.isoformat(timespec='milliseconds')}; "
                    "startingOffsetsByTimestampStrategy=latest starts at the end"
                )
        return found

    async def _named(
        self,
        named: Mapping[MessageQueue, int | AtTime],
        limits: Mapping[MessageQueue, Limits],
        *,
        is_start: bool,
    ) -> dict[MessageQueue, int]:
        """Return the offsets of queues given by number or by time."""
        offsets = {
            queue: {EARLIEST_OFFSET: limits[queue].low, LATEST_OFFSET: limits[queue].high}.get(
                at, at
            )
            for queue, at in named.items()
            if isinstance(at, int)
        }
        by_time: dict[int, dict[MessageQueue, Limits]] = {}
        for queue, at in named.items():
            if isinstance(at, AtTime):
                by_time.setdefault(at.timestamp_ms, {})[queue] = limits[queue]
        return offsets | await gather_all(
            by_time.items(), lambda each: self._at_time(*each, is_start=is_start)
        )

    async def _or_else(
        self,
        name: str,
        otherwise: Earliest | Latest | AtTime | None,
        limits: Mapping[MessageQueue, Limits],
    ) -> dict[MessageQueue, int]:
        """Return the group's committed offsets, and a default where there is none.

        By default such a queue starts as it would without a group, and a batch ends at its first
        message. Retry topics are always read from their first message.
        """
        committed = await self.committed(limits)
        unread = {queue: ends for queue, ends in limits.items() if committed[queue] is None}
        is_start = name == "startingOffsets"
        goes_to_end = is_start and self._options.is_stream
        default = otherwise or (Latest() if goes_to_end else Earliest())
        unsure = [queue for queue, ends in unread.items() if not ends.is_certain]
        if unsure and isinstance(default, Latest) and is_start:
            # The group's latest commits may not have reached the slave.
            raise NoRoute(
                f"{unsure[0]}: a slave knows no offset of group {self._options.reader_group!r} and"
                " the master is away; start when it is back, or set startingOffsets"
            )
        whole = {q: ends.low for q, ends in unread.items() if q.topic.startswith(RETRY_PREFIX)}
        others = {queue: ends for queue, ends in unread.items() if queue not in whole}
        begun = await self._resolve(name, default, others)
        return {queue: at for queue, at in committed.items() if at is not None} | whole | begun

    async def committed(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int | None]:
        """Return the group's committed offsets, None where there is none."""
        return await gather_all(by_place(queues).values(), self._committed)

    async def _committed(self, queues: Sequence[MessageQueue]) -> Mapping[MessageQueue, int | None]:
        """Ask one broker about one topic; an Apache broker about each queue.

        That also returns 0 for unknown groups while a queue still has its first message; so a 0
        is looked up in the table of all committed offsets.
        """
        at_once = await self._with_retries(lambda: self._topics.committed(queues), first_of(queues))
        if at_once is not None:
            return at_once
        found: Mapping[MessageQueue, int | None] = await self._with_retries(
            lambda: gather_by_key(queues, self._reader.committed), first_of(queues)
        )
        if 0 not in found.values():
            return found
        known = await self._committed_ids(queues[0])
        return {
            queue: None if at == 0 and queue.queue_id not in known else at
            for queue, at in found.items()
        }

    async def _committed_ids(self, queue: MessageQueue) -> Collection[int]:
        """Return which queues of a topic have an offset in a broker's table of all groups."""
        address = await self._session.address_of(self._reader.wire_queue(queue))
        command = request(RequestCode.GET_ALL_CONSUMER_OFFSET)
        timeout_ms = self._options.pulling.timeout_ms
        answer = await self._with_retries(
            lambda: self._session.request(address, command, timeout_ms), queue.broker
        )
        if _NO_OFFSETS in (answer.remark or "").lower():
            return ()
        table = ConsumerOffsets.decode(whole_body(calls.require_success(answer))).offset_table
        return table.get(f"{self._reader.wire_topic(queue.topic)}@{self._group}", {})

    async def stored_offsets(
        self, queues: Iterable[MessageQueue]
    ) -> dict[MessageQueue, int | None]:
        """Return the group's committed offsets where brokers have any, without retries."""
        places = by_place(queues)
        asked = [place for place in places if not self._is_silent(place[1])]
        found, _ = await gather_available(asked, lambda place: self._topics.progress(places[place]))
        return dict(chain(*(each.items() for each in found.values())))

    async def commit(self, offsets: Offsets) -> Offsets:
        """Commit the group's offsets; return those that brokers accepted.

        A failure is logged once: the checkpoint has the offset, and the next batch commits again.
        """
        all_places = values_by_place(offsets)
        places = {place: all_places[place] for place in all_places if not self._is_silent(place[1])}
        failed = await gather_by_key(places, lambda place: self._commit(places[place]))
        errors = chain.from_iterable(each.items() for each in failed.values())
        brokers = (broker for _, broker in places)
        self._log_once(self._uncommitted, brokers, errors, "offset not committed")
        if len(places) == len(all_places) and not any(failed.values()):
            return offsets
        return {
            queue: offsets[queue]
            for place, queues in places.items()
            for queue in queues
            if queue not in failed[place]
        }

    async def _commit(self, offsets: Offsets) -> Mapping[MessageQueue, TurbopumpError]:
        """Commit offsets of one topic on one broker; return those that failed."""
        left: Iterable[MessageQueue] | None = None
        first = next(iter(offsets))
        try:
            master = await self._commit_routes.master(self._reader.wire_queue(first))
        except TurbopumpError as error:
            return dict.fromkeys(offsets, error)
        try:
            left = await self._topics.commit(offsets)
        except (NoRoute, RemoteError) as error:
            _log.info("%s: committing one by one: %s", first_of(tuple(offsets)), error)
        except TurbopumpError as error:
            return dict.fromkeys(offsets, error)
        # A deleted topic, or an Apache broker.
        found = await gather_by_key(
            offsets if left is None else left, lambda queue: self._commit_one(queue, offsets[queue])
        )
        if master is not None:
            # What failed is committed again in any case.
            self._commit_routes.note((first.topic, first.broker), master)
        return {queue: error for queue, error in found.items() if error is not None}

    async def _commit_one(self, queue: MessageQueue, offset: int) -> TurbopumpError | None:
        """Commit an offset, even of a deleted topic; return the error, if any.

        A broker without the topic or the group has no offset, which is equivalent to 0.
        """
        try:
            try:
                await self._reader.commit(queue, QueueOffset(offset))
            except NoRoute:
                if offset:
                    raise
                await self._reset_deleted(queue)
        except TurbopumpError as error:
            has_none = isinstance(error, RemoteError) and error.code in _NOTHING_KEPT
            return None if not offset and has_none else error
        return None

    async def _reset_deleted(self, queue: MessageQueue) -> None:
        """Commit 0: a deleted topic has no route, but its broker may be available."""
        session = self._session
        asked = self._group, self._reader.wire_queue(queue), QueueOffset(0)
        timeout_ms = session.config.request_timeout_ms
        address = await master_address(session, queue.broker)
        # With a response, because the queue then leaves the checkpoint.
        await calls.commit_offset(session, address, *asked, timeout_ms, is_oneway=False)

    # --- messages ---------------------------------------------------------------------------------

    async def since(
        self, timestamp_ms: int, limits: Mapping[MessageQueue, Limits]
    ) -> dict[MessageQueue, int]:
        """Return the first offset of each queue that was stored at or after a time."""
        return await self._probes.since(timestamp_ms, limits)

    async def marks(self, offsets: Offsets) -> dict[MessageQueue, Mark | None]:
        """Return the mark of the message before each offset, or None if there is none.

        Queues whose broker does not respond are missing; they are logged once.
        """
        found, failed = await self._probes.marks(_before(offsets))
        if failed or self._unmarked:
            brokers, what = (q.broker for q in offsets), "cannot check for a re-created topic"
            self._log_once(self._unmarked, brokers, failed.items(), what)
        return found

    async def all_marks(self, offsets: Offsets) -> dict[MessageQueue, Mark | None]:
        """Return the same for all queues; raises SparkError if a broker never responds."""
        return await self._probes.all_marks(_before(offsets))

    async def bytes_per_row(self, offsets: Offsets) -> dict[MessageQueue, int]:
        """Return the average size of the next messages of each queue; of many, a sample is asked.

        1 where the broker refuses, which is logged once.
        """
        found, failed = await self._probes.bytes_per_row(offsets)
        brokers = (queue.broker for queue in offsets)
        self._log_once(self._unsampled, brokers, failed.items(), "cannot sample message sizes")
        return found

    async def wait_for_messages(self, at: Offsets, wait_ms: int) -> bool:
        """Return whether a message arrives at one of the offsets; see `ArrivalWait`."""
        return await self._arrivals.wait(at, wait_ms)

    # --- internals --------------------------------------------------------------------------------

    async def _with_retries(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        return await with_retries(call, self._options.pulling.retries, what)


def _before(offsets: Offsets) -> Offsets:
    return {queue: at - 1 for queue, at in offsets.items()}
