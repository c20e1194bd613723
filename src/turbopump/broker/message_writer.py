"""The only path into the store: diverts delayed messages, and maps refusals to response codes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from turbopump.broker.durability import Durability, OnOutcome, Pending, Promise, Report
from turbopump.broker.put_times import PutTimes
from turbopump.clock import Clock
from turbopump.core import Block
from turbopump.errors import InvalidArgument, RemoteError, StoreError, WriteRefused
from turbopump.store.append import add_record
from turbopump.store.outcomes import Appended
from turbopump.store.store import Store
from turbopump.wire import properties as names
from turbopump.wire.codes import ResponseCode
from turbopump.wire.hosts import Host
from turbopump.wire.names import SCHEDULE_TOPIC
from turbopump.wire.record import MessageView, Record

_log = logging.getLogger(__name__)

BLOCK_BYTES_MAX = 1024 * 1024
"""Messages that are written together; more are written in parts."""


class Draft(Struct, frozen=True, kw_only=True):
    """A message on its way into the store, with its properties not yet encoded."""

    topic: str
    queue_id: int
    properties: Mapping[str, str]
    body: bytes
    flag: int = 0
    sys_flag: int = 0
    born_timestamp_ms: int
    born_host: Host
    store_host: Host
    reconsume_times: int = 0


def draft_like(
    view: MessageView, topic: str, queue_id: int, properties: Mapping[str, str]
) -> Draft:
    """Return a draft with the body and the origin of a stored message."""
    return Draft(
        topic=topic,
        queue_id=queue_id,
        properties=properties,
        body=view.stored_body,
        flag=view.flag,
        sys_flag=view.sys_flag,
        born_timestamp_ms=view.born_timestamp_ms,
        born_host=view.born_host,
        store_host=view.store_host,
        reconsume_times=view.reconsume_times,
    )


def delay_level_of(properties: Mapping[str, str]) -> int:
    """Return the delay level that a message requests; 0 if it requests none, or an invalid one."""
    text = properties.get(names.DELAY, "0")
    return int(text) if text.isdecimal() else 0


def waits_for_disk(properties: Mapping[str, str]) -> bool:
    """Whether a message's sender waits for the flush."""
    return properties.get(names.WAIT, "true").lower() == "true"


def diverted(draft: Draft, levels: int) -> Draft:
    """Divert a delayed message to the delay topic; return other messages unchanged."""
    level = min(delay_level_of(draft.properties), levels)
    if level <= 0:
        return draft
    kept = {names.REAL_TOPIC: draft.topic, names.REAL_QUEUE_ID: str(draft.queue_id)}
    return replace(
        draft,
        topic=SCHEDULE_TOPIC,
        queue_id=level - 1,
        properties={**draft.properties, **kept},
    )


def record_of(draft: Draft) -> Record:
    """Return the record; refuse what cannot be stored with the protocol's code."""
    try:
        return Record(
            topic=draft.topic.encode(),
            queue_id=draft.queue_id,
            body=draft.body,
            properties=names.encode(draft.properties).encode(),
            flag=draft.flag,
            sys_flag=draft.sys_flag,
            born_timestamp_ms=draft.born_timestamp_ms,
            born_host=draft.born_host,
            store_host=draft.store_host,
            reconsume_times=draft.reconsume_times,
        )
    except InvalidArgument as error:
        raise RemoteError(ResponseCode.MESSAGE_ILLEGAL, str(error)) from error


def refusal(error: RemoteError | InvalidArgument | StoreError) -> RemoteError:
    """Return a refusal of the store with its response code."""
    match error:
        case RemoteError():
            return error
        case InvalidArgument():
            code = ResponseCode.MESSAGE_ILLEGAL
        case WriteRefused():
            code = ResponseCode.SERVICE_NOT_AVAILABLE
        case _:
            code = ResponseCode.SYSTEM_ERROR
    return RemoteError(code, str(error))


def _slave_refusal() -> RemoteError:
    remark = "messages are put to the slave: this broker is a slave, send to its master"
    return RemoteError(ResponseCode.SERVICE_NOT_AVAILABLE, remark)


class MessageWriter:
    """Appends messages; their outcome is reported through the acknowledgement gate."""

    def __init__(
        self,
        store: Store,
        durability: Durability,
        delay_levels: int,
        clock: Clock,
        *,
        is_slave: bool = False,
    ) -> None:
        self.is_slave = is_slave
        """Whether messages come only from a master, and all others are refused."""
        self.suspension: RemoteError | None = _slave_refusal() if is_slave else None
        """Why messages are refused, on a slave or a master that another may have replaced."""
        self._store = store
        self._durability = durability
        self._delay_levels = delay_levels
        self._clock = clock
        self.put_times = PutTimes()
        self._block: Block | None = None
        self._pending: list[Pending] = []

    def record(self, draft: Draft) -> Record:
        """Return a message's record, in the delay topic if it is delayed."""
        return record_of(diverted(draft, self._delay_levels))

    def busy(self) -> RemoteError | None:
        """Return why sends are refused now; None if the disk keeps up."""
        return self.suspension or self._durability.busy()

    def refuse_if_suspended(self) -> None:
        """Raise RemoteError if writes are suspended, as on a slave; call before topic creation."""
        if self.suspension is not None:
            raise self.suspension

    # --- gathered messages ------------------------------------------------------------------------

    @property
    def block(self) -> Block:
        """Where the messages of this turn are gathered; call `add` after adding one."""
        block = self._block
        if block is None:
            block = self._block = self._store.new_block()
            asyncio.get_running_loop().call_soon(self.settle)
        return block

    def add(self, pending: Pending) -> None:
        """Register the waiter of the message, or batch, that was added to the block last.

        It is written with the others at the next `settle`, or in the next turn of the loop:
        requests that waited for the disk are stored outside any received chunk.
        """
        self._pending.append(pending)
        if self.block.size > BLOCK_BYTES_MAX:
            self.settle()

    def append_soon(self, record: Record, promise: Promise, on_outcome: OnOutcome) -> None:
        """Append a message with the others of this turn."""
        try:
            add_record(self.block, record)
        except InvalidArgument as error:
            on_outcome(refusal(error))
        else:
            self.add(Report(promise, on_outcome))

    def settle(self) -> None:
        """Append the gathered messages; call it after each chunk of requests."""
        block, self._block = self._block, None
        if block is None or not self._pending:
            return
        pending, self._pending = self._pending, []
        busy = self.busy()
        if busy is not None:
            self._refuse(pending, busy)
            return
        try:
            appended = self._append(block)
        except RemoteError as error:
            self._refuse(pending, error)
        except Exception as error:  # noqa: BLE001 - a bug: else most of them would wait forever
            _log.exception("cannot store %d requests", len(pending))
            self._refuse(pending, RemoteError.system(repr(error)))
        else:
            self._durability.acknowledge_all(appended, pending)
            # Notify waiting pulls after the senders, which have waited longer already.
            self._store.dispatch()

    def _refuse(self, pending: Sequence[Pending], error: RemoteError) -> None:
        for each in pending:
            each.report(error)

    # --- messages of the broker itself ------------------------------------------------------------

    def append_all(self, records: Sequence[Record]) -> list[Appended]:
        """Append several messages with one write; raises what is refused. See `when_settled`."""
        self.refuse_if_suspended()
        block = self._store.new_block()
        try:
            for record in records:
                add_record(block, record)
        except InvalidArgument as error:
            raise refusal(error) from error
        return self._append(block)

    def when_settled(self, appended: Sequence[Appended], on_outcome: OnOutcome) -> None:
        """Report the outcome of all appended messages once, however long the flush takes."""
        report = Report(Promise.DURABLE_EVENTUALLY, on_outcome)
        self._durability.acknowledge(appended[-1], report, sends=len(appended))
        self._store.dispatch()

    def _append(self, block: Block) -> list[Appended]:
        begun_ms = self._clock.monotonic_ms()
        try:
            appended = self._store.append(block, defer_dispatch=True)
        except (InvalidArgument, StoreError) as error:
            raise refusal(error) from error
        self.put_times.note(self._clock.monotonic_ms() - begun_ms, len(appended))
        return appended
