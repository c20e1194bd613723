"""A broker's state and its handlers, without sockets or a store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
from msgspec import structs

from turbopump.broker.admin.groups import GroupRequests
from turbopump.broker.admin.inspection import InspectionRequests
from turbopump.broker.admin.progress import ProgressRequests, ResetRequests
from turbopump.broker.admin.relays import RelayRequests
from turbopump.broker.admin.settings import SettingRequests
from turbopump.broker.admin.topics import TopicRequests
from turbopump.broker.clients import Consumers, Producers
from turbopump.broker.config import BrokerConfig, FiltersConfig, IdentityConfig, TopicsConfig
from turbopump.broker.consumer_filters import ConsumerFilters
from turbopump.broker.groups import Groups
from turbopump.broker.handlers.clients import ClientRequests, notify_clients
from turbopump.broker.handlers.copied_tables import CopiedTables
from turbopump.broker.handlers.filter_servers import FilterServers
from turbopump.broker.handlers.offsets import OffsetRequests
from turbopump.broker.lag import Lag
from turbopump.broker.live_config import LiveConfig
from turbopump.broker.membership import Membership
from turbopump.broker.membership_file import MembershipFile
from turbopump.broker.offsets import Offsets
from turbopump.broker.operations import Operations
from turbopump.broker.progress import Progress
from turbopump.broker.queue_locks import QueueLocks
from turbopump.broker.replication.mastership import Mastership
from turbopump.broker.replication.roles import RoleRecord
from turbopump.broker.resets import Resets
from turbopump.broker.runtime_info import RuntimeInfo
from turbopump.broker.searches import Searches
from turbopump.broker.stats import Stats
from turbopump.broker.subscription_conflicts import SubscriptionConflicts
from turbopump.broker.subscription_filters import SubscriptionFilters
from turbopump.broker.topics import Topics
from turbopump.errors import RemoteError, RequestTimeout, WriteFailed, WriteRefused
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.net.connection import Connection
from turbopump.net.router import Handler, Router, failure
from turbopump.store.damage import DamageLog
from turbopump.store.outcomes import EVERYTHING, UNIT_DTYPE, Cold, Filter, NoMatch, ReadOutcome
from turbopump.store.store import Store
from turbopump.tables import TableFile, TableWriter
from turbopump.testing import VirtualClock
from turbopump.testing.background import VirtualBackground
from turbopump.wire.bodies import (
    ConsumerData,
    DataVersion,
    DelayOffsets,
    Heartbeat,
    MessageModel,
    Subscription,
    TopicConfig,
)
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import Command, request
from turbopump.wire.schema import Body, Header

B = TypeVar("B", bound=Body)
T = TypeVar("T")

IDENTITY = IdentityConfig(broker_name="broker-a")


def finished(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to completion, even if an event loop is already running."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


class FakeFile(TableFile):
    """An in-memory file whose writes fail on demand; it keeps bodies without their versions."""

    def __init__(self) -> None:
        self.saved: list[bytes] = []
        self.full = False
        super().__init__(
            Path("in memory"), writer=TableWriter(VirtualBackground(None), VirtualClock())
        )

    def load(self, kind: type[B]) -> B | None:
        return kind.decode(self.saved[-1]) if self.saved else None

    def save(self, body: bytes, _version: DataVersion) -> None:
        if self.full:
            raise WriteFailed("no space is left")
        self.saved.append(body)


class FakePeer:
    """A client's connection that records what it was sent."""

    def __init__(self, address: str = "10.0.0.1:5000") -> None:
        self.peer_address = address
        self.sent: list[Command] = []
        self.answers: dict[int, Command] = {}
        self.closed: str | None = None

    def __repr__(self) -> str:
        return f"<{self.peer_address}>"

    def oneway(self, command: Command) -> None:
        self.sent.append(command)

    async def request(self, command: Command, timeout_ms: int) -> Command:
        self.sent.append(command)
        answer = self.answers.get(command.code)
        if answer is None:
            raise RequestTimeout(f"no answer within {timeout_ms} ms")
        return answer

    @property
    def is_open(self) -> bool:
        return self.closed is None

    def close(self, reason: str = "closed") -> None:
        self.closed = reason


class FakeStore:
    """Queues that know only the store timestamps of their messages."""

    def __init__(self) -> None:
        self.queues: dict[tuple[str, int], list[int]] = {}
        self.first: dict[tuple[str, int], int] = {}
        self.records: dict[int, bytes] = {}
        self.units: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
        self.removed: list[str] = []
        self.cleaned: list[bool] = []
        self.on_disk = False
        self.min_offset = PhysicalOffset(0)
        self.written_end = PhysicalOffset(0)
        self.readable_end = PhysicalOffset(0)
        self.damage = DamageLog()
        self.refusal: WriteRefused | None = None

    def put(self, topic: str, queue_id: int, *times_ms: int) -> None:
        self.queues.setdefault((topic, queue_id), []).extend(times_ms)

    def queue_range(self, topic: str, queue_id: int) -> tuple[QueueOffset, QueueOffset]:
        low = self.first.get((topic, queue_id), 0)
        times = self.queues.get((topic, queue_id), [])
        return QueueOffset(low), QueueOffset(low + len(times))

    def max_offsets(self, topic: str, queue_ids: Iterable[int]) -> list[QueueOffset]:
        return [self.queue_range(topic, number)[1] for number in queue_ids]

    def find_marks(
        self, topic: str, queue_ids: Iterable[int], offsets: Iterable[int]
    ) -> Iterator[tuple[list[int], list[int]]]:
        times_ms = []
        for queue_id, offset in zip(queue_ids, offsets, strict=True):
            low, high = self.queue_range(topic, queue_id)
            is_there = low <= offset < high
            times_ms.append(self.queues[topic, queue_id][offset - low] if is_there else -1)
        yield times_ms, times_ms

    def is_far_behind(self, _topic: str, _queue_id: int, _offset: QueueOffset) -> bool:
        return self.on_disk

    def find_offset(self, topic: str, queue_id: int, timestamp_ms: int) -> Iterator[QueueOffset]:
        low, _ = self.queue_range(topic, queue_id)
        times = self.queues.get((topic, queue_id), [])
        later = [place for place, time_ms in enumerate(times) if time_ms >= timestamp_ms]
        yield QueueOffset(low + (later[0] if later else max(len(times) - 1, 0)))

    def read(
        self,
        topic: str,
        queue_id: int,
        offset: QueueOffset,
        count_max: int,
        wanted: Filter = EVERYTHING,
    ) -> ReadOutcome:
        low, high = self.queue_range(topic, queue_id)
        if wanted.units is not None:
            units = np.array(self.units.get((topic, queue_id), [])[offset - low :], UNIT_DTYPE)
            wanted.units(units)
        return NoMatch(
            next_offset=offset, min_offset=low, max_offset=high, suggest_slave=self.on_disk
        )

    def queue_ids(self) -> list[tuple[str, int]]:
        return sorted(self.queues)

    def remove_topic(self, topic: str, *, is_deleted: bool = False) -> None:
        self.removed.append(topic)

    def removed_end(self, _topic: str) -> PhysicalOffset:
        return PhysicalOffset(0)

    def retain(self, *, at_any_hour: bool = False) -> None:
        self.cleaned.append(at_any_hour)

    def message_at(self, position: PhysicalOffset) -> memoryview | None:
        record = self.records.get(position)
        return None if record is None else memoryview(record)

    def find_message(self, position: PhysicalOffset) -> Iterator[memoryview | None]:
        yield self.message_at(position)

    def fetch(self, cold: Cold) -> Future[None]:
        raise AssertionError("nothing is cold")


class Parts:
    """Everything that administration touches, wired as in a broker."""

    def __init__(self, directory: Path, *, identity: IdentityConfig = IDENTITY) -> None:
        self.clock = VirtualClock()
        self.topics_file = FakeFile()
        self.groups_file = FakeFile()
        self.offsets_file = FakeFile()
        self.config = BrokerConfig(
            identity=replace(IDENTITY, advertised_host="10.20.30.40"),
            topics=TopicsConfig(trace_topic=True),
            directory=directory,
        )
        self.live = LiveConfig(self.config, self.clock)
        self.topics = Topics(self.config.topics, identity, self.topics_file)
        self.groups = Groups(self.config.groups, self.groups_file)
        self.offsets = Offsets(self.offsets_file)
        self.stats = Stats(identity.cluster, self.clock)
        self.consumers = Consumers()
        self.producers = Producers()
        self.locks = QueueLocks()
        self.members_file = FakeFile()
        self.members = MembershipFile(self.members_file, self.consumers, self.locks, self.clock)
        self.consumer_filters_file = FakeFile()
        self.consumer_filters = ConsumerFilters(self.consumer_filters_file, self.clock)
        self.conflicts = SubscriptionConflicts()
        for listener in (self.consumer_filters, self.conflicts):
            self.consumers.listen(listener.group_changed)
        self.store = FakeStore()
        self.searches = Searches(self.store.fetch)
        self.delays = DelayOffsets()
        self.announced: list[TopicConfig] = []
        self.suspension: RemoteError | None = None
        self.membership = Membership(
            config=self.config.groups,
            consumers=self.consumers,
            producers=self.producers,
            locks=self.locks,
            members=self.members,
            topics=self.topics,
            groups=self.groups,
            consumer_filters=self.consumer_filters,
            conflicts=self.conflicts,
            # Without an event loop, which would coalesce changes.
            notify=lambda group: notify_clients(group, self.membership.to_notify(group)),
            refuse_if_suspended=self.refuse_if_suspended,
            clock=self.clock,
        )
        self.clients = ClientRequests(
            self.membership, SubscriptionFilters(self.live, self.consumers, self.consumer_filters)
        )
        self.info = RuntimeInfo(
            config=self.config,
            stats=self.stats,
            store=cast(Store, self.store),
            searches=self.searches,
            delay_progress=lambda: self.delays,
            clock=self.clock,
        )
        self.router = Router(self._handlers(identity))

    def _handlers(self, identity: IdentityConfig) -> dict[int, Handler]:
        name, store = identity.broker_name, cast(Store, self.store)
        mastership = SimpleNamespace(
            record=RoleRecord(),
            role=identity.role,
            slave_ids="",
            note_slave=lambda slave_id: None,
        )
        operations = Operations(
            identity=identity,
            topics=self.topics,
            groups=self.groups,
            offsets=self.offsets,
            stats=self.stats,
            store=store,
            announce=self._announce,
        )
        parts = (
            self.clients,
            OffsetRequests(Progress(self.offsets, self.topics, self.groups, self.consumers, store)),
            TopicRequests(
                broker_name=name,
                operations=operations,
                topics=self.topics,
                offsets=self.offsets,
                consumers=self.consumers,
                store=store,
                searches=self.searches,
            ),
            GroupRequests(
                operations=operations,
                consumers=self.consumers,
                producers=self.producers,
                conflicts=self.conflicts,
            ),
            ProgressRequests(
                Lag(
                    broker_name=name,
                    address="10.20.30.40:10911",
                    topics=self.topics,
                    groups=self.groups,
                    offsets=self.offsets,
                    consumers=self.consumers,
                    stats=self.stats,
                    store=store,
                    searches=self.searches,
                    clock=self.clock,
                )
            ),
            ResetRequests(
                Resets(
                    broker_name=name,
                    topics=self.topics,
                    offsets=self.offsets,
                    consumers=self.consumers,
                    store=store,
                    searches=self.searches,
                    clock=self.clock,
                )
            ),
            RelayRequests(
                broker_name=name,
                consumers=self.consumers,
                store=store,
                searches=self.searches,
            ),
            SettingRequests(self.live, self.info.all),
            InspectionRequests(
                stats=self.stats,
                consumers=self.consumers,
                store=store,
            ),
            CopiedTables(
                topics=self.topics,
                groups=self.groups,
                offsets=self.offsets,
                consumer_filters=self.consumer_filters,
                delays=lambda: self.delays.encode(),
                delays_for_java=lambda: self.delays.encode(bare_keys=True),
                store=store,
                mastership=cast(Mastership, mastership),
            ),
            FilterServers(FiltersConfig(servers=1), identity, self.clock, lambda addresses: None),
        )
        return {code: handler for part in parts for code, handler in part.handlers().items()}

    def refuse_if_suspended(self) -> None:
        if self.suspension is not None:
            raise self.suspension

    def ask(
        self,
        code: int,
        header: Header | None = None,
        body: Body | bytes = b"",
        peer: FakePeer | None = None,
        **changes: Any,
    ) -> Command:
        """Serve a request and return its answer, errors included."""
        payload = body if isinstance(body, bytes) else body.encode()
        return self.serve(structs.replace(request(code, header, payload), **changes), peer)

    def serve(self, command: Command, peer: FakePeer | None = None) -> Command:
        connection = cast(Connection, peer or FakePeer())
        try:
            outcome = self.router.outcome(command, connection)
            if outcome is None or isinstance(outcome, Command):
                answer = outcome
            else:
                answer = asyncio.run(_awaited(outcome))
        except Exception as error:  # noqa: BLE001 - as a connection does it
            return failure(command, connection, error)
        assert answer is not None
        return answer

    def join(
        self,
        group: str = "g",
        topic: str = "T",
        *,
        model: MessageModel | None = None,
        **changes: Any,
    ) -> FakePeer:
        """Add one more client to a group; ``changes`` apply to its heartbeat."""
        number = len(self.consumers.members(group)) + 1
        peer = FakePeer(f"10.0.0.{number}:1")
        wanted = ConsumerData(
            group_name=group,
            message_model=model,
            subscription_data_set=[Subscription(topic=topic, sub_string="*")],
        )
        beat = Heartbeat(client_id=f"c{number}", consumer_data_set=[wanted])
        self.ask(RequestCode.HEART_BEAT, body=beat, peer=peer, **changes)
        peer.sent.clear()
        return peer

    async def _announce(self, topic: TopicConfig) -> None:
        self.announced.append(topic)


async def _awaited(outcome: Awaitable[Command | None]) -> Command | None:
    return await outcome
