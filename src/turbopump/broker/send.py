"""Accepting messages: checked, perhaps given a topic, stored, and answered when that is true."""

from __future__ import annotations

import logging
from functools import lru_cache
from random import Random

from msgspec import Struct

from turbopump.broker.config import BrokerConfig
from turbopump.broker.durability import Late, Outcome, Promise
from turbopump.broker.groups import Groups
from turbopump.broker.live_config import LiveConfig
from turbopump.broker.overload import WorkAhead
from turbopump.broker.put import Draft, Put, delay_level_of, waits_for_disk
from turbopump.broker.stats import Stats
from turbopump.broker.topics import Topics
from turbopump.clock import Clock
from turbopump.errors import BodyError, InvalidArgument, RemoteError, WriteRefused
from turbopump.net.connection import Connection
from turbopump.net.router import Handler
from turbopump.store.append import Group
from turbopump.store.outcomes import Appended
from turbopump.wire import properties as names
from turbopump.wire.batch import decode_batch
from turbopump.wire.bodies import TopicConfig
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import FLAG_ONEWAY, Command, Serialize, whole_body
from turbopump.wire.headers import BrokerTraits, SendMessage, SendMessageAnswer, SendMessageV2
from turbopump.wire.hosts import Host, host, split_address
from turbopump.wire.ids import offset_ids
from turbopump.wire.names import (
    RETRY_PREFIX,
    check_name,
    dead_letter_topic,
    is_forbidden_to_send,
)
from turbopump.wire.record import Record
from turbopump.wire.record_batch import record_batch
from turbopump.wire.schema import ExtFields
from turbopump.wire.send_answers import SendAnswers
from turbopump.wire.sysflag import MULTI_TAGS, Transaction, transaction_of

_log = logging.getLogger(__name__)

_ENTRY_END = names.ENTRY_END.encode()
UNIT_TOPIC = 1
UNIT_RETRY_TOPIC = 2

_LOG_DROPPED_MS = 10_000

_CLIENT_LIMITS_RETRIES_SINCE = 121
"""From this version number on, a client's own limit of retries counts."""


class Accepted(Struct, frozen=True):
    """A send that has passed the checks, and where it goes."""

    header: SendMessage
    topic: str
    queue_id: int
    sys_flag: int
    body: bytes | memoryview
    born_host: Host


class Sends:
    """Serves the requests that bring messages."""

    def __init__(
        self,
        *,
        config: LiveConfig,
        store_host: Host,
        put: Put,
        work_ahead: WorkAhead,
        topics: Topics,
        groups: Groups,
        stats: Stats,
        clock: Clock,
        chance: Random,
    ) -> None:
        self._config = config
        self._store_host = store_host
        self._put = put
        self._work_ahead = work_ahead
        self._topics = topics
        self._groups = groups
        self._stats = stats
        self._clock = clock
        self._chance = chance
        self._is_closed = False
        self._dropped = 0
        self._log_dropped_from_ms = 0
        self._take_over(config.current)
        config.listen(lambda _, changed: self._take_over(changed))

    def _take_over(self, config: BrokerConfig) -> None:
        """Prepare what every message is checked with, and what goes into it and its answer."""
        identity, overload = config.identity, config.overload
        traits = BrokerTraits(region=identity.region, trace_on=identity.trace_on)
        self._traits = traits.to_ext_fields()
        self._answers = SendAnswers(self._traits, self._store_host)
        self._cluster = names.encode({names.CLUSTER: identity.cluster})
        self._body_bytes_max = config.limits.message_bytes_max
        self._sends_from_ms = config.access.sends_from_ms
        self._wait_max_ms = overload.send_wait_max_ms if overload.fast_failure else None

    def handlers(self) -> dict[int, Handler]:
        return {
            RequestCode.SEND_MESSAGE: self.send,
            RequestCode.SEND_MESSAGE_V2: self.send_v2,
            RequestCode.SEND_BATCH_MESSAGE: self.send_v2,
        }

    def send(self, request: Command, peer: Connection) -> Command | None:
        """Serve a send whose fields have long names."""
        return self._serve(request, peer, SendMessage.from_ext_fields(request.ext_fields))

    def send_v2(self, request: Command, peer: Connection) -> Command | None:
        """Serve a send whose fields have letters for names."""
        return self._serve(request, peer, SendMessageV2.from_ext_fields(request.ext_fields))

    def _serve(self, request: Command, peer: Connection, header: SendMessage) -> Command | None:
        """Refuse at once, or return None and answer when the message is stored."""
        try:
            self._refuse_when_busy()
            accepted = self._accept(request, peer, header)
            records, waits = self._batch(accepted) if header.batch else self._single(accepted)
            # Retried copies inherit WAIT=false: their consumer commits the original once they are
            # acknowledged, so the broker's mode decides.
            durable = waits or _is_retry(header)
        except WriteRefused as error:
            # A new topic that could not be saved.
            refused = RemoteError(ResponseCode.SERVICE_NOT_AVAILABLE, str(error))
            return self._refusal(request, refused)
        except RemoteError as error:
            return self._refusal(request, error)

        promise = Promise.DURABLE if durable else Promise.WRITTEN
        self._put.soon(records, promise, self._stored, request, peer, accepted, len(records))
        return None

    def _stored(
        self,
        outcome: Outcome,
        request: Command,
        peer: Connection,
        accepted: Accepted,
        count: int,
    ) -> None:
        """Answer a send."""
        if isinstance(outcome, Late) and _is_retry(accepted.header):
            outcome = outcome.as_failure()
        if isinstance(outcome, RemoteError):
            peer.answer(request, self._refusal(request, outcome))
            return
        queue_id = accepted.queue_id
        if isinstance(outcome, Late):
            appended = outcome.appended
            fields = self._fields(appended, queue_id)
            peer.answer(request, request.answer(outcome.code, fields, remark=outcome.remark))
        else:
            appended = outcome
            if count == 1 and request.serialize is Serialize.JSON and not peer.is_observed:
                at = appended.physical_offsets[0]
                frame = self._answers.frame(request.opaque, at, queue_id, appended.queue_offset)
                peer.answer_encoded(request, frame)
            else:
                fields = self._fields(appended, queue_id)
                peer.answer(request, request.answer(ResponseCode.SUCCESS, fields))
        size = appended.end_offset - appended.physical_offsets[0]
        self._stats.put(accepted.topic, queue_id, count, size)

    def _refusal(self, request: Command, error: RemoteError) -> Command:
        self._stats.put_failed()
        if request.flag & FLAG_ONEWAY:
            self._note_dropped(error)
        return request.answer(error.code, self._traits, remark=error.remark)

    def _note_dropped(self, error: RemoteError) -> None:
        """Log that one-way sends are dropped, as no client learns of it: at most once in 10 s."""
        self._dropped += 1
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._log_dropped_from_ms:
            _log.warning("%d one-way sends dropped, the last one with %s", self._dropped, error)
            self._dropped, self._log_dropped_from_ms = 0, now_ms + _LOG_DROPPED_MS

    def close(self) -> None:
        """Take no more messages; what was taken is still answered."""
        self._is_closed = True

    def _refuse_when_busy(self) -> None:
        if self._is_closed:
            raise RemoteError(ResponseCode.SERVICE_NOT_AVAILABLE, "the broker is closing")
        waited_ms = self._work_ahead.wait_ms
        if self._wait_max_ms is not None and waited_ms > self._wait_max_ms:
            raise RemoteError(
                ResponseCode.SYSTEM_BUSY,
                f"[TIMEOUT_CLEAN_QUEUE]broker busy, requests wait behind {waited_ms} ms of work:"
                " start flow control for a while",
            )

    # --- checks -----------------------------------------------------------------------------------

    def _accept(self, request: Command, peer: Connection, header: SendMessage) -> Accepted:
        sent = request.body
        # A batch is taken apart where it lies: it need not be copied as a whole.
        body = sent if header.batch and isinstance(sent, memoryview) else whole_body(request)
        if len(body) > self._body_bytes_max:
            raise self._too_large(len(body))
        topic = self.admit(header, peer.peer_address)
        queue_id = header.queue_id
        if queue_id < 0:
            queue_id = self._chance.randrange(topic.write_queue_nums)
        name = topic.topic_name
        if name.startswith(RETRY_PREFIX) and self._is_hopeless(request, header, peer):
            dead_letters = dead_letter_topic(name.removeprefix(RETRY_PREFIX))
            name, queue_id = self._topics.create_internal(dead_letters, queues=1).topic_name, 0
        multi_tags = MULTI_TAGS if topic.topic_filter_type == "MULTI_TAG" else 0
        return Accepted(
            header, name, queue_id, header.sys_flag | multi_tags, body, host_of(peer.peer_address)
        )

    def admit(self, header: SendMessage, client: str) -> TopicConfig:
        """Return the topic that a message may be stored in, made from its template if need be.

        ``client`` is the address of the sender.
        """
        starts_ms = self._sends_from_ms
        if starts_ms and starts_ms > self._clock.now_ms():
            raise RemoteError(
                ResponseCode.SYSTEM_ERROR,
                f"broker unable to service, until {starts_ms} (startAcceptSendRequestTimeStamp)",
            )
        if is_forbidden_to_send(header.topic):
            raise RemoteError(
                ResponseCode.NO_PERMISSION,
                f"Sending message to topic[{header.topic}] is forbidden.",
            )
        topic = self._topics.find(header.topic)
        if topic is None:
            topic = self._create_topic(header, client)
        # A broker that is not writable still takes plain sends: clients avoid it by its route.
        if topic.order and not self._config.current.access.can_write:
            raise self._forbidden("sending message")
        queues = max(topic.read_queue_nums, topic.write_queue_nums)
        if header.queue_id >= queues or (header.queue_id < 0 and topic.write_queue_nums < 1):
            raise RemoteError(
                ResponseCode.SYSTEM_ERROR,
                f"request queueId[{header.queue_id}] is illegal: topic {topic.topic_name}"
                f" has {queues} queues",
            )
        return topic

    def _create_topic(self, header: SendMessage, client: str) -> TopicConfig:
        wrong = check_name(header.topic)
        if wrong is not None:
            raise RemoteError(ResponseCode.SYSTEM_ERROR, wrong)
        unit = 0
        if header.unit_mode:
            unit = UNIT_RETRY_TOPIC if header.topic.startswith(RETRY_PREFIX) else UNIT_TOPIC
        topic = self._topics.create_by_send(
            header.topic, header.default_topic, header.default_topic_queue_nums, unit, client
        )
        if topic is None:
            raise RemoteError(
                ResponseCode.TOPIC_NOT_EXIST,
                f"topic[{header.topic}] not exist, apply first please! No topic can be made from"
                f" the template {header.default_topic!r} here.",
            )
        return topic

    def _is_hopeless(self, request: Command, header: SendMessage, peer: Connection) -> bool:
        """Whether a message was retried as often as its group allows."""
        name = header.topic.removeprefix(RETRY_PREFIX)
        group = self._groups.find(name, peer.peer_address)
        if group is None:
            raise RemoteError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group not exist, {name}"
            )
        most = retries_max(request, header.max_reconsume_times, group.retry_max_times)
        return (header.reconsume_times or 0) >= most

    def _too_large(self, size: int) -> RemoteError:
        return RemoteError(
            ResponseCode.MESSAGE_ILLEGAL,
            f"the message is illegal: a body of {size} bytes,"
            f" at most {self._body_bytes_max} (maxMessageSize)",
        )

    def _forbidden(self, what: str) -> RemoteError:
        place = self._config.current.identity.reachable_host
        return RemoteError(ResponseCode.NO_PERMISSION, f"the broker[{place}] {what} is forbidden")

    # --- storing ----------------------------------------------------------------------------------

    def _single(self, accepted: Accepted) -> tuple[list[Record], bool]:
        """Return the record of a single send, and whether the sender waits for the disk."""
        text = accepted.header.properties or ""
        if names.DELAY in text or names.TRANSACTION_PREPARED in text:
            return self._special(accepted, names.decode(text))
        # The way of nearly all messages: their properties are not taken apart.
        kept, wait = names.taken_out(text, names.WAIT)
        stored = f"{kept}{names.ENTRY_END}{self._cluster}" if kept else self._cluster
        record = self._record(accepted, bytes(accepted.body), stored.encode(), accepted.header.flag)
        return [record], wait is None or wait.lower() == "true"

    def _special(self, accepted: Accepted, properties: dict[str, str]) -> tuple[list[Record], bool]:
        """Return the record of a message that may be delayed or part of a transaction."""
        if properties.get(names.TRANSACTION_PREPARED, "").lower() == "true":
            raise self._forbidden("sending transaction message")
        waits = waits_for_disk(properties)
        if delay_level_of(properties) == 0:
            # Delayed messages keep it, as the original's do.
            properties.pop(names.WAIT, None)
        properties[names.CLUSTER] = self._config.current.identity.cluster
        header = accepted.header
        draft = Draft(
            topic=accepted.topic,
            queue_id=accepted.queue_id,
            properties=properties,
            body=bytes(accepted.body),
            flag=header.flag,
            sys_flag=accepted.sys_flag,
            born_timestamp_ms=header.born_timestamp,
            born_host=accepted.born_host,
            store_host=self._store_host,
            reconsume_times=header.reconsume_times or 0,
        )
        return [self._put.record(draft)], waits

    def _batch(self, accepted: Accepted) -> tuple[Group, bool]:
        """Return the records of a batch, and whether the sender waits for the disk."""
        shared = names.decode(accepted.header.properties or "")
        in_transaction = transaction_of(accepted.sys_flag) is not Transaction.NONE
        if not accepted.body or delay_level_of(shared) > 0 or in_transaction:
            raise RemoteError(
                ResponseCode.MESSAGE_ILLEGAL,
                "a batch must have messages, and neither a delay nor a transaction",
            )
        waits = waits_for_disk(shared)
        shared[names.CLUSTER] = self._config.current.identity.cluster
        of_all = names.encode(shared).encode()
        like = self._record(accepted, b"", b"", 0)
        made = record_batch(like, accepted.body, of_all)
        return (self._records(accepted, of_all) if made is None else made), waits

    def _records(self, accepted: Accepted, of_all: bytes) -> list[Record]:
        """Make the records of a batch; all of them get some properties."""
        later = _ENTRY_END + of_all
        topic, queue_id, sys_flag = accepted.topic.encode(), accepted.queue_id, accepted.sys_flag
        born_ms, born_host = accepted.header.born_timestamp, accepted.born_host
        store_host, reconsumed = self._store_host, accepted.header.reconsume_times or 0
        try:
            return [
                Record(
                    topic=topic,
                    queue_id=queue_id,
                    body=entry.body,
                    properties=_joined(entry.properties, of_all, later),
                    flag=entry.flag,
                    sys_flag=sys_flag,
                    born_timestamp_ms=born_ms,
                    born_host=born_host,
                    store_host=store_host,
                    reconsume_times=reconsumed,
                )
                for entry in decode_batch(bytes(accepted.body))
            ]
        except BodyError as error:
            raise RemoteError(ResponseCode.MESSAGE_ILLEGAL, f"batch: {error}") from error
        except InvalidArgument as error:
            raise RemoteError(ResponseCode.MESSAGE_ILLEGAL, str(error)) from error

    def _record(self, accepted: Accepted, body: bytes, properties: bytes, flag: int) -> Record:
        try:
            return Record(
                topic=accepted.topic.encode(),
                queue_id=accepted.queue_id,
                body=body,
                properties=properties,
                flag=flag,
                sys_flag=accepted.sys_flag,
                born_timestamp_ms=accepted.header.born_timestamp,
                born_host=accepted.born_host,
                store_host=self._store_host,
                reconsume_times=accepted.header.reconsume_times or 0,
            )
        except InvalidArgument as error:
            raise RemoteError(ResponseCode.MESSAGE_ILLEGAL, str(error)) from error

    # --- answering --------------------------------------------------------------------------------

    def _fields(self, appended: Appended, queue_id: int) -> ExtFields:
        ids = offset_ids(self._store_host, appended.physical_offsets)
        return SendMessageAnswer.fields_of(self._traits, ids, queue_id, appended.queue_offset)


def _is_retry(header: SendMessage) -> bool:
    """Return whether a consumer sends a failed message as a new one, for a later try."""
    return header.topic.startswith(RETRY_PREFIX)


@lru_cache(maxsize=16384)
def host_of(peer_address: str) -> Host:
    """Return a peer's address as messages keep it."""
    return host(*split_address(peer_address))


def retries_max(request: Command, wanted: int | None, of_group: int) -> int:
    """Return how often a message may be retried: the client decides if it is new enough."""
    if wanted is not None and request.version >= _CLIENT_LIMITS_RETRIES_SINCE:
        return wanted
    return of_group


def _joined(own: bytes, shared: bytes, later: bytes) -> bytes:
    """Add properties that all have; ``later`` are the same with what ends the one before."""
    return own + shared if not own or own.endswith(_ENTRY_END) else own + later
