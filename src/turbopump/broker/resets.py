"""Moving the offsets of a running group: by time, or to given offsets.

Any other commit below the stored offset is logged, since messages are delivered again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from turbopump.broker.clients import Consumers, Member
from turbopump.broker.offsets import Offsets
from turbopump.broker.searches import Searches
from turbopump.broker.topics import Topics
from turbopump.clock import Clock
from turbopump.errors import RemoteError
from turbopump.machine.log_limit import LogLimit
from turbopump.message import MessageQueue
from turbopump.store.store import Store
from turbopump.wire.codes import ResponseCode

_log = logging.getLogger(__name__)

APPLIED_WITHIN_MS = 600_000
"""How long commits are attributed to a reset: members apply it when their listeners return."""

NEWEST = -1
"""In place of a timestamp: after the newest message."""

RESETTABLE_SINCE = 28
"""Clients with a lower version number do not understand a reset."""


class Reset(Struct, frozen=True, kw_only=True):
    """A request to move a group in a topic."""

    group: str
    topic: str
    timestamp_ms: int
    """Or `NEWEST`; counts only without ``offsets``."""
    is_forced: bool
    """Whether offsets may also move ahead; otherwise no message is skipped."""
    offsets: Mapping[MessageQueue, int]
    """Turbopump's addition: these queues and offsets, in place of all queues by time."""


class PlannedReset(Struct, frozen=True):
    """Where a group shall continue, and the members that have to be notified."""

    targets: dict[MessageQueue, int]
    members: tuple[Member, ...]


class _Planned(Struct, frozen=True):
    offsets: dict[int, int]
    """By queue."""
    end_ms: int


@dataclass(slots=True, eq=False, kw_only=True)
class Resets:
    """Computes the offsets of a reset, which the members of the group apply and commit.

    If the group has no members, the error says so, and tools commit the offsets instead.
    """

    broker_name: str
    topics: Topics
    offsets: Offsets
    consumers: Consumers
    store: Store
    searches: Searches
    clock: Clock
    _planned: dict[tuple[str, str], _Planned] = field(default_factory=dict)
    _log_limit: LogLimit = field(init=False)

    def __post_init__(self) -> None:
        self._log_limit = LogLimit(self.clock)

    async def plan(self, reset: Reset) -> PlannedReset:
        """Return the offsets, and who must apply them; raises RemoteError."""
        targets = self._given(reset) or await self._by_time(reset)
        planned = PlannedReset(targets, self._resettable(reset.group))
        now_ms = self.clock.monotonic_ms()
        self._planned = {key: each for key, each in self._planned.items() if each.end_ms > now_ms}
        offsets = {queue.queue_id: offset for queue, offset in targets.items()}
        self._planned[reset.group, reset.topic] = _Planned(offsets, now_ms + APPLIED_WITHIN_MS)
        return planned

    def note_lowered(self, group: str, topic: str, queue_id: int, stored: int, offset: int) -> None:
        """Log a commit below the stored offset, unless a reset explains it."""
        # Without members, it is how tools reset a group.
        if self.consumers.members(group) and not self._is_planned(group, topic, queue_id, offset):
            text = (
                "%s commits offset %d in queue %d of %s, below the stored %d: messages are"
                " delivered again; logged once a minute for each queue"
            )
            args = group, offset, queue_id, topic, stored
            self._log_limit.log((group, topic, queue_id), _log, logging.WARNING, text, *args)

    def _is_planned(self, group: str, topic: str, queue_id: int, offset: int) -> bool:
        planned = self._planned.get((group, topic))
        if planned is None or planned.end_ms <= self.clock.monotonic_ms():
            return False
        target = planned.offsets.get(queue_id)
        return target is not None and offset >= target

    def _resettable(self, group: str) -> tuple[Member, ...]:
        members = self.consumers.members(group)
        if not members:
            remark = f"Consumer not online, so can not reset offset, Group: {group}"
            raise RemoteError(ResponseCode.CONSUMER_NOT_ONLINE, remark)
        absent = [member.client_id for member in members if member.is_absent]
        if absent:
            # It would continue from its current position, and commit that over the reset.
            remark = (
                f"client {absent[0]} of {group} has not reconnected since the broker"
                " restarted, so it cannot be reset: try again in a minute"
            )
            raise RemoteError.system(remark)
        too_old = [member for member in members if member.version < RESETTABLE_SINCE]
        if too_old:
            raise RemoteError.system(f"the client {too_old[0].client_id} is too old to be reset")
        return members

    def _given(self, reset: Reset) -> dict[MessageQueue, int]:
        """Return the given offsets, all of local queues of the topic."""
        for queue, offset in reset.offsets.items():
            _, high = self.store.queue_range(queue.topic, queue.queue_id)
            is_here = (queue.topic, queue.broker) == (reset.topic, self.broker_name)
            if not is_here or not 0 <= offset <= high:
                remark = f"[reset-offset] {queue} has no offset {offset} on {self.broker_name}"
                raise RemoteError.system(remark)
        return dict(reset.offsets)

    async def _by_time(self, reset: Reset) -> dict[MessageQueue, int]:
        topic = self.topics.find(reset.topic)
        if topic is None:
            remark = f"[reset-offset] reset offset failed, no topic: {reset.topic}"
            raise RemoteError.system(remark)
        queue_ids = range(topic.write_queue_nums)
        found = [await self._target(reset, queue_id) for queue_id in queue_ids]
        # Stored offsets are looked up only now: members commit while the disk reads.
        return {
            MessageQueue(reset.topic, self.broker_name, queue_id): self._permitted(
                reset, queue_id, target
            )
            for queue_id, target in enumerate(found)
        }

    async def _target(self, reset: Reset, queue_id: int) -> int:
        if reset.timestamp_ms == NEWEST:
            return self.store.queue_range(reset.topic, queue_id)[1]
        search = self.store.find_offset(reset.topic, queue_id, reset.timestamp_ms)
        return await self.searches.found(search)

    def _permitted(self, reset: Reset, queue_id: int, target: int) -> int:
        stored = self.offsets.find(reset.group, reset.topic, queue_id)
        if stored is None:
            remark = f"the group {reset.group} has no offset in queue {queue_id} of {reset.topic}"
            raise RemoteError.system(remark)
        # Without force, offsets only move back, so that no unseen message is skipped.
        return target if reset.is_forced or target < stored else stored
