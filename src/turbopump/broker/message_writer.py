"""The only path into the store: diverts delayed messages, and maps refusals to response codes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TypeVarTuple

from msgspec import Struct
from msgspec.structs import replace

from turbopump.broker.durability import Durability, OnOutcome, Promise, Report
from turbopump.broker.put_times import PutTimes
from turbopump.clock import Clock
from turbopump.errors import InvalidArgument, RemoteError, StoreError, WriteRefused
from turbopump.store.append import Group
from turbopump.store.outcomes import Appended
from turbopump.store.store import Store
from turbopump.wire import properties as names
from turbopump.wire.codes import ResponseCode
from turbopump.wire.hosts import Host
from turbopump.wire.names import SCHEDULE_TOPIC
from turbopump.wire.record import MessageView, Record
from turbopump.wire.record_batch import RecordBatch
from turbopump.wire.record_list import RecordList

_log = logging.getLogger(__name__)

BURST_BYTES_MAX = 1024 * 1024
"""Bodies that are written together; a larger burst is written in parts."""

BURST_GROWTH = 8
BURST_MAX = 64

Ts = TypeVarTuple("Ts")


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
        # Records to be appended, and where their outcome goes.
        self._burst: list[Group] = []
        self._reports: list[Report] = []
        self._burst_bytes = 0
        self._burst_size = 1

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

    def append_now(
        self, records: Group, promise: Promise, on_outcome: OnOutcome[*Ts], *args: *Ts
    ) -> None:
        """Append records immediately: all of them or none."""
        busy = self.busy()
        if busy is not None:
            on_outcome(busy, *args)
            return
        begun_ms = self._clock.monotonic_ms()
        try:
            appended = self._store.append(records, defer_dispatch=True)
        except (InvalidArgument, StoreError) as error:
            on_outcome(refusal(error), *args)
            return
        self.put_times.note(self._clock.monotonic_ms() - begun_ms, 1)
        self._durability.acknowledge(appended, promise, on_outcome, *args)
        # Notify waiting pulls after the senders, which have waited longer already.
        self._store.dispatch()

    def append_soon(
        self, records: Group, promise: Promise, on_outcome: OnOutcome[*Ts], *args: *Ts
    ) -> None:
        """Append records soon, with one write for several requests.

        At the latest at the next `settle`, or in the next turn of the loop: requests that waited
        for the disk are stored outside any received chunk.

        Requests arrive in bursts, and writing them one by one costs half as much again. But the
        first of a burst is not kept waiting for the last: groups grow from one to `BURST_MAX`.
        """
        if self._burst_size == 1:
            self._burst_size = BURST_GROWTH
            self.append_now(records, promise, on_outcome, *args)
            return
        burst = self._burst
        if not burst:
            asyncio.get_running_loop().call_soon(self.settle)
        burst.append(records)
        self._reports.append((promise, on_outcome, args))
        if type(records) is RecordBatch or type(records) is RecordList:
            self._burst_bytes += records.body_bytes
        else:
            for record in records:
                self._burst_bytes += len(record.body)
        if len(burst) >= self._burst_size or self._burst_bytes > BURST_BYTES_MAX:
            self._burst_size = min(self._burst_size * BURST_GROWTH, BURST_MAX)
            self._append_burst()

    def settle(self) -> None:
        """Append the gathered messages; call it after each burst of requests."""
        self._burst_size = 1
        if self._burst:
            self._append_burst()

    def _append_burst(self) -> None:
        burst, reports = self._burst, self._reports
        self._burst, self._reports, self._burst_bytes = [], [], 0
        busy = self.busy()
        if busy is not None:
            for _, on_outcome, args in reports:
                on_outcome(busy, *args)
            return
        try:
            appended = self.append_groups(burst)
        except RemoteError as error:
            self._append_one_by_one(burst, reports, error)
            return
        except Exception as error:  # noqa: BLE001 - a bug: else most of them would wait forever
            _log.exception("cannot store %d requests", len(burst))
            failure = RemoteError.system(repr(error))
            for _, on_outcome, args in reports:
                on_outcome(failure, *args)
            return
        self._durability.acknowledge_all(appended, reports)
        self._store.dispatch()

    def _append_one_by_one(
        self, burst: Sequence[Group], reports: Sequence[Report], error: RemoteError
    ) -> None:
        """Find out which requests the refusal of a whole burst concerns: perhaps only one."""
        for records, (promise, on_outcome, args) in zip(burst, reports, strict=True):
            if len(burst) == 1:
                on_outcome(error, *args)
            else:
                self.append_now(records, promise, on_outcome, *args)

    def append_groups(self, groups: Sequence[Group]) -> list[Appended]:
        """Append several groups with one write; raises what is refused. See `when_settled`."""
        self.refuse_if_suspended()
        begun_ms = self._clock.monotonic_ms()
        try:
            appended = self._store.append_all(groups, defer_dispatch=True)
        except (InvalidArgument, StoreError) as error:
            raise refusal(error) from error
        self.put_times.note(self._clock.monotonic_ms() - begun_ms, len(groups))
        return appended

    def when_settled(self, appended: Sequence[Appended], on_outcome: OnOutcome[()]) -> None:
        """Report the outcome of all appended messages once, however long the flush takes."""
        self._durability.acknowledge(
            appended[-1], Promise.DURABLE_EVENTUALLY, on_outcome, sends=len(appended)
        )
        self._store.dispatch()
