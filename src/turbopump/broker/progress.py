"""Progress of groups: commits and queries of offsets."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from turbopump.broker.clients import Consumers
from turbopump.broker.groups import Groups, check_group_name
from turbopump.broker.offsets import Offsets
from turbopump.broker.topics import Topics, queues_of
from turbopump.errors import RemoteError
from turbopump.message import QueueOffset
from turbopump.store.store import Store
from turbopump.wire.codes import ResponseCode


@dataclass(slots=True, eq=False)
class Progress:
    """Commits and returns the offsets of groups."""

    offsets: Offsets
    topics: Topics
    groups: Groups
    consumers: Consumers
    store: Store

    def find(self, group: str, topic: str, queue_id: int) -> QueueOffset | None:
        """Return a group's committed offset in a queue; None if it has none."""
        offset = self.offsets.find(group, topic, queue_id)
        if offset is None and self._is_young(topic, queue_id):
            # Nothing to skip: a new group may start at the beginning.
            return QueueOffset(0)
        return offset

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Commit a group's offset in a queue; an unknown group is not created.

        Invalid commits are ignored and succeed, as clients expect. One group too many, and an
        offset beyond the end of its queue, raise RemoteError.
        """
        if offset < 0 or queue_id not in self._queue_ids(topic):
            return
        _, end = self.store.queue_range(topic, queue_id)
        if offset > end:
            # Otherwise the group would skip all messages until the queue has grown that far.
            raise RemoteError.system(
                f"commitOffset of {group} in queue {queue_id} of {topic} must be 0 to {end},"
                f" the end of the queue, got {offset}"
            )
        if self._may_have_offsets(group):
            self.offsets.commit(group, topic, queue_id, offset)

    def commit_all(
        self, group: str, topic: str, queue_ids: Iterable[int], offsets: Iterable[int]
    ) -> list[int]:
        """Commit a group's offsets by queue id; return the queues of those refused.

        Equivalent to a `commit` of each, which costs three times as much: topic and group are
        looked up once.
        """
        known = self._queue_ids(topic)
        named = zip(queue_ids, offsets, strict=True)
        possible = [(number, at) for number, at in named if number in known and at >= 0]
        ends = self.store.max_offsets(topic, [number for number, _ in possible])
        refused = [number for (number, at), end in zip(possible, ends, strict=True) if at > end]
        accepted = dict(possible)
        if refused:
            pairs = zip(possible, ends, strict=True)
            accepted = {number: at for (number, at), end in pairs if at <= end}
        try:
            is_stored = accepted and self._may_have_offsets(group)
        except RemoteError:
            return [number for number, _ in possible]
        if is_stored:
            self.offsets.commit_all(group, topic, accepted)
        return refused

    def slowest(self, topic: str, left_out: Collection[str]) -> dict[int, int]:
        """Return the offset of the slowest group in each queue, leaving out some groups.

        Apache RocketMQ deletes the offsets of the groups left out. Turbopump keeps them.
        """
        slowest: dict[int, int] = {}
        for group in self.offsets.groups_of(topic).difference(left_out):
            for queue_id, offset in self.offsets.of_topic(group, topic).items():
                if offset >= self.store.queue_range(topic, queue_id)[0]:
                    slowest[queue_id] = min(offset, slowest.get(queue_id, offset))
        return dict(sorted(slowest.items()))

    def clone(self, source: str, target: str, topic: str, *, offline: bool) -> None:
        """Copy a group's progress to another, in one topic or, without a name, in all of them.

        Topics that a group with members does not subscribe to are left out, unless ``offline``.
        """
        if not self._may_have_offsets(target):
            remark = f"subscription group [{target[:200]}] does not exist"
            raise RemoteError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark)
        topics = {topic} if topic else self.offsets.topics_of(source)
        for name in sorted(topics):
            if self.topics.find(name) is not None and (offline or not self._ignores(source, name)):
                self.offsets.clone(source, target, name)

    def _may_have_offsets(self, group: str) -> bool:
        """Whether a group's name is valid; raises RemoteError if too many groups have offsets.

        Groups with settings always may have them, and their number is limited already.
        """
        if group in self.groups.table or self.offsets.has_group(group):
            return True
        if check_group_name(group) is not None:
            return False
        count, most = self.offsets.group_count, self.groups.config.groups_max
        if count >= most:
            remark = (
                f"cannot store offsets of group {group}: {count} groups have some and groupsMax is"
                f" {most}"
            )
            raise RemoteError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark)
        return True

    def _queue_ids(self, topic: str) -> range:
        """Return the queues that can have an offset, so that invalid ones do not pile up."""
        known = self.topics.find(topic)
        return range(0 if known is None else queues_of(known))

    def _is_young(self, topic: str, queue_id: int) -> bool:
        """Whether a queue still has its first message, recent enough to be in memory."""
        low, _ = self.store.queue_range(topic, queue_id)
        if low > 0:
            return False
        return not self.store.is_far_behind(topic, queue_id, QueueOffset(0))

    def _ignores(self, group: str, topic: str) -> bool:
        """Whether a group has members, none of which subscribes to the topic."""
        online = self.consumers.find(group)
        return online is not None and topic not in online.subscriptions
