"""One typed function for each client request, except for queue locks (`queue_locks`).

Responses that mean failure raise `RemoteError`; connection failures raise `NetworkError`. Nothing
is retried here: only the caller knows whether that is safe.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Protocol, cast, overload

from msgspec import Struct
from msgspec.structs import replace

from turbopump.core import PullResponseFrame, SendResponseFrame, read_records
from turbopump.errors import DamagedMessage, RecordError, RemoteError
from turbopump.message import MessageQueue, PhysicalOffset, QueueOffset
from turbopump.wire import headers
from turbopump.wire.bodies import CheckClientConfig, ConsumerIds, Subscription, TopicRoute
from turbopump.wire.codes import Language, RequestCode, ResponseCode
from turbopump.wire.command import (
    Buffer,
    Command,
    Payload,
    Response,
    as_command,
    request,
    whole_body,
)
from turbopump.wire.hashing import body_crc
from turbopump.wire.prepared_requests import PullRequest
from turbopump.wire.record import MessageView, decode_record, decode_records

_SUCCESS = int(ResponseCode.SUCCESS)


class Caller(Protocol):
    """Sends requests to addresses; normally a `Session`."""

    @overload
    def request(
        self, address: str, command: Command, timeout_ms: int
    ) -> Coroutine[Any, Any, Command]: ...
    @overload
    def request(
        self, address: str, command: PullRequest, timeout_ms: int
    ) -> Coroutine[Any, Any, Response]: ...
    def request(
        self, address: str, command: Command | PullRequest, timeout_ms: int
    ) -> Coroutine[Any, Any, Response]:
        """Send a request and return its response, whatever its code."""

    async def oneway(self, address: str, command: Command, timeout_ms: int) -> None:
        """Send a request without a response; the timeout covers connecting and writing."""


def require_success(answer: Command) -> Command:
    """Return the response, or raise the error that it reports."""
    if answer.code != _SUCCESS:
        raise RemoteError(answer.code, answer.remark or "")
    return answer


# --- name server ----------------------------------------------------------------------------------


async def route(caller: Caller, nameserver: str, topic: str, timeout_ms: int) -> TopicRoute:
    """Look up the route of a topic (105); code 17 if it is unknown."""
    answer = require_success(await caller.request(nameserver, _route_command(topic), timeout_ms))
    return _decoded_route(whole_body(answer))


@lru_cache(maxsize=256)
def _route_command(topic: str) -> Command:
    header = headers.RouteOf(topic=topic, accept_standard_json_only=True)
    return request(RequestCode.GET_ROUTEINFO_BY_TOPIC, header)


_decoded_route = lru_cache(maxsize=256)(TopicRoute.decode)
"""Clients ask for the same few routes and rarely get a new answer."""


# --- sending --------------------------------------------------------------------------------------


class SendStatus(Enum):
    """How safely a broker stored a message: every status means that it is stored.

    ::

        if receipt.status is not SendStatus.OK:
            log.warning("%s is stored, but may not survive a crash", receipt.message_id)
    """

    OK = ResponseCode.SUCCESS
    FLUSH_DISK_TIMEOUT = ResponseCode.FLUSH_DISK_TIMEOUT
    FLUSH_SLAVE_TIMEOUT = ResponseCode.FLUSH_SLAVE_TIMEOUT
    SLAVE_NOT_AVAILABLE = ResponseCode.SLAVE_NOT_AVAILABLE


_STATUS_BY_CODE = {int(status.value): status for status in SendStatus}


class Stored(Struct, frozen=True, gc=False):
    """A broker's response to a send; ``offset_id`` of a batch joins its messages' ids by ","."""

    status: SendStatus
    offset_id: str
    queue_id: int
    queue_offset: QueueOffset
    region: str | None = None


def stored(answer: Response) -> Stored:
    status = _STATUS_BY_CODE.get(answer.code)
    if status is None:
        raise RemoteError(answer.code, answer.remark or "")
    header = answer if isinstance(answer, SendResponseFrame) else _send_answer(answer)
    return Stored(status, header.msg_id, header.queue_id, header.queue_offset, header.region)  # type: ignore[arg-type] # a cast takes a call


def _send_answer(answer: Response) -> headers.SendMessageAnswer:
    return headers.SendMessageAnswer.from_ext_fields(as_command(answer).ext_fields)


async def send(
    caller: Caller, broker: str, header: headers.SendMessage, body: Payload, timeout_ms: int
) -> Stored:
    """Send a message, or a batch if the header says so (310, 320)."""
    return stored(await caller.request(broker, send_command(header, body), timeout_ms))


async def send_reply(
    caller: Caller, broker: str, header: headers.SendMessage, body: Payload, timeout_ms: int
) -> None:
    """Send the reply to a request message; the broker forwards it to the requester (325)."""
    command = request(RequestCode.SEND_REPLY_MESSAGE_V2, header, body)
    require_success(await caller.request(broker, command, timeout_ms))


def send_command(header: headers.SendMessage, body: Payload) -> Command:
    code = RequestCode.SEND_BATCH_MESSAGE if header.batch else RequestCode.SEND_MESSAGE_V2
    return request(code, header, body)


async def send_back(caller: Caller, broker: str, header: headers.SendBack, timeout_ms: int) -> None:
    """Return a failed message to the broker for redelivery (36)."""
    command = request(RequestCode.CONSUMER_SEND_MSG_BACK, header)
    require_success(await caller.request(broker, command, timeout_ms))


async def end_transaction(
    caller: Caller,
    broker: str,
    header: headers.EndTransaction,
    timeout_ms: int,
    remark: str | None = None,
) -> None:
    """Decide a half message; one-way (37). ``remark`` says why it was not committed."""
    command = request(RequestCode.END_TRANSACTION, header)
    await caller.oneway(broker, replace(command, remark=remark), timeout_ms)


# --- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pulled:
    """The next offset and the queue's limits; ``broker_id`` is the replica to ask next time."""

    next_offset: QueueOffset
    min_offset: QueueOffset
    max_offset: QueueOffset
    broker_id: int


@dataclass(frozen=True, slots=True)
class Found(_Pulled):
    """The pull returned messages.

    ::

        match consumer.pull(queue, offset):
            case Found(messages=messages, next_offset=offset):
                handle(messages)
    """

    messages: Sequence[MessageView]


@dataclass(frozen=True, slots=True)
class NothingNew(_Pulled):
    """The queue has no messages after the offset yet.

    ::

        if isinstance(outcome, NothingNew):
            outcome = consumer.pull_when_found(queue, outcome.next_offset)
    """


@dataclass(frozen=True, slots=True)
class NothingMatched(_Pulled):
    """No message from the offset on matches: pull again at ``next_offset`` immediately.

    ::

        if isinstance(outcome, NothingMatched):
            outcome = consumer.pull(queue, outcome.next_offset, tags="paid")
    """

    has_gap: bool = False
    """Whether the offset moved past messages that were deleted or damaged."""


@dataclass(frozen=True, slots=True)
class OffsetIllegal(_Pulled):
    """The offset is outside the queue: ``next_offset`` is the nearest one inside.

    ::

        if isinstance(outcome, OffsetIllegal):
            outcome = consumer.pull(queue, outcome.next_offset)
    """


@dataclass(frozen=True, slots=True)
class FoundRecords(_Pulled):
    """The pull returned messages in their stored form: whole records, back to back."""

    records: Buffer
    """May contain everything that was received along with them."""


RecordsOutcome = FoundRecords | NothingNew | NothingMatched | OffsetIllegal
PullOutcome = Found | NothingNew | NothingMatched | OffsetIllegal

_GAPS = frozenset({"MESSAGE_WAS_REMOVING", "MESSAGE_DAMAGED"})
"""The remarks of brokers that skipped messages which they cannot read."""

_OUTCOMES: dict[int, type[NothingNew | NothingMatched | OffsetIllegal]] = {
    int(ResponseCode.PULL_NOT_FOUND): NothingNew,
    int(ResponseCode.PULL_RETRY_IMMEDIATELY): NothingMatched,
    int(ResponseCode.PULL_OFFSET_MOVED): OffsetIllegal,
}


async def pull(
    caller: Caller, broker: str, header: headers.PullMessage, timeout_ms: int
) -> PullOutcome:
    """Pull messages of one queue; the broker may hold the request as the header permits (11).

    Brokers compare hashes of tags, so some messages may not match: see `subscriptions.matching`.
    """
    queue = MessageQueue(header.topic, header.broker_name or broker, header.queue_id)
    answer = await pull_records(caller, broker, header, timeout_ms)
    return decoded(answer, queue, header.queue_offset)


def decoded(outcome: RecordsOutcome, queue: MessageQueue, offset: int) -> PullOutcome:
    """Decode the records that a pull from an offset of a queue returned.

    Raises DamagedMessage if the first one is damaged; stops before a later damaged one.
    """
    if not isinstance(outcome, FoundRecords):
        return outcome
    messages, error = read_records(outcome.records, check_crc=True, kind=MessageView)
    next_offset = outcome.next_offset
    if error is not None:
        damaged = _readable(outcome.records, sum(message.size for message in messages))
        if damaged is not None:
            next_offset = damaged.queue_offset
            text = f"the body does not match its checksum {damaged.body_crc}"
        else:
            next_offset = QueueOffset(messages[-1].queue_offset + 1 if messages else offset)
            text = str(error)
        if not messages:
            place = queue.topic, queue.broker, queue.queue_id
            raise DamagedMessage(*place, next_offset, text, damaged)
    limits = outcome.min_offset, outcome.max_offset, outcome.broker_id
    return Found(next_offset, *limits, messages=tuple(messages))


def _readable(records: Buffer, at: int) -> MessageView | None:
    """Return a message of which at most the body is damaged."""
    try:
        return decode_record(records, at)
    except RecordError:
        return None


async def pull_records(
    caller: Caller, broker: str, header: headers.PullMessage, timeout_ms: int
) -> RecordsOutcome:
    """Pull as `pull` does, but leave the messages in their stored form (11)."""
    return pulled(await caller.request(broker, PullRequest(header), timeout_ms))


def pulled(answer: Response) -> RecordsOutcome:
    """Decode the response to a pull, leaving the messages in their stored form."""
    empty = _OUTCOMES.get(answer.code)
    if empty is None and answer.code != _SUCCESS:
        raise RemoteError(answer.code, answer.remark or "")
    place = answer if isinstance(answer, PullResponseFrame) else _pull_answer(answer)
    limits = cast(
        "tuple[QueueOffset, QueueOffset, QueueOffset, int]",
        (
            place.next_begin_offset,
            place.min_offset,
            place.max_offset,
            place.suggest_which_broker_id,
        ),
    )
    if empty is NothingMatched:
        return NothingMatched(*limits, has_gap=answer.remark in _GAPS)
    if empty is not None:
        return empty(*limits)
    body = answer.body
    if not isinstance(body, bytes | bytearray | memoryview):
        body = b"".join(body)
    return FoundRecords(*limits, records=body)


def _pull_answer(answer: Response) -> headers.PullMessageAnswer:
    return headers.PullMessageAnswer.from_ext_fields(as_command(answer).ext_fields)


async def view_message(
    caller: Caller, broker: str, offset: PhysicalOffset, timeout_ms: int
) -> MessageView:
    """Read one message by its position in the log (33)."""
    command = request(RequestCode.VIEW_MESSAGE_BY_ID, headers.ViewMessage(offset=offset))
    answer = require_success(await caller.request(broker, command, timeout_ms))
    return decode_record(whole_body(answer), check_crc=True)


async def query_messages(
    caller: Caller, broker: str, header: headers.QueryMessage, timeout_ms: int
) -> list[MessageView]:
    """Find messages by key (12); hashes may collide, so compare the keys."""
    command = request(RequestCode.QUERY_MESSAGE, header)
    answer = await caller.request(broker, command, timeout_ms)
    if answer.code == ResponseCode.QUERY_NOT_FOUND:
        return []
    return list(decode_records(whole_body(require_success(answer))))


# --- offsets --------------------------------------------------------------------------------------


async def committed_offset(
    caller: Caller, broker: str, group: str, queue: MessageQueue, timeout_ms: int
) -> QueueOffset | None:
    """Return a group's committed offset, or None if the broker has none (14)."""
    header = headers.QueryConsumerOffset(
        consumer_group=group,
        topic=queue.topic,
        queue_id=queue.queue_id,
        broker_name=queue.broker,
    )
    command = request(RequestCode.QUERY_CONSUMER_OFFSET, header)
    answer = await caller.request(broker, command, timeout_ms)
    return None if answer.code == ResponseCode.QUERY_NOT_FOUND else _offset(answer)


async def commit_offset(
    caller: Caller,
    broker: str,
    group: str,
    queue: MessageQueue,
    offset: QueueOffset,
    timeout_ms: int,
    *,
    is_oneway: bool = True,
) -> None:
    """Commit a group's offset (15)."""
    command = _commit_command(group, queue, offset)
    if is_oneway:
        await caller.oneway(broker, command, timeout_ms)
    else:
        require_success(await caller.request(broker, command, timeout_ms))


@lru_cache(maxsize=1024)
def _commit_command(group: str, queue: MessageQueue, offset: QueueOffset) -> Command:
    """Return the request; cached, since the same offset is committed several times."""
    header = headers.UpdateConsumerOffset(
        consumer_group=group,
        topic=queue.topic,
        queue_id=queue.queue_id,
        commit_offset=offset,
        broker_name=queue.broker,
    )
    return request(RequestCode.UPDATE_CONSUMER_OFFSET, header)


async def max_offset(
    caller: Caller, broker: str, queue: MessageQueue, timeout_ms: int
) -> QueueOffset:
    """Return the offset of the next message to be stored in a queue (30)."""
    return await _queue_offset(caller, broker, RequestCode.GET_MAX_OFFSET, queue, timeout_ms)


async def min_offset(
    caller: Caller, broker: str, queue: MessageQueue, timeout_ms: int
) -> QueueOffset:
    """Return the offset of the oldest message of a queue (31)."""
    return await _queue_offset(caller, broker, RequestCode.GET_MIN_OFFSET, queue, timeout_ms)


async def offset_at(
    caller: Caller, broker: str, queue: MessageQueue, timestamp_ms: int, timeout_ms: int
) -> QueueOffset:
    """Return the offset of the first message stored at or after a point in time (29)."""
    header = headers.SearchOffset(
        topic=queue.topic,
        queue_id=queue.queue_id,
        timestamp=timestamp_ms,
        broker_name=queue.broker,
    )
    command = request(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header)
    return _offset(await caller.request(broker, command, timeout_ms))


async def _queue_offset(
    caller: Caller, broker: str, code: RequestCode, queue: MessageQueue, timeout_ms: int
) -> QueueOffset:
    header = headers.QueueOfTopic(
        topic=queue.topic, queue_id=queue.queue_id, broker_name=queue.broker
    )
    return _offset(await caller.request(broker, request(code, header), timeout_ms))


def _offset(answer: Command) -> QueueOffset:
    found = headers.OffsetAnswer.from_ext_fields(require_success(answer).ext_fields)
    return QueueOffset(found.offset)


# --- groups ---------------------------------------------------------------------------------------


async def heartbeat(caller: Caller, broker: str, body: bytes, timeout_ms: int) -> bool:
    """Announce this client's groups to a broker (34): an encoded `Heartbeat`.

    Return whether the broker is Turbopump's. Those of Apache RocketMQ respond in Java.
    """
    answer = require_success(await caller.request(broker, heartbeat_command(body), timeout_ms))
    return answer.language == Language.PYTHON


def heartbeat_command(body: bytes) -> Command:
    """Return the request that announces this client's groups to a broker (34)."""
    return request(RequestCode.HEART_BEAT, body=body)


async def unregister(
    caller: Caller, broker: str, header: headers.UnregisterClient, timeout_ms: int
) -> None:
    """Leave a group (35)."""
    command = request(RequestCode.UNREGISTER_CLIENT, header)
    require_success(await caller.request(broker, command, timeout_ms))


async def consumer_ids(caller: Caller, broker: str, group: str, timeout_ms: int) -> list[str]:
    """Return the client ids of a group's members (38); code 1 if it has none."""
    answer = require_success(await caller.request(broker, _ids_command(group), timeout_ms))
    return list(_decoded_ids(whole_body(answer)).consumer_id_list)


@lru_cache(maxsize=64)
def _ids_command(group: str) -> Command:
    header = headers.ConsumerGroup(consumer_group=group)
    return request(RequestCode.GET_CONSUMER_LIST_BY_GROUP, header)


_decoded_ids = lru_cache(maxsize=64)(ConsumerIds.decode)
"""Groups rarely change between two rounds."""


async def upload_filter(
    caller: Caller,
    filter_server: str,
    group: str,
    subscription: Subscription,
    source: bytes,
    timeout_ms: int,
) -> None:
    """Upload the source of a code filter to a filter server (302); code 1 if it cannot run it."""
    header = headers.RegisterFilterClass(
        consumer_group=group,
        topic=subscription.topic,
        class_name=subscription.sub_string,
        class_crc=body_crc(source),
    )
    command = request(RequestCode.REGISTER_MESSAGE_FILTER_CLASS, header, source)
    require_success(await caller.request(filter_server, command, timeout_ms))


async def check_subscription(
    caller: Caller,
    broker: str,
    client_id: str,
    group: str,
    subscription: Subscription,
    timeout_ms: int,
) -> None:
    """Have a broker validate a subscription (46); code 23 if it cannot parse the expression."""
    body = CheckClientConfig(client_id=client_id, group=group, subscription_data=subscription)
    command = request(RequestCode.CHECK_CLIENT_CONFIG, body=body.encode())
    require_success(await caller.request(broker, command, timeout_ms))
