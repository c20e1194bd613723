"""Reset the offsets of groups, after a plan that shows the effect."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from turbopump.admin.groups import Groups, GroupSettings
from turbopump.admin.positions import AtOffset, AtTime, Earliest, Latest, Position
from turbopump.admin.range_reader import RangeReader
from turbopump.admin.servers import ANSWER_MS, BrokerNode, Servers, gathered
from turbopump.admin.topics import QueueLimits, Topics
from turbopump.client import calls
from turbopump.errors import AdministrationError, InvalidArgument, NotThere
from turbopump.message import MessageQueue, QueueOffset
from turbopump.wire import headers
from turbopump.wire.bodies import KeyValues, QueueOffsets
from turbopump.wire.codes import RequestCode
from turbopump.wire.names import retry_topic

_NEWEST = -1
_OLDEST = 0


@dataclass(frozen=True, slots=True)
class QueueChange:
    """What becomes of a group's offset in one queue; ``current`` is None where it has none."""

    queue: MessageQueue
    current: QueueOffset | None
    target: QueueOffset
    min_offset: QueueOffset
    max_offset: QueueOffset

    @property
    def repeats(self) -> int:
        """Messages that the group gets again."""
        known = self.min_offset if self.current is None else self.current
        return max(0, min(known, self.max_offset) - max(self.target, self.min_offset))

    @property
    def skips(self) -> int:
        """Messages that the group will not get."""
        known = self.min_offset if self.current is None else self.current
        return max(0, self.target - max(known, self.min_offset))


@dataclass(frozen=True, slots=True)
class Plan:
    """What a reset would do; `Offsets.apply` does it."""

    group: str
    topic: str
    to: Position
    is_running: bool
    is_whole: bool
    """Whether it is about all queues of the topic."""

    changes: tuple[QueueChange, ...]

    @property
    def repeats(self) -> int:
        return sum(change.repeats for change in self.changes)

    @property
    def skips(self) -> int:
        return sum(change.skips for change in self.changes)


class Offsets:
    """What can be done with the progress of groups.

    ::

        plan = await admin.offsets.plan("billing", "orders", AtTime(this_morning))
        print(plan.repeats, plan.skips)
        await admin.offsets.apply(plan)
    """

    def __init__(self, servers: Servers, topics: Topics, groups: Groups) -> None:
        self._servers = servers
        self._topics = topics
        self._groups = groups
        self._reader = RangeReader(servers.session)

    async def plan(
        self, group: str, topic: str, to: Position, queues: Collection[MessageQueue] | None = None
    ) -> Plan:
        """Work out what a reset would do, in all queues of a topic or in some; changes nothing.

        Raises NotThere for an unknown group or topic, InvalidArgument for an unknown queue.
        """
        await self._groups.require(group)
        limits = (await self._topics.status(topic)).queues
        chosen = _chosen(limits, queues)
        nodes = {node.broker: node for node in await self._topics.nodes_of(topic)}
        current = await self._committed(nodes.values(), group)
        targets = await gathered(self._reader.offset_of(each, to) for each in chosen)
        changes = tuple(
            QueueChange(
                each.queue, current.get(each.queue), target, each.min_offset, each.max_offset
            )
            for each, target in zip(chosen, targets, strict=True)
        )
        online = await gathered(self._groups.consumers_on(node, group) for node in nodes.values())
        is_running = any(each is not None for each in online)
        return Plan(group, topic, to, is_running, queues is None, changes)

    async def apply(self, plan: Plan) -> None:
        """Do what a plan says.

        Members of a running group are notified and resume from the new offsets within seconds;
        for a stopped one the offsets are written. Raises AdministrationError when a broker that
        is not ours can reset a running group only by time, and the plan is of another kind.
        """
        nodes = {node.broker: node for node in await self._topics.nodes_of(plan.topic)}
        by_broker: dict[str, dict[MessageQueue, int]] = {}
        for change in plan.changes:
            by_broker.setdefault(change.queue.broker, {})[change.queue] = change.target
        await gathered(
            self._apply_on(nodes[broker], plan, targets) for broker, targets in by_broker.items()
        )

    async def reset(
        self, group: str, topic: str, to: Position, queues: Collection[MessageQueue] | None = None
    ) -> Plan:
        """Plan and apply in one call; return what was done."""
        plan = await self.plan(group, topic, to, queues)
        await self.apply(plan)
        return plan

    async def skip(self, group: str, topic: str) -> Plan:
        """Skip everything that a group has not consumed yet; return what was done."""
        return await self.reset(group, topic, Latest())

    async def plan_clone(
        self, source: str, destination: str, topic: str | None = None
    ) -> tuple[QueueChange, ...]:
        """Work out what `clone` would do to the destination; changes nothing."""
        progress = await self._groups.progress(source, topic)
        nodes = await self._servers.readable()
        own, current = await gathered(
            self._committed(nodes, each) for each in (source, destination)
        )
        return tuple(
            QueueChange(
                each.queue,
                current.get(each.queue),
                own[each.queue],
                QueueOffset(0),
                each.max_offset,
            )
            for each in progress.queues
            if each.queue in own and each.queue.topic != retry_topic(source)
        )

    async def clone(
        self, source: str, destination: str, topic: str | None = None, *, create: bool = False
    ) -> None:
        """Give a group the progress of another, in one topic or in all that both may consume.

        Raises StillInUse while the destination has members: they would write over it; and
        NotThere when there is no such group, unless ``create`` makes it.
        """
        await self._groups.require(source)
        await self._groups.require_stopped(destination)
        try:
            await self._groups.require(destination)
        except NotThere:
            if not create:
                raise
            await self._groups.create(GroupSettings(destination))
        changes = await self.plan_clone(source, destination, topic)
        nodes = {node.broker: node for node in await self._servers.masters()}
        await gathered(
            self._clone_on(nodes[broker], source, destination, name)
            for broker, name in sorted({(c.queue.broker, c.queue.topic) for c in changes})
        )

    async def _committed(
        self, nodes: Iterable[BrokerNode], group: str
    ) -> dict[MessageQueue, QueueOffset]:
        """Return where a group has come to; of queues where it has no offset, nothing.

        Asked for one queue, a broker says 0 for a group that has none there yet.
        """
        asked = tuple(nodes)
        tables = await gathered(map(self._groups.offsets_on, asked))
        return {
            MessageQueue(name.removesuffix(f"@{group}"), node.broker, number): QueueOffset(offset)
            for node, table in zip(asked, tables, strict=True)
            for name, offsets in table.items()
            if name.endswith(f"@{group}")
            for number, offset in offsets.items()
        }

    async def _apply_on(
        self, node: BrokerNode, plan: Plan, targets: Mapping[MessageQueue, int]
    ) -> None:
        if await self._groups.consumers_on(node, plan.group) is not None:
            info = await self._servers.read(KeyValues, node, RequestCode.GET_BROKER_RUNTIME_INFO)
            if "turbopumpVersion" in info.table:
                await self._notify_members(node, plan, targets)
            else:
                await self._notify_by_time(node, plan, targets)
            return
        await self._commit(node, plan, targets)

    async def _commit(
        self, node: BrokerNode, plan: Plan, targets: Mapping[MessageQueue, int]
    ) -> None:
        for queue, target in targets.items():
            await calls.commit_offset(
                self._servers.session,
                node.address,
                plan.group,
                queue,
                QueueOffset(target),
                ANSWER_MS,
                is_oneway=False,
            )

    async def _notify_members(
        self, node: BrokerNode, plan: Plan, targets: Mapping[MessageQueue, int]
    ) -> None:
        """Have one of our brokers notify the members of a group of their new offsets.

        The body is our own addition to this request. A broker that does not know it would see a
        reset to the newest message without force, which leaves every group where it is.
        """
        header = headers.ResetOffset(
            topic=plan.topic, group=plan.group, timestamp=_NEWEST, is_force=False
        )
        body = QueueOffsets(offset_table=dict(targets)).encode(bare_keys=True)
        await self._servers.ask(node, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header, body)

    async def _notify_by_time(
        self, node: BrokerNode, plan: Plan, targets: Mapping[MessageQueue, int]
    ) -> None:
        """Reset a running group as every broker can: all queues of a topic, to a time."""
        if not plan.is_whole or isinstance(plan.to, AtOffset):
            raise AdministrationError(
                f"broker {node.broker} at {node.address} resets running groups only as a whole and "
                f"by time; stop the members of {plan.group!r} and repeat the reset"
            )
        # Such a broker refuses the whole reset if the group has no offset in one of the queues.
        missing = {each.queue for each in plan.changes if each.current is None}
        await self._commit(
            node, plan, {queue: targets[queue] for queue in targets if queue in missing}
        )
        header = headers.ResetOffset(
            topic=plan.topic, group=plan.group, timestamp=_timestamp_ms(plan.to), is_force=True
        )
        await self._servers.ask(node, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)

    async def _clone_on(self, node: BrokerNode, source: str, destination: str, topic: str) -> None:
        header = headers.CloneGroupOffset(
            src_group=source, dest_group=destination, topic=topic, offline=True
        )
        await self._servers.ask(node, RequestCode.CLONE_GROUP_OFFSET, header)


def _timestamp_ms(to: AtTime | Earliest | Latest) -> int:
    """Return the form in which brokers expect a position."""
    match to:
        case AtTime():
            return to.epoch_ms
        case Earliest():
            return _OLDEST
        case Latest():
            return _NEWEST


def _chosen(
    limits: Iterable[QueueLimits], queues: Collection[MessageQueue] | None
) -> list[QueueLimits]:
    every = list(limits)
    if queues is None:
        return every
    known = {each.queue for each in every}
    unknown = sorted(queue for queue in queues if queue not in known)
    if unknown:
        names = ", ".join(f"{queue.broker}:{queue.queue_id}" for queue in sorted(known))
        raise InvalidArgument(f"queue {unknown[0]} does not exist; there are {names}")
    return [each for each in every if each.queue in queues]
