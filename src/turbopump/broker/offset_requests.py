"""Requests for the progress of groups: of consumers that commit and of operators that look."""

from __future__ import annotations

from typing import Protocol

from turbopump.broker.clients import Consumers
from turbopump.broker.groups import Groups
from turbopump.broker.offsets import Offsets
from turbopump.broker.requests import answer_with
from turbopump.broker.topics import Topics, queues_of
from turbopump.errors import RemoteError
from turbopump.message import QueueOffset
from turbopump.net.connection import Connection
from turbopump.net.router import Handler
from turbopump.store.outcomes import ReadOutcome
from turbopump.wire import headers
from turbopump.wire.bodies import CorrectionOffsets
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command


class QueueReads(Protocol):
    """What is asked of the store."""

    def queue_range(self, topic: str, queue_id: int) -> tuple[QueueOffset, QueueOffset]: ...

    def read(
        self, topic: str, queue_id: int, offset: QueueOffset, count_max: int
    ) -> ReadOutcome: ...


class OffsetRequests:
    """Serves commits and questions for them."""

    def __init__(
        self,
        offsets: Offsets,
        topics: Topics,
        groups: Groups,
        consumers: Consumers,
        store: QueueReads,
    ) -> None:
        self._offsets = offsets
        self._topics = topics
        self._groups = groups
        self._consumers = consumers
        self._store = store

    def handlers(self) -> dict[int, Handler]:
        return {
            RequestCode.QUERY_CONSUMER_OFFSET: self.query,
            RequestCode.UPDATE_CONSUMER_OFFSET: self.update,
            RequestCode.GET_ALL_CONSUMER_OFFSET: self.all,
            RequestCode.QUERY_CORRECTION_OFFSET: self.correction,
            RequestCode.CLONE_GROUP_OFFSET: self.clone,
        }

    def query(self, request: Command, _peer: Connection) -> Command:
        """Tell how far a group has come in a queue."""
        header = headers.QueryConsumerOffset.from_ext_fields(request.ext_fields)
        offset = self._offsets.find(header.consumer_group, header.topic, header.queue_id)
        if offset is None and self._is_young(header.topic, header.queue_id):
            # Nothing to skip: a group that comes here first may begin at the beginning.
            offset = QueueOffset(0)
        if offset is None:
            remark = "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first"
            code = ResponseCode.QUERY_NOT_FOUND
            return request.answer(code, headers.NoFields(), remark=remark)
        return request.answer(ResponseCode.SUCCESS, headers.OffsetAnswer(offset=offset))

    def update(self, request: Command, peer: Connection) -> Command:
        """Note how far a group has come in a queue.

        What cannot be is passed over with success, as peers expect it; a group too many is told,
        and so is an offset beyond the end of its queue.
        """
        header = headers.UpdateConsumerOffset.from_ext_fields(request.ext_fields)
        group, topic, queue_id = header.consumer_group, header.topic, header.queue_id
        if self._is_possible(header):
            _, end = self._store.queue_range(topic, queue_id)
            if header.commit_offset > end:
                # Else the group would pass over all messages until the queue has grown so far.
                raise RemoteError(
                    ResponseCode.SYSTEM_ERROR,
                    f"commitOffset of {group} in queue {queue_id} of {topic} must be 0 to {end},"
                    f" the end of the queue, got {header.commit_offset}",
                )
            if self._groups.find(group, peer.peer_address) is not None:
                self._offsets.commit(group, topic, queue_id, header.commit_offset)
        return request.answer(ResponseCode.SUCCESS, headers.NoFields())

    def all(self, request: Command, _peer: Connection) -> Command:
        """Return everything, for slaves."""
        if self._offsets.is_empty:
            raise RemoteError(ResponseCode.SYSTEM_ERROR, "no consumer offset in this broker")
        return request.answer(ResponseCode.SUCCESS, body=self._offsets.encoded())

    def correction(self, request: Command, _peer: Connection) -> Command:
        """Tell, for each queue, how far the slowest group has come; some groups do not count.

        The original forgets the offsets of the groups that do not count. We keep them.
        """
        header = headers.CorrectionOffsetOf.from_ext_fields(request.ext_fields)
        left_out = set((header.filter_groups or "").split(","))
        slowest: dict[int, int] = {}
        for group in self._offsets.groups_of(header.topic) - left_out:
            for queue_id, offset in self._offsets.of_topic(group, header.topic).items():
                if offset >= self._store.queue_range(header.topic, queue_id)[0]:
                    slowest[queue_id] = min(offset, slowest.get(queue_id, offset))
        found = CorrectionOffsets(correction_offsets=dict(sorted(slowest.items())))
        return answer_with(request, found)

    def clone(self, request: Command, peer: Connection) -> Command:
        """Give a group the progress of another, in one topic or in all of them."""
        header = headers.CloneGroupOffset.from_ext_fields(request.ext_fields)
        if self._groups.find(header.dest_group, peer.peer_address) is None:
            remark = f"subscription group [{header.dest_group[:200]}] does not exist"
            raise RemoteError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark)
        topics = {header.topic} if header.topic else self._offsets.topics_of(header.src_group)
        for topic in sorted(topics):
            if self._topics.find(topic) is not None and (
                header.offline or not self._ignores(header.src_group, topic)
            ):
                self._offsets.clone(header.src_group, header.dest_group, topic)
        return request.answer(ResponseCode.SUCCESS)

    def _is_possible(self, header: headers.UpdateConsumerOffset) -> bool:
        """Whether an offset is one of a queue that can be, so that nonsense does not pile up."""
        topic = self._topics.find(header.topic)
        if topic is None or header.commit_offset < 0:
            return False
        return 0 <= header.queue_id < queues_of(topic)

    def _is_young(self, topic: str, queue_id: int) -> bool:
        """Whether a queue still has its first message, and recent enough to be in memory."""
        low, _ = self._store.queue_range(topic, queue_id)
        if low > 0:
            return False
        first = self._store.read(topic, queue_id, QueueOffset(0), 1)
        return not getattr(first, "suggest_slave", False)

    def _ignores(self, group: str, topic: str) -> bool:
        """Whether a group has members and none of them wants the topic."""
        online = self._consumers.find(group)
        return online is not None and topic not in online.subscriptions
