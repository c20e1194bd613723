"""Resetting the offsets of a running group by time."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from turbopump.broker.clients import Consumers, Member
from turbopump.broker.handlers.common import Requests, answer_with, body_of, commands_to, serves
from turbopump.broker.offsets import Offsets
from turbopump.broker.topics import Topics
from turbopump.errors import NetworkError, RemoteError
from turbopump.message import MessageQueue
from turbopump.net.connection import Connection
from turbopump.store.store import Store
from turbopump.wire import headers
from turbopump.wire.bodies import QueueAndOffset, QueueOffsetRows, QueueOffsets
from turbopump.wire.codes import Language, RequestCode, ResponseCode
from turbopump.wire.command import Command
from turbopump.wire.command import request as make_request

_log = logging.getLogger(__name__)

NEWEST = -1
"""In place of a timestamp: after the newest message."""

RESETTABLE_SINCE = 28
"""Clients with a lower version number do not understand a reset."""


@dataclass(slots=True, eq=False, kw_only=True)
class ResetRequests(Requests):
    """Serves resets by time.

    The broker computes the offsets and sends them to the members, which apply and commit them. If
    the group has no members, the answer says so, and tools commit the offsets instead.

    Turbopump's addition: a body may name queues and their offsets, in place of one timestamp for
    all queues.
    """

    broker_name: str
    topics: Topics
    offsets: Offsets
    consumers: Consumers
    store: Store

    @serves(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET)
    def reset(self, request: Command, _peer: Connection) -> Command:
        header = headers.ResetOffset.from_ext_fields(request.ext_fields)
        targets = self._given_targets(request, header) or self._targets(header)
        members = self.consumers.members(header.group)
        if not members:
            remark = f"Consumer not online, so can not reset offset, Group: {header.group}"
            raise RemoteError(ResponseCode.CONSUMER_NOT_ONLINE, remark)
        absent = [member.client_id for member in members if member.is_absent]
        if absent:
            # It would continue from its current position, and commit that over the reset.
            remark = (
                f"client {absent[0]} of {header.group} has not reconnected since the broker"
                " restarted, so it cannot be reset: try again in a minute"
            )
            raise RemoteError.system(remark)
        too_old = [member for member in members if member.version < RESETTABLE_SINCE]
        if too_old:
            raise RemoteError.system(f"the client {too_old[0].client_id} is too old to be reset")
        as_rows = request.language == Language.CPP
        notice = _notice(header, _rows(targets) if as_rows else QueueOffsets(offset_table=targets))
        for member in members:
            _push(member, notice)
        return answer_with(request, QueueOffsets(offset_table=targets))

    def _given_targets(
        self, request: Command, header: headers.ResetOffset
    ) -> dict[MessageQueue, int]:
        """Return the offsets in the body, all of local queues of the topic; empty without one."""
        if not request.body_length:
            return {}
        given = body_of(request, QueueOffsets).offset_table
        for queue, offset in given.items():
            _, high = self.store.queue_range(queue.topic, queue.queue_id)
            is_here = (queue.topic, queue.broker) == (header.topic, self.broker_name)
            if not is_here or not 0 <= offset <= high:
                remark = f"[reset-offset] {queue} has no offset {offset} on {self.broker_name}"
                raise RemoteError.system(remark)
        return given

    def _targets(self, header: headers.ResetOffset) -> dict[MessageQueue, int]:
        topic = self.topics.find(header.topic)
        if topic is None:
            remark = f"[reset-offset] reset offset failed, no topic: {header.topic}"
            raise RemoteError.system(remark)
        return {
            MessageQueue(header.topic, self.broker_name, queue_id): self._target(header, queue_id)
            for queue_id in range(topic.write_queue_nums)
        }

    def _target(self, header: headers.ResetOffset, queue_id: int) -> int:
        stored = self.offsets.find(header.group, header.topic, queue_id)
        if stored is None:
            remark = f"the group {header.group} has no offset in queue {queue_id} of {header.topic}"
            raise RemoteError.system(remark)
        if header.timestamp == NEWEST:
            target = self.store.queue_range(header.topic, queue_id)[1]
        else:
            target = self.store.offset_by_time(header.topic, queue_id, header.timestamp)
        # Without force, offsets only move back, so that no unseen message is skipped.
        return target if header.is_force or target < stored else stored


def _notice(header: headers.ResetOffset, body: QueueOffsets | QueueOffsetRows) -> Command:
    return make_request(
        RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
        headers.ResetOffset(
            topic=header.topic, group=header.group, timestamp=header.timestamp, is_force=False
        ),
        body.encode(bare_keys=True),
    )


def _rows(targets: dict[MessageQueue, int]) -> QueueOffsetRows:
    return QueueOffsetRows(
        offset_table=[
            QueueAndOffset(
                broker_name=queue.broker, offset=offset, queue_id=queue.queue_id, topic=queue.topic
            )
            for queue, offset in targets.items()
        ]
    )


def _push(member: Member, notice: Command) -> None:
    try:
        commands_to(member.connection).oneway(notice)
    except NetworkError as error:
        # The answer has the offsets; a client that is gone starts from the committed ones.
        _log.warning("%s was not notified of its offset reset: %s", member.address, error)
