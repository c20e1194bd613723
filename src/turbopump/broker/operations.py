"""What operators change: topics and groups, with everything that depends on them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from turbopump.broker.config import IdentityConfig
from turbopump.broker.groups import Groups
from turbopump.broker.offsets import Offsets
from turbopump.broker.stats import Stats
from turbopump.broker.topics import Topics, check_shape
from turbopump.errors import RemoteError
from turbopump.store.store import Store
from turbopump.wire.bodies import GroupConfig, TopicConfig
from turbopump.wire.names import HALF_OPERATIONS_TOPIC, SCHEDULE_TOPIC, check_name

Announce = Callable[[TopicConfig], Awaitable[None]]
"""Announces a created or changed topic to name servers, and waits briefly until they know it."""


@dataclass(slots=True, eq=False, kw_only=True)
class Operations:
    """Creates, changes and deletes topics and groups, on a master only.

    A refusal is a RemoteError, InvalidArgument or WriteFailed.
    """

    identity: IdentityConfig
    topics: Topics
    groups: Groups
    offsets: Offsets
    stats: Stats
    store: Store
    announce: Announce

    async def update_topic(self, topic: TopicConfig) -> None:
        """Create or change a topic; return once reachable name servers know it."""
        self._require_changeable(topic.topic_name)
        wrong = check_shape(topic)
        if wrong is not None:
            raise RemoteError.system(wrong)
        await self.topics.update(topic)
        await self.announce(topic)

    async def delete_topic(self, name: str) -> None:
        """Delete a topic, its queues and the progress of groups in it.

        Apache RocketMQ keeps the progress, so that a new topic of the same name, whose queues begin
        at 0, would not be read until it has grown past the old one.
        """
        self._require_changeable(name)
        await self.topics.delete(name)
        if self.topics.find(name) is not None:
            remark = f"topic[{name}] was re-created by a producer: stop it, then delete again"
            raise RemoteError.system(remark)
        self.store.remove_topic(name, is_deleted=True)
        self.stats.forget_topic(name)
        self.offsets.remove_topic(name)
        await self.offsets.saving.try_save()

    def delete_unused_queues(self) -> None:
        """Delete the queues of topics that do not exist."""
        kept = {SCHEDULE_TOPIC, HALF_OPERATIONS_TOPIC}
        for name in {topic for topic, _ in self.store.queue_ids()} - kept:
            if self.topics.find(name) is None:
                self.store.remove_topic(name)

    async def update_group(self, group: GroupConfig) -> None:
        """Create or change a group."""
        self._refuse_on_slave()
        await self.groups.update(group)

    async def delete_group(self, name: str, *, with_offsets: bool) -> None:
        """Delete a group, and its progress if requested; an unknown group is not an error."""
        self._refuse_on_slave()
        await self.groups.delete(name)
        if with_offsets:
            self.offsets.remove_group(name)
        self.stats.forget_group(name)

    def _require_changeable(self, name: str) -> None:
        self._refuse_on_slave()
        wrong = check_name(name)
        if wrong is None and self.topics.is_system(name):
            wrong = f"The topic[{name}] is conflict with system topic."
        if wrong is not None:
            raise RemoteError.system(wrong)

    def _refuse_on_slave(self) -> None:
        """Refuse changes on a slave, which copies topics and groups from its master."""
        if self.identity.is_slave:
            raise RemoteError.system(
                "Can't modify topic or subscription group from slave broker,"
                " please execute it from master broker."
            )
