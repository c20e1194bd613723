"""The parts of a broker, each given what it uses. Nothing runs here: `broker` does that."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Protocol

from turbopump.broker.admin import not_yet
from turbopump.broker.admin.groups import GroupRequests
from turbopump.broker.admin.inspection import InspectionRequests
from turbopump.broker.admin.progress import ProgressRequests
from turbopump.broker.admin.relays import RelayRequests
from turbopump.broker.admin.resets import ResetRequests
from turbopump.broker.admin.settings import SettingRequests
from turbopump.broker.admin.topics import TopicRequests
from turbopump.broker.arrivals import Arrivals
from turbopump.broker.clients import Consumers, Producers
from turbopump.broker.consumer_filters import ConsumerFilters
from turbopump.broker.delays import Delays
from turbopump.broker.durability import Durability, Limits
from turbopump.broker.group_members import GroupMembers
from turbopump.broker.groups import Groups
from turbopump.broker.handlers.clients import ClientRequests, notify_clients
from turbopump.broker.handlers.copied_tables import CopiedTables
from turbopump.broker.handlers.offsets import OffsetRequests
from turbopump.broker.handlers.pull import PullRequests
from turbopump.broker.handlers.queries import QueryRequests
from turbopump.broker.handlers.reply import ReplyRequests, push_reply
from turbopump.broker.handlers.send import SendRequests
from turbopump.broker.handlers.send_back import SendBackRequests
from turbopump.broker.handlers.transactions import TransactionRequests, ask_producer
from turbopump.broker.live_config import LiveConfig
from turbopump.broker.membership import Membership
from turbopump.broker.offsets import Offsets
from turbopump.broker.overload import WorkAhead
from turbopump.broker.progress import Progress
from turbopump.broker.pull import Pulls
from turbopump.broker.put import Put
from turbopump.broker.queue_locks import QueueLocks
from turbopump.broker.registration import Registration
from turbopump.broker.replies import Replies
from turbopump.broker.retries import Retries
from turbopump.broker.runtime_info import Load, RuntimeInfo
from turbopump.broker.send import Sends
from turbopump.broker.stats import Stats
from turbopump.broker.subscription_conflicts import SubscriptionConflicts
from turbopump.broker.subscription_filters import SubscriptionFilters
from turbopump.broker.topics import Topics
from turbopump.broker.transactions.checks import Checks
from turbopump.broker.transactions.transactions import Transactions
from turbopump.clock import Clock
from turbopump.machine.files import Files
from turbopump.net.deadlines import Deadlines
from turbopump.net.router import Handler
from turbopump.store.store import Store
from turbopump.supervisor import Supervisor, Watch
from turbopump.tables import Table, TableFile, TableWriter
from turbopump.wire.hosts import Host


class State:
    """What a broker knows: on disk and loaded at the start, or in memory only."""

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
            clock,
            delay_levels=len(config.store.delay_levels),
        )
        self.groups = Groups(config.groups, self.file("subscriptionGroup.json"), clock)
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
        self.members = GroupMembers(
            self.file("groupMembers.json"), self.consumers, self.locks, clock
        )

    def file(self, name: str) -> TableFile:
        """Return the file of a table."""
        return TableFile(self._directory / name, self.files, self._writer)

    @property
    def tables(self) -> tuple[Table, ...]:
        """What keeps files up to date."""
        parts = (self.topics, self.groups, self.offsets, self.members, self.consumer_filters)
        return tuple(part.saving for part in parts)

    @property
    def watches(self) -> tuple[Watch, ...]:
        """What writes the files, and what has failed of it."""
        return self._writer.work.watches

    def load(self) -> list[Table]:
        """Read what an earlier run left; return the tables that it has not left."""
        parts = (self.topics, self.groups, self.offsets)
        missing = [part.saving for part in parts if not part.load()]
        groups = self.live.current.groups
        if groups.member_reconnect_ms:
            self.members.load(groups.groups_max)
        self.consumer_filters.load()
        return missing


class MessagePath:
    """A message's way through the broker: accepted, stored, handed out, retried, delayed."""

    def __init__(
        self,
        state: State,
        store: Store,
        store_host: Host,
        clock: Clock,
        chance: Random,
        work: Supervisor,
    ) -> None:
        config = state.live.current
        levels = config.store.delay_levels
        self.deadlines = Deadlines(clock)
        self.work_ahead = WorkAhead(clock)
        self.arrivals = Arrivals(clock, config.long_polling.held_max)
        overload = config.overload
        self.durability = Durability(
            store,
            self.deadlines,
            Limits(
                timeout_ms=overload.sync_flush_timeout_ms,
                sends_max=overload.sends_waiting_max,
                bytes_max=overload.unflushed_bytes_max,
            ),
        )
        is_slave = config.identity.is_slave
        self.put = put = Put(store, self.durability, len(levels), is_slave=is_slave)
        self.delays = Delays(store, put, state.file("delayOffset.json"), levels, clock, work)
        self.transactions = Transactions(
            store=store,
            put=put,
            topics=state.topics,
            offsets=state.offsets,
            store_host=store_host,
            clock=clock,
            watch=work.watch("transaction operations"),
        )
        self.checks = Checks(
            config=state.live,
            transactions=self.transactions,
            put=put,
            topics=state.topics,
            producers=state.producers,
            ask=ask_producer,
            clock=clock,
        )
        self.sends = Sends(
            config=state.live,
            store_host=store_host,
            put=put,
            work_ahead=self.work_ahead,
            topics=state.topics,
            groups=state.groups,
            stats=state.stats,
            clock=clock,
            chance=chance,
        )
        self.pulls = Pulls(
            config=state.live,
            store_host=store_host,
            store=store,
            put=put,
            arrivals=self.arrivals,
            topics=state.topics,
            groups=state.groups,
            consumers=state.consumers,
            filters=state.filters,
            offsets=state.offsets,
            stats=state.stats,
            clock=clock,
        )
        self.retries = Retries(
            config=state.live,
            store=store,
            put=put,
            topics=state.topics,
            groups=state.groups,
            stats=state.stats,
            chance=chance,
        )
        self.replies = Replies(
            store_host=store_host,
            sends=self.sends,
            put=put,
            producers=state.producers,
            push=push_reply,
            clock=clock,
        )
        self.pull_requests = PullRequests(self.pulls)
        self._requests: tuple[_Requests, ...] = (
            SendRequests(config=state.live, store_host=store_host, sends=self.sends, clock=clock),
            self.pull_requests,
            SendBackRequests(self.retries),
            ReplyRequests(state.live, store_host, self.replies),
            QueryRequests(state.live, store),
            TransactionRequests(config.identity, self.transactions),
        )

    @property
    def load(self) -> Load:
        """What waits at the moment."""
        return Load(
            sends_waiting=len(self.durability),
            send_wait_ms=self.work_ahead.wait_ms,
            pulls_held=len(self.arrivals),
        )

    def settle(self) -> None:
        """Finish what requests that came in one chunk have left; to be called after each."""
        self.put.settle()
        self.work_ahead.note_served()

    def handlers(self) -> dict[int, Handler]:
        return _handlers(self._requests)


class Administration:
    """Clients and operators: heartbeats, locks, offsets, and everything that tools ask."""

    def __init__(
        self,
        state: State,
        path: MessagePath,
        store: Store,
        registration: Registration,
        address: str,
        clock: Clock,
        work: Supervisor,
    ) -> None:
        config = state.live.current
        topics, groups, offsets = state.topics, state.groups, state.offsets
        consumers, producers, stats = state.consumers, state.producers, state.stats
        self.membership = Membership(
            config=config.groups,
            consumers=consumers,
            producers=producers,
            locks=state.locks,
            members=state.members,
            topics=topics,
            groups=groups,
            consumer_filters=state.consumer_filters,
            conflicts=state.conflicts,
            notify=notify_clients,
            clock=clock,
        )
        self.progress = Progress(offsets, topics, groups, consumers, store)
        self.clients = ClientRequests(self.membership, state.filters)
        self.runtime_info = RuntimeInfo(
            config=config,
            stats=stats,
            store=store,
            delay_progress=lambda: path.delays.progress,
            clock=clock,
            files=state.files,
            load=lambda: path.load,
            work=lambda: (*work.watches, *state.watches),
        )
        self.copied_tables = CopiedTables(
            topics=topics,
            groups=groups,
            offsets=offsets,
            consumer_filters=state.consumer_filters,
            delays=path.delays.encoded,
            delays_for_java=lambda: path.delays.progress.encode(bare_keys=True),
            store=store,
            clock=clock,
        )
        self._requests: tuple[_Requests, ...] = (
            self.clients,
            self.copied_tables,
            OffsetRequests(self.progress, offsets),
            SettingRequests(state.live, self.runtime_info),
            InspectionRequests(stats=stats, consumers=consumers, store=store),
            *_topics_and_groups(state, store, registration),
            *_progress(state, store, address, clock),
        )

    def handlers(self) -> dict[int, Handler]:
        return not_yet.handlers() | _handlers(self._requests)


class _Requests(Protocol):
    def handlers(self) -> dict[int, Handler]: ...


def _handlers(served: Iterable[_Requests]) -> dict[int, Handler]:
    return {code: serve for requests in served for code, serve in requests.handlers().items()}


def _topics_and_groups(
    state: State, store: Store, registration: Registration
) -> tuple[_Requests, ...]:
    identity = state.live.current.identity
    return (
        TopicRequests(
            identity=identity,
            topics=state.topics,
            offsets=state.offsets,
            consumers=state.consumers,
            stats=state.stats,
            store=store,
            announce=registration.announce,
        ),
        GroupRequests(
            identity=identity,
            groups=state.groups,
            offsets=state.offsets,
            consumers=state.consumers,
            producers=state.producers,
            conflicts=state.conflicts,
            stats=state.stats,
        ),
    )


def _progress(state: State, store: Store, address: str, clock: Clock) -> tuple[_Requests, ...]:
    """Return what serves questions about how far groups have come, and changes of it."""
    name = state.live.current.identity.broker_name
    return (
        ProgressRequests(
            broker_name=name,
            address=lambda: address,
            topics=state.topics,
            groups=state.groups,
            offsets=state.offsets,
            consumers=state.consumers,
            stats=state.stats,
            store=store,
            clock=clock,
        ),
        ResetRequests(
            broker_name=name,
            topics=state.topics,
            offsets=state.offsets,
            consumers=state.consumers,
            store=store,
        ),
        RelayRequests(broker_name=name, consumers=state.consumers, store=store),
    )
