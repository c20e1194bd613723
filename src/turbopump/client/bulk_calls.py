"""Turbopump's own requests for many queues of a topic; Apache brokers reject them as unknown.

Topics, groups and queues are named as brokers know them.
"""

from __future__ import annotations

import msgspec

from turbopump.client.calls import Caller, require_success
from turbopump.wire import headers
from turbopump.wire.bodies import MessageMarks, QueueEnds, QueuePositions, RefusedOffsets
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import Command, request, whole_body


async def queue_ends(
    caller: Caller, broker: str, header: headers.QueueEndsOf, timeout_ms: int
) -> tuple[headers.QueueEndsAnswer, QueueEnds]:
    """Return the ends of all queues of a topic, optionally after a message has arrived (91004)."""
    command = request(RequestCode.GET_QUEUE_ENDS, header)
    answer = require_success(await caller.request(broker, command, timeout_ms))
    found = headers.QueueEndsAnswer.from_ext_fields(answer.ext_fields)
    return found, QueueEnds.decode(whole_body(answer))


async def message_marks(
    caller: Caller, broker: str, topic: str, positions: QueuePositions, timeout_ms: int
) -> MessageMarks:
    """Return when and where messages were stored, in the same order (91005)."""
    header = headers.TopicName(topic=topic)
    command = request(RequestCode.GET_MESSAGE_MARKS, header, body=msgspec.json.encode(positions))
    answer = require_success(await caller.request(broker, command, timeout_ms))
    return MessageMarks.decode(whole_body(answer))


async def commit_offsets(
    caller: Caller, broker: str, group: str, topic: str, positions: QueuePositions, timeout_ms: int
) -> list[int]:
    """Commit a group's offsets; return the queues refused (91006)."""
    header = headers.OffsetsOfGroup(consumer_group=group, topic=topic)
    body = msgspec.json.encode(positions)
    command = request(RequestCode.UPDATE_CONSUMER_OFFSETS, header, body=body)
    answer = require_success(await caller.request(broker, command, timeout_ms))
    return RefusedOffsets.decode(whole_body(answer)).queue_ids


async def committed_offsets(
    caller: Caller, broker: str, group: str, topic: str, timeout_ms: int
) -> dict[int, int]:
    """Return the offsets that a group has committed in a topic, by queue id (91007)."""
    header = headers.OffsetsOfGroup(consumer_group=group, topic=topic)
    command: Command = request(RequestCode.GET_CONSUMER_OFFSETS, header)
    answer = require_success(await caller.request(broker, command, timeout_ms))
    found = QueuePositions.decode(whole_body(answer))
    return dict(zip(found.queue_ids, found.offsets, strict=True))
