"""Answering pulls: messages at once, or held until one comes that the puller wants."""

from __future__ import annotations

import contextlib
import dataclasses

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from turbopump.broker.arrivals import Arrivals, HeldPull, Wants
from turbopump.broker.clients import Consumers
from turbopump.broker.config import BrokerConfig
from turbopump.broker.durability import Outcome, Promise
from turbopump.broker.groups import Groups
from turbopump.broker.live_config import LiveConfig
from turbopump.broker.offsets import Offsets
from turbopump.broker.pull_row import PullRow
from turbopump.broker.put import Draft, Put
from turbopump.broker.stats import Stats
from turbopump.broker.subscription_filters import SubscriptionFilters
from turbopump.broker.topics import Topics, is_readable
from turbopump.clock import Clock
from turbopump.errors import RemoteError
from turbopump.message import MessageQueue, QueueOffset
from turbopump.net.connection import Connection
from turbopump.net.router import Handler, failure
from turbopump.store import outcomes
from turbopump.store.config import ReadLimits
from turbopump.store.outcomes import EVERYTHING, Filter, ReadOutcome
from turbopump.store.store import Store
from turbopump.wire import properties as names
from turbopump.wire.bodies import GroupConfig, MessageModel, Subscription
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, Serialize
from turbopump.wire.headers import NoFields, PullMessage, PullMessageAnswer
from turbopump.wire.hosts import Host
from turbopump.wire.names import OFFSET_MOVED_TOPIC
from turbopump.wire.pull_answers import PullAnswers
from turbopump.wire.pull_requests import VARYING
from turbopump.wire.sysflag import PULL_COMMIT_OFFSET, PULL_SUBSCRIPTION, PULL_SUSPEND

_MASTER = 0


class Pull(Struct, frozen=True):
    """A pull that has been let in."""

    request: Command
    peer: Connection
    header: PullMessage
    group: GroupConfig
    wanted: Filter


class Pulls:
    """Serves pull requests."""

    def __init__(
        self,
        *,
        config: LiveConfig,
        store_host: Host,
        store: Store,
        put: Put,
        arrivals: Arrivals,
        topics: Topics,
        groups: Groups,
        consumers: Consumers,
        filters: SubscriptionFilters,
        offsets: Offsets,
        stats: Stats,
        clock: Clock,
    ) -> None:
        self._config = config
        self._store_host = store_host
        self._store = store
        self._put = put
        self._arrivals = arrivals
        self._topics = topics
        self._groups = groups
        self._consumers = consumers
        self._filters = filters
        self._offsets = offsets
        self._stats = stats
        self._clock = clock
        self._take_over(config.current)
        config.listen(lambda _, changed: self._take_over(changed))

    def _take_over(self, config: BrokerConfig) -> None:
        """Prepare the limits of pulls that want large answers; no others are stricter."""
        usual, most = config.store.limits, config.limits
        self._bulk = dataclasses.replace(
            usual,
            memory_count_max=max(usual.memory_count_max, most.bulk_count_max),
            memory_bytes_max=max(usual.memory_bytes_max, most.bulk_bytes_max),
            disk_count_max=max(usual.disk_count_max, most.bulk_count_max),
            disk_bytes_max=max(usual.disk_bytes_max, most.bulk_bytes_max),
        )

    def handlers(self) -> dict[int, Handler]:
        return {RequestCode.PULL_MESSAGE: self.pull}

    def pull(self, request: Command, peer: Connection) -> Command | None:
        """Answer with messages, or hold the pull and return None."""
        header = PullMessage.from_ext_fields(request.ext_fields)
        group = self._admit(header, peer.peer_address)
        if self._consumers.has_absent:
            self._consumers.note_puller(header.consumer_group, peer)
        pull = Pull(request, peer, header, group, self._wanted(header, group))
        if header.sys_flag & PULL_COMMIT_OFFSET and self._is_committable(header):
            self._offsets.commit(
                header.consumer_group, header.topic, header.queue_id, header.commit_offset
            )
        outcome = self._read(pull)
        if isinstance(outcome, outcomes.Found):
            answer = self._hand_out(pull, outcome)
            if answer is None and _is_repeatable(pull) and peer.row.is_followed:
                self._begin_row(pull)
            return answer
        may_hold = header.sys_flag & PULL_SUSPEND and not self._arrivals.is_full
        if may_hold and _code(outcome, header.queue_offset) == ResponseCode.PULL_NOT_FOUND:
            self._hold(pull, outcome)
            return None
        return self._answer_without(pull, outcome)

    def _is_committable(self, header: PullMessage) -> bool:
        """Whether a queue has the offset, or ends there; what a client may come to exists."""
        _, end = self._store.queue_range(header.topic, header.queue_id)
        return 0 <= header.commit_offset <= end

    # --- checks, in the order of the protocol -----------------------------------------------------

    def _admit(self, header: PullMessage, client: str) -> GroupConfig:
        config = self._config.current
        if not config.access.can_read:
            raise RemoteError(
                ResponseCode.NO_PERMISSION,
                f"the broker[{config.identity.reachable_host}] pulling message is forbidden",
            )
        group = self._groups.find(header.consumer_group, client)
        if group is None:
            raise RemoteError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"subscription group [{header.consumer_group}] does not exist",
            )
        if not group.consume_enable:
            raise RemoteError(
                ResponseCode.NO_PERMISSION,
                f"subscription group no permission, {header.consumer_group}",
            )
        topic = self._topics.find(header.topic)
        if topic is None:
            raise RemoteError(
                ResponseCode.TOPIC_NOT_EXIST,
                f"topic[{header.topic}] not exist, apply first please!",
            )
        if not is_readable(topic):
            raise RemoteError(
                ResponseCode.NO_PERMISSION,
                f"the topic[{header.topic}] pulling message is forbidden",
            )
        if not 0 <= header.queue_id < topic.read_queue_nums:
            raise RemoteError(
                ResponseCode.SYSTEM_ERROR,
                f"queueId[{header.queue_id}] is illegal, topic:[{header.topic}]"
                f" topicConfig.readQueueNums:[{topic.read_queue_nums}]"
                f" consumer:[{header.consumer_group}]",
            )
        return group

    def _wanted(self, header: PullMessage, group: GroupConfig) -> Filter:
        if header.sys_flag & PULL_SUBSCRIPTION:
            return self._filters.of_request(header)
        subscription = self._subscription(header, group)
        return self._filters.of_subscription(header.consumer_group, subscription)

    def _subscription(self, header: PullMessage, group: GroupConfig) -> Subscription:
        name = header.consumer_group
        model = self._consumers.message_model(name)
        if model is None:
            raise RemoteError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST, f"the consumer's group [{name}] is not online"
            )
        if model is MessageModel.BROADCASTING and not group.consume_broadcast_enable:
            raise RemoteError(
                ResponseCode.NO_PERMISSION,
                f"the consumer group[{name}] can not consume by broadcast way",
            )
        subscription = self._consumers.subscription(name, header.topic)
        if subscription is None:
            raise RemoteError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST,
                f"the consumer's group [{name}] has no subscription to {header.topic}",
            )
        if subscription.sub_version < header.sub_version:
            raise RemoteError(
                ResponseCode.SUBSCRIPTION_NOT_LATEST,
                f"the consumer's subscription of {header.topic} is newer than the broker knows",
            )
        return subscription

    # --- reading, holding, answering --------------------------------------------------------------

    def _read(self, pull: Pull) -> ReadOutcome:
        header = pull.header
        return self._store.read(
            header.topic,
            header.queue_id,
            QueueOffset(header.queue_offset),
            header.max_msg_nums,
            pull.wanted,
            self._limits(header),
        )

    def _limits(self, header: PullMessage) -> ReadLimits | None:
        return self._bulk if header.bulk_pull else None

    def _begin_row(self, pull: Pull) -> None:
        """Have pulls behind one that was answered with messages answered together, if alike."""
        header, row = pull.header, pull.peer.row
        pulls = PullRow(self._store, self._stats, row, header, self._limits(header), _FOUND)
        row.begin(VARYING, pulls.serve)

    def _hold(self, pull: Pull, outcome: ReadOutcome) -> None:
        header = pull.header
        # Tens of thousands may be held: what has been read of the request already can go.
        request = replace(pull.request, ext_fields=None, body=b"")
        pull = Pull(request, pull.peer, header, pull.group, pull.wanted)
        polling = self._config.current.long_polling
        wait_ms = header.suspend_timeout_millis if polling.enabled else polling.short_hold_ms
        self._arrivals.hold(
            HeldPull(
                queue=(header.topic, header.queue_id),
                offset=header.queue_offset,
                owner=pull.peer,
                resume=lambda: self._resume(pull),
                tags_codes=pull.wanted.tags_codes,
                wants=_wants(pull.wanted),
                is_behind=isinstance(outcome, outcomes.UnitsMissing),
            ),
            max(0, wait_ms),
        )

    def _resume(self, pull: Pull) -> None:
        """Answer a pull whose wait is over, with whatever there is now, if it still may read it."""
        request, header = pull.request, pull.header
        try:
            group = self._admit(header, pull.peer.peer_address)
            if not header.sys_flag & PULL_SUBSCRIPTION:
                # The group may want something else by now.
                pull = replace(pull, wanted=self._wanted(header, group))
            outcome = self._read(pull)
            if isinstance(outcome, outcomes.Found):
                answer = self._hand_out(pull, outcome)
            elif (
                _is_plain(pull)
                and _code(outcome, header.queue_offset) == ResponseCode.PULL_NOT_FOUND
            ):
                self._answer_nothing_new(pull, outcome)
                return
            else:
                answer = self._answer_without(pull, outcome)
        except RemoteError as error:
            answer = request.answer(error.code, NoFields(), remark=error.remark)
        except Exception as error:  # noqa: BLE001 - whatever it is, the peer waits for an answer
            answer = failure(request, pull.peer, error)
        if answer is not None:
            pull.peer.answer(request, answer)

    def _hand_out(self, pull: Pull, found: outcomes.Found) -> Command | None:
        """Answer with messages, or return the answer if it cannot be a prepared one."""
        request, header = pull.request, pull.header
        count = len(found.sizes)
        self._stats.get(header.consumer_group, header.topic, header.queue_id, count, found.size)
        if _is_plain(pull):
            frame = _FOUND.frame(
                request.opaque, found.next_offset, found.min_offset, found.max_offset, found.size
            )
            pull.peer.answer_encoded(request, frame, *found.pieces)
            return None
        remark, pieces = _STATUS[type(found)], tuple(found.pieces)
        return request.answer(ResponseCode.SUCCESS, _fields(found), remark=remark, body=pieces)

    def _answer_nothing_new(self, pull: Pull, outcome: ReadOutcome) -> None:
        """Do as `_answer_without`, for the one answer that idle consumers get all the time."""
        self._stats.missed()
        frame = _NOTHING_NEW[type(outcome)].frame(
            pull.request.opaque, outcome.next_offset, outcome.min_offset, outcome.max_offset
        )
        pull.peer.answer_encoded(pull.request, frame)

    def _answer_without(self, pull: Pull, outcome: ReadOutcome) -> Command:
        """Make the answer that says why there are no messages."""
        code = _code(outcome, pull.header.queue_offset)
        self._stats.missed()
        if code == ResponseCode.PULL_OFFSET_MOVED:
            self._tell_offset_moved(pull, outcome.next_offset)
        return pull.request.answer(code, _fields(outcome), remark=_STATUS[type(outcome)])

    def _tell_offset_moved(self, pull: Pull, offset: int) -> None:
        """Note for operators that a group asked for messages that are not there (any more)."""
        header = pull.header
        queue = MessageQueue(
            header.topic, self._config.current.identity.broker_name, header.queue_id
        )
        event = {
            "consumerGroup": header.consumer_group,
            "messageQueue": queue,
            "offsetNew": offset,
            "offsetRequest": header.queue_offset,
        }
        group = header.consumer_group
        # Only a note: a store that refuses writes must still answer reads.
        with contextlib.suppress(RemoteError):
            record = self._put.record(
                Draft(
                    topic=OFFSET_MOVED_TOPIC,
                    queue_id=0,
                    properties={names.TAGS: group, names.KEYS: group},
                    body=msgspec.json.encode(event),
                    born_timestamp_ms=self._clock.now_ms(),
                    born_host=self._store_host,
                    store_host=self._store_host,
                )
            )
            self._put.now([record], Promise.WRITTEN, _unreported)


def _unreported(_: Outcome) -> None:
    """Ignore what becomes of a note."""


_STATUS: dict[type[ReadOutcome], str] = {
    outcomes.Found: "FOUND",
    outcomes.NoMatch: "NO_MATCHED_MESSAGE",
    outcomes.MessagesRemoved: "MESSAGE_WAS_REMOVING",
    outcomes.MessageDamaged: "MESSAGE_DAMAGED",
    outcomes.QueueUnknown: "NO_MATCHED_LOGIC_QUEUE",
    outcomes.QueueEmpty: "NO_MESSAGE_IN_QUEUE",
    outcomes.OffsetTooSmall: "OFFSET_TOO_SMALL",
    outcomes.UpToDate: "OFFSET_OVERFLOW_ONE",
    outcomes.OffsetTooLarge: "OFFSET_OVERFLOW_BADLY",
    outcomes.UnitsMissing: "OFFSET_FOUND_NULL",
}
"""What the original calls the outcomes; clients see it as the remark."""


_CODES: dict[type[ReadOutcome], ResponseCode] = {
    outcomes.Found: ResponseCode.SUCCESS,
    outcomes.NoMatch: ResponseCode.PULL_RETRY_IMMEDIATELY,
    outcomes.MessagesRemoved: ResponseCode.PULL_RETRY_IMMEDIATELY,
    outcomes.MessageDamaged: ResponseCode.PULL_RETRY_IMMEDIATELY,
    outcomes.QueueUnknown: ResponseCode.PULL_NOT_FOUND,
    outcomes.QueueEmpty: ResponseCode.PULL_NOT_FOUND,
    outcomes.OffsetTooSmall: ResponseCode.PULL_OFFSET_MOVED,
    outcomes.UpToDate: ResponseCode.PULL_NOT_FOUND,
    outcomes.OffsetTooLarge: ResponseCode.PULL_OFFSET_MOVED,
    outcomes.UnitsMissing: ResponseCode.PULL_NOT_FOUND,
}

_EMPTY = (outcomes.QueueEmpty, outcomes.QueueUnknown)

_NOTHING_NEW = {
    kind: PullAnswers(code, _MASTER, _STATUS[kind])
    for kind, code in _CODES.items()
    if code == ResponseCode.PULL_NOT_FOUND
}


_FOUND = PullAnswers(ResponseCode.SUCCESS, _MASTER, _STATUS[outcomes.Found])


def _is_plain(pull: Pull) -> bool:
    """Whether a prepared answer will do: in JSON, and seen by no hook."""
    return pull.request.serialize is Serialize.JSON and not pull.peer.is_observed


def _wants(wanted: Filter) -> Wants | None:
    """Return how a held pull tells whether an arriving message is for it, beyond its tag."""
    matches = wanted.properties
    return None if matches is None else lambda arrival: matches(arrival.properties)


def _is_repeatable(pull: Pull) -> bool:
    """Whether pulls like this one need only be answered, with all messages there are."""
    commits = pull.header.sys_flag & PULL_COMMIT_OFFSET
    return pull.wanted is EVERYTHING and not commits and not pull.request.is_oneway


def _fields(outcome: ReadOutcome) -> PullMessageAnswer:
    return PullMessageAnswer(
        suggest_which_broker_id=_MASTER,
        next_begin_offset=outcome.next_offset,
        min_offset=outcome.min_offset,
        max_offset=outcome.max_offset,
    )


def _code(outcome: ReadOutcome, asked: int) -> ResponseCode:
    if asked and isinstance(outcome, _EMPTY):
        # There is nothing, so nobody can have come that far.
        return ResponseCode.PULL_OFFSET_MOVED
    return _CODES[type(outcome)]
