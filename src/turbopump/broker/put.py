"""The one way into the store: delayed messages are diverted, refusals get their response code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVarTuple

from msgspec import Struct
from msgspec.structs import replace

from turbopump.broker.durability import Durability, OnDone
from turbopump.errors import InvalidArgument, RemoteError, StoreError, WriteRefused
from turbopump.store.append import Group
from turbopump.store.config import FlushMode
from turbopump.store.outcomes import Appended
from turbopump.store.store import Store
from turbopump.wire import properties as names
from turbopump.wire.codes import ResponseCode
from turbopump.wire.hosts import Host
from turbopump.wire.names import SCHEDULE_TOPIC
from turbopump.wire.record import Record
from turbopump.wire.record_batch import RecordBatch

BURST_BYTES_MAX = 1024 * 1024
"""Bodies that are written together; a larger burst is written in parts."""

BURST_GROWTH = 8
BURST_MAX = 64

Ts = TypeVarTuple("Ts")

OnStored = Callable[[Appended | RemoteError, bool, *Ts], None]
"""Told where a message was stored or why it was not, and whether it is durable already."""

_Waiting = tuple[Group, Callable[..., None], tuple[object, ...]]
"""Records to be appended, and whom to tell with which arguments."""


class Draft(Struct, frozen=True, kw_only=True):
    """A message on its way into the store, with its properties still apart."""

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


def delay_level_of(properties: Mapping[str, str]) -> int:
    """Return the delay level a message asks for; 0 when it asks for none that makes sense."""
    text = properties.get(names.DELAY, "0")
    return int(text) if text.isdecimal() else 0


def diverted(draft: Draft, levels: int) -> Draft:
    """Send a message that wants delay through the delay topic, or return it as it is."""
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
    """Make the record; what cannot be stored is refused with the protocol's code."""
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


def _refusal(error: InvalidArgument | StoreError) -> RemoteError:
    """Give what the store would not take its response code."""
    match error:
        case InvalidArgument():
            code = ResponseCode.MESSAGE_ILLEGAL
        case WriteRefused():
            code = ResponseCode.SERVICE_NOT_AVAILABLE
        case _:
            code = ResponseCode.SYSTEM_ERROR
    return RemoteError(code, str(error))


class Put:
    """Appends messages; the store's refusals become answers."""

    def __init__(self, store: Store, durability: Durability, delay_levels: int) -> None:
        self._store = store
        self._durability = durability
        self._delay_levels = delay_levels
        self._is_synchronous = store.config.flush.mode is FlushMode.SYNC
        self._burst: list[_Waiting] = []
        self._burst_bytes = 0
        self._burst_size = 1

    def record(self, draft: Draft) -> Record:
        """Make a message's record, for the delay topic if it wants delay."""
        return record_of(diverted(draft, self._delay_levels))

    def message(self, draft: Draft) -> Appended:
        """Append one message, to the delay topic if it wants delay."""
        return self.records([self.record(draft)])

    def records(self, records: Group) -> Appended:
        """Append records together: all of them or none."""
        return self.groups([records])[0]

    def soon(self, records: Group, on_stored: OnStored[*Ts], *args: *Ts) -> None:
        """Append records at the next `settle` at the latest, with one write for several requests.

        ``on_stored`` is called with the outcome and the arguments. Requests arrive in bursts, and
        writing them one by one costs half as much again. But the first of a burst is not kept
        waiting for the last: groups grow from one to `BURST_MAX`.
        """
        if self._burst_size == 1:
            self._burst_size = BURST_GROWTH
            self._append_first(records, on_stored, *args)
            return
        self._burst.append((records, on_stored, args))
        if type(records) is RecordBatch:
            self._burst_bytes += int(records.body_lengths.sum())
        else:
            for record in records:
                self._burst_bytes += len(record.body)
        if len(self._burst) >= self._burst_size or self._burst_bytes > BURST_BYTES_MAX:
            self._burst_size = min(self._burst_size * BURST_GROWTH, BURST_MAX)
            self._append_burst()

    def settle(self) -> None:
        """Append what has gathered; to be called after each burst of requests."""
        self._burst_size = 1
        if self._burst:
            self._append_burst()

    def _append_first(self, records: Group, on_stored: OnStored[*Ts], *args: *Ts) -> None:
        """Append what came alone so far: the same as a burst, without what only several need."""
        try:
            appended = self._store.append(records, told_later=True)
        except (InvalidArgument, StoreError) as error:
            on_stored(_refusal(error), False, *args)
            return
        on_stored(appended, self._is_durable(appended), *args)
        self._store.dispatch()

    def _append_burst(self) -> None:
        burst, self._burst, self._burst_bytes = self._burst, [], 0
        try:
            groups = [records for records, _, _ in burst]
            appended, is_durable = self._append(groups, told_later=True)
        except RemoteError as error:
            self._append_one_by_one(burst, error)
            return
        for (_, on_stored, args), stored in zip(burst, appended, strict=True):
            on_stored(stored, is_durable, *args)
        # Whoever waits for messages is told after their senders, who wait longer already.
        self._store.dispatch()

    def _append_one_by_one(self, burst: Sequence[_Waiting], error: RemoteError) -> None:
        """Find out whom the refusal of a whole burst concerns: perhaps only one of them."""
        for records, on_stored, args in burst:
            try:
                outcome: Appended | RemoteError = (
                    error if len(burst) == 1 else self.records(records)
                )
            except RemoteError as own:
                outcome = own
            on_stored(outcome, isinstance(outcome, Appended) and outcome.durable.done(), *args)

    def groups(self, groups: Sequence[Group]) -> list[Appended]:
        """Append several such groups with one write."""
        return self._append(groups)[0]

    def _append(
        self, groups: Sequence[Group], *, told_later: bool = False
    ) -> tuple[list[Appended], bool]:
        """Append groups; tell also whether they are durable already, as all share the flush."""
        try:
            appended = self._store.append_all(groups, told_later=told_later)
        except (InvalidArgument, StoreError) as error:
            raise _refusal(error) from error
        return appended, self._is_durable(appended[0])

    def _is_durable(self, appended: Appended) -> bool:
        """Tell whether a message is as durable as it has to be; if not, take notice when it is."""
        if not self._is_synchronous:
            return True
        is_durable = appended.durable.done()
        if not is_durable:
            self._durability.watch(appended.durable)
        return is_durable

    def when_durable(self, appended: Appended, on_done: OnDone) -> None:
        """Call back when a message is as durable as the store's mode promises, or cannot be."""
        if appended.durable.done():
            on_done(appended.durable.exception())
        else:
            self._durability.watch(appended.durable, on_done)
