"""The clients of a run: producers, and groups whose members join and leave."""

from __future__ import annotations

import asyncio

from turbopump.testing.simulate.consumers import Member
from turbopump.testing.simulate.observer import Observer
from turbopump.testing.simulate.plan import NEW, GroupKind
from turbopump.testing.simulate.producers import Sender
from turbopump.testing.simulate.transacting_producers import Database, TransactingProducer
from turbopump.testing.simulate.world import World

_POLL_INTERVAL_S = 1.0


class Load:
    """All producers, and the members that run, by group."""

    def __init__(self, world: World, observer: Observer) -> None:
        plan = world.plan
        self.senders = {name: Sender(world, name, sends) for name, sends in plan.producers.items()}
        database = Database(world)
        self.transacting = {
            name: TransactingProducer(world, name, deeds, database)
            for name, deeds in plan.transactions.transacting.items()
        }
        self._world = world
        self._observer = observer
        self._groups = {group.name: group for group in plan.groups}
        self.members: dict[str, list[Member]] = {name: [] for name in self._groups}
        """By group, those that run."""
        self._numbers = dict.fromkeys(self._groups, 0)
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the initial members of groups."""
        for group in self._groups.values():
            for _ in range(group.members):
                await self.add_member(group.name)
        self._watching = asyncio.create_task(self._watch())

    async def send_all(self) -> None:
        """Let every producer send its messages."""
        await asyncio.gather(*(producer.run() for producer in self._producers.values()))

    async def close(self) -> None:
        """Stop everything cleanly."""
        if self._watching is not None:
            self._watching.cancel()
        for producer in self._producers.values():
            await producer.close()
        members = [member for members in self.members.values() for member in members]
        await asyncio.gather(*map(self.remove, members))

    async def crash_producer(self, name: str) -> None:
        """Kill a producer; another process replaces it."""
        await self._producers[name].crash()

    @property
    def _producers(self) -> dict[str, Sender | TransactingProducer]:
        return {**self.senders, **self.transacting}

    # --- members ----------------------------------------------------------------------------------

    @property
    def owns_everything(self) -> bool:
        """Whether every queue has an owner in every group, except those that poll."""
        plan, masters = self._world.plan, self._world.masters.values()
        counts = {
            topic: count * len(plan.brokers)
            for topic, count in plan.queues.items()
            # Its message may never have created it, or not on the master that was promoted.
            if topic != NEW or any(broker.state.topics.find(topic) for broker in masters)
        }
        return all(
            sum(
                queue.topic in group.topics and queue.topic in counts
                for member in self.members[group.name]
                for queue in member.assignment()
            )
            == sum(counts.get(topic, 0) for topic in group.topics)
            for group in plan.groups
            if group.kind is not GroupKind.PULL
        )

    def any_member(self, group: str, number: int) -> Member | None:
        """Return one of the members that run, None when there is none."""
        members = [member for member in self.members[group] if member.is_started]
        return members[number % len(members)] if members else None

    async def add_member(self, group: str) -> None:
        """Let one more process join a group."""
        self._numbers[group] += 1
        member = Member(self._world, self._groups[group], self._numbers[group])
        self.members[group].append(member)
        await member.start()

    async def remove(self, member: Member, *, is_crash: bool = False) -> None:
        """Let a member leave cleanly, or kill it."""
        self.members[member.group.name].remove(member)
        await (member.crash() if is_crash else member.leave())
        self._observer.note_assignments(member.group.name, member.name, ())

    def note_assignments(self) -> None:
        """Record which queues each member owns now."""
        for group, members in self.members.items():
            for member in members:
                self._observer.note_assignments(group, member.name, member.assignment())

    async def _watch(self) -> None:
        while True:
            self.note_assignments()
            await asyncio.sleep(_POLL_INTERVAL_S)
