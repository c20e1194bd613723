"""Pulls through a filter: from the broker, through the filter, in the broker's layout."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from msgspec import Struct
from msgspec.structs import replace

from turbopump.clock import Clock
from turbopump.errors import RecordError, RemoteError
from turbopump.filter_server.sandbox import Verdicts
from turbopump.filter_server.uploads import LoadedFilter, Uploads
from turbopump.filters.tags import EVERYTHING, TAG
from turbopump.net.connection import Connection
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Buffer, Command, request, whole_body
from turbopump.wire.hashing import body_crc
from turbopump.wire.headers import PullMessage, PullMessageAnswer
from turbopump.wire.record import MessageView, decode_record
from turbopump.wire.sysflag import PULL_SUBSCRIPTION, PULL_SUSPEND

COUNT_MAX = 1024
"""Most messages requested from the broker in one pull, when the last ones did not match."""
SLICE_MESSAGES = 4096
SLICE_MS = 1000
"""Limits of one search without a match; the answer then has the offset to continue from."""
HOLD_MS_MAX = 60_000
_GROWTH = 4
_ANSWER_MS = 10_000
"""Extra time for the broker's answer, on top of how long it may hold a pull."""
_BATCH_BYTES_MAX = 4 * 1024 * 1024
"""Most bytes of bodies passed to a filter in one batch; one message in any case."""

AskBroker = Callable[[Command, int], Awaitable[Command]]
"""Sends a request to the broker, with a timeout in milliseconds."""

_EMPTY = {
    ResponseCode.PULL_NOT_FOUND,
    ResponseCode.PULL_RETRY_IMMEDIATELY,
    ResponseCode.PULL_OFFSET_MOVED,
}


class _Batch(Struct):
    """Messages to decide, where their bytes are, and what follows them that cannot be read."""

    messages: list[MessageView]
    records: list[Buffer]
    unreadable: Buffer = b""


@dataclass(slots=True)
class _Selection:
    """The matching messages of one answer."""

    records: list[Buffer] = field(default_factory=list)
    seen: int = 0
    next_offset: int | None = None
    """The next offset, if it is not the one after all of them."""
    failure: str | None = None

    def add(self, batch: _Batch, verdicts: Verdicts, label: str, count_max: int) -> bool:
        """Add the matches; return whether there may be more."""
        for at, is_match in enumerate(verdicts.matched):
            if is_match and len(self.records) == count_max:
                self.next_offset = batch.messages[at].queue_offset
                return False
            self.seen += 1
            if is_match:
                self.records.append(batch.records[at])
        if verdicts.failure is None:
            return True
        failed = batch.messages[len(verdicts.matched)]
        self.next_offset = failed.queue_offset
        place = f"offset {failed.queue_offset} of queue {failed.queue_id}"
        self.failure = f"filter {label} failed at {place}: {verdicts.failure}"
        return False


class Pulls:
    """Serves pulls of consumers that filter by code."""

    def __init__(self, uploads: Uploads, ask_broker: AskBroker, clock: Clock) -> None:
        self._uploads = uploads
        self._ask_broker = ask_broker
        self._clock = clock

    async def pull(self, command: Command, _peer: Connection) -> Command:
        """Answer as a broker does; skip what does not match."""
        header = PullMessage.from_ext_fields(command.ext_fields)
        name = header.subscription if header.sys_flag & PULL_SUBSCRIPTION else None
        chosen = self._uploads.find(header.consumer_group, header.topic, name)
        chosen.used_ms = start_ms = self._clock.monotonic_ms()
        is_held = bool(header.sys_flag & PULL_SUSPEND)
        hold_ms = min(max(0, header.suspend_timeout_millis), HOLD_MS_MAX) if is_held else 0
        seen, count, offset = 0, max(1, header.max_msg_nums), header.queue_offset
        while True:
            left_ms = max(0, start_ms + hold_ms - self._clock.monotonic_ms())
            answer = await self._ask(header, offset, min(count, COUNT_MAX), left_ms)
            if answer.code in _EMPTY:
                return command.answer(answer.code, answer.ext_fields, remark=answer.remark)
            limits = PullMessageAnswer.from_ext_fields(answer.ext_fields)
            body = whole_body(answer)
            selection = await self._selected(chosen, body, max(1, header.max_msg_nums))
            if selection.next_offset is not None:
                limits = replace(limits, next_begin_offset=selection.next_offset)
            if selection.records:
                parts = tuple(selection.records)
                return command.answer(ResponseCode.SUCCESS, limits, remark="FOUND", body=parts)
            if selection.failure is not None:
                if selection.seen == 0 and seen == 0:
                    raise RemoteError.system(selection.failure)
                return _nothing_matched(command, limits)
            seen += selection.seen
            offset, count = limits.next_begin_offset, count * _GROWTH
            passed_ms = self._clock.monotonic_ms() - start_ms
            if seen >= SLICE_MESSAGES or passed_ms >= max(hold_ms, SLICE_MS):
                return _nothing_matched(command, limits)

    async def _selected(self, chosen: LoadedFilter, body: bytes, count_max: int) -> _Selection:
        """Return the records that match, in order, as far as number and time allow."""
        selection = _Selection()
        batch, at = _batch(body, 0, chosen.batch_count)
        end_ms = self._clock.monotonic_ms() + SLICE_MS
        while batch.messages or batch.unreadable:
            if batch.messages:
                verdicts = await chosen.decide(batch.messages)
                if not selection.add(batch, verdicts, chosen.label, count_max):
                    break
            if batch.unreadable:
                # Clients recognize damaged messages, and dead-letter them.
                selection.records.append(batch.unreadable)
                selection.seen += 1
            batch, at = _batch(body, at, chosen.batch_count)
            if batch.messages and self._clock.monotonic_ms() >= end_ms:
                selection.next_offset = batch.messages[0].queue_offset
                break
        return selection

    async def _ask(self, header: PullMessage, offset: int, count: int, hold_ms: int) -> Command:
        """Pull all messages for the consumer's group, which the broker may refuse."""
        forwarded = replace(
            header,
            queue_offset=offset,
            max_msg_nums=count,
            sys_flag=PULL_SUBSCRIPTION | (PULL_SUSPEND if hold_ms else 0),
            commit_offset=0,
            suspend_timeout_millis=hold_ms,
            subscription=EVERYTHING,
            expression_type=TAG,
            sub_version=0,
            bulk_pull=True if count > header.max_msg_nums else None,
        )
        command = request(RequestCode.PULL_MESSAGE, forwarded)
        answer = await self._ask_broker(command, hold_ms + _ANSWER_MS)
        if answer.code != ResponseCode.SUCCESS and answer.code not in _EMPTY:
            raise RemoteError(answer.code, answer.remark or "")
        return answer


def _nothing_matched(command: Command, limits: PullMessageAnswer) -> Command:
    return command.answer(ResponseCode.PULL_RETRY_IMMEDIATELY, limits, remark="NO_MATCHED_MESSAGE")


def _batch(body: bytes, at: int, count_max: int) -> tuple[_Batch, int]:
    """Read records from a position; return them and the next position."""
    batch = _Batch([], [])
    whole, size = memoryview(body), 0
    while at < len(body) and size < _BATCH_BYTES_MAX and len(batch.messages) < count_max:
        try:
            message = decode_record(body, at)
        except RecordError:
            batch.unreadable = whole[at:]
            return batch, len(body)
        record = whole[at : at + message.size]
        at += message.size
        if not _is_intact(message):
            batch.unreadable = record
            return batch, at
        batch.messages.append(message)
        batch.records.append(record)
        size += len(message.body)
    return batch, at


def _is_intact(message: MessageView) -> bool:
    """Whether the body is as it was stored, and can be inflated."""
    if body_crc(message.stored_body) != message.body_crc:
        return False
    try:
        return message.body is not None
    except RecordError:
        return False
