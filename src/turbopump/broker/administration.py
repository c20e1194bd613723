"""The parts that serve clients' membership and operators' requests, wired together."""

from __future__ import annotations

from turbopump.broker.admin import access_control
from turbopump.broker.admin.groups import GroupRequests
from turbopump.broker.admin.inspection import InspectionRequests
from turbopump.broker.admin.progress import ProgressRequests
from turbopump.broker.admin.relays import RelayRequests
from turbopump.broker.admin.resets import ResetRequests
from turbopump.broker.admin.settings import SettingRequests
from turbopump.broker.admin.topics import TopicRequests
from turbopump.broker.handlers.clients import ClientRequests, notify_clients
from turbopump.broker.handlers.common import Requests, handler_table
from turbopump.broker.handlers.copied_tables import CopiedTables
from turbopump.broker.handlers.offsets import OffsetRequests
from turbopump.broker.membership import Membership
from turbopump.broker.message_path import MessagePath
from turbopump.broker.progress import Progress
from turbopump.broker.registration import Registration
from turbopump.broker.replication.mastership import Mastership
from turbopump.broker.runtime_info import RuntimeInfo
from turbopump.broker.state import State
from turbopump.clock import Clock
from turbopump.net.router import Handler
from turbopump.store.store import Store
from turbopump.supervisor import Supervisor


class Administration:
    """Serves clients and operators: heartbeats, locks, offsets, and all requests of tools."""

    def __init__(
        self,
        state: State,
        path: MessagePath,
        store: Store,
        registration: Registration,
        mastership: Mastership,
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
            mastership=mastership,
        )
        self._requests: tuple[Requests, ...] = (
            self.clients,
            self.copied_tables,
            OffsetRequests(self.progress, offsets),
            SettingRequests(state.live, self.runtime_info),
            InspectionRequests(stats=stats, consumers=consumers, store=store),
            *_topics_and_groups(state, store, registration),
            *_progress(state, store, address, clock),
        )

    def handlers(self) -> dict[int, Handler]:
        return access_control.handlers() | handler_table(self._requests)


def _topics_and_groups(
    state: State, store: Store, registration: Registration
) -> tuple[Requests, ...]:
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


def _progress(state: State, store: Store, address: str, clock: Clock) -> tuple[Requests, ...]:
    """Return the handlers that read or change the progress of groups."""
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
