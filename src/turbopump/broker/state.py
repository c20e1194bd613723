"""A broker's tables and its connected clients: loaded at the start, or held in memory only."""

from __future__ import annotations

from turbopump.broker.clients import Consumers, Producers
from turbopump.broker.consumer_filters import ConsumerFilters
from turbopump.broker.groups import Groups
from turbopump.broker.live_config import LiveConfig
from turbopump.broker.membership_file import MembershipFile
from turbopump.broker.offsets import Offsets
from turbopump.broker.queue_locks import QueueLocks
from turbopump.broker.stats import Stats
from turbopump.broker.subscription_conflicts import SubscriptionConflicts
from turbopump.broker.subscription_filters import SubscriptionFilters
from turbopump.broker.topics import Topics
from turbopump.clock import Clock
from turbopump.machine.files import Files
from turbopump.supervisor import Watch
from turbopump.tables import Table, TableFile, TableWriter


class State:
    """A broker's state: on disk and loaded at the start, or in memory only."""

    def __init__(self, live: LiveConfig, clock: Clock, files: Files, writer: TableWriter) -> None:
        config = live.current
        self.live = live
        self.files = files
        self._writer = writer
        self._directory = config.directory / "config"
        self.topics = Topics(
            config.topics,
            config.identity,
            self.file("topics.json"),
            delay_levels=len(config.store.delay_levels),
        )
        self.groups = Groups(config.groups, self.file("subscriptionGroup.json"))
        self.offsets = Offsets(self.file("consumerOffset.json"))
        self.stats = Stats(config.identity.cluster, clock)
        self.consumers = Consumers()
        self.producers = Producers()
        self.consumer_filters = ConsumerFilters(self.file("consumerFilter.json"), clock)
        self.consumers.listen(self.consumer_filters.group_changed)
        self.conflicts = SubscriptionConflicts()
        self.consumers.listen(self.conflicts.group_changed)
        self.filters = SubscriptionFilters(live, self.consumers, self.consumer_filters)
        self.locks = QueueLocks(config.groups.lock_expiry_ms)
        self.members = MembershipFile(
            self.file("groupMembers.json"), self.consumers, self.locks, clock
        )

    def file(self, name: str) -> TableFile:
        return TableFile(self._directory / name, self.files, self._writer)

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables that keep files up to date."""
        parts = (self.topics, self.groups, self.offsets, self.members, self.consumer_filters)
        return tuple(part.saving for part in parts)

    @property
    def watches(self) -> tuple[Watch, ...]:
        """What writes the files, and what has failed of it."""
        return self._writer.work.watches

    def load(self, epoch: int = 0) -> list[Table]:
        """Load the tables of an earlier run; return those that are missing.

        Each promotion of a broker is a new ``epoch``.
        """
        parts = (self.topics, self.groups, self.offsets)
        missing = [part.saving for part in parts if not part.load()]
        groups = self.live.current.groups
        self.members.load(groups.groups_max if groups.member_reconnect_ms else 0, epoch)
        self.consumer_filters.load()
        return missing
