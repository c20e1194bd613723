"""The parts that serve clients' membership and operators' requests, wired together."""

from __future__ import annotations

from turbopump.broker.admin.groups import GroupRequests
from turbopump.broker.admin.inspection import InspectionRequests
from turbopump.broker.admin.progress import ProgressRequests, ResetRequests
from turbopump.broker.admin.relays import RelayRequests
from turbopump.broker.admin.settings import SettingRequests
from turbopump.broker.admin.topics import TopicRequests
from turbopump.broker.group_notices import GroupNotices
from turbopump.broker.handlers.clients import ClientRequests, notify_clients
from turbopump.broker.handlers.common import Requests, handler_table
from turbopump.broker.handlers.copied_tables import CopiedTables
from turbopump.broker.handlers.offsets import OffsetRequests
from turbopump.broker.lag import Lag
from turbopump.broker.membership import Membership
from turbopump.broker.message_path import MessagePath
from turbopump.broker.operations import Operations
from turbopump.broker.progress import Progress
from turbopump.broker.registration import Registration
from turbopump.broker.replication.mastership import Mastership
from turbopump.broker.resets import Resets
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
        self.notices = GroupNotices(
            path.deadlines,
            lambda group: self.membership.to_notify(group),
            notify_clients,
            lambda: state.live.current.groups.notices_per_s,
        )
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
            notify=self.notices.group_changed,
            refuse_if_suspended=path.writer.refuse_if_suspended,
            clock=clock,
        )
        self.progress = Progress(offsets, topics, groups, consumers, store)
        self.operations = Operations(
            identity=config.identity,
            topics=topics,
            groups=groups,
            offsets=offsets,
            stats=stats,
            store=store,
            announce=registration.announce,
        )
        self.resets = Resets(
            broker_name=config.identity.broker_name,
            topics=topics,
            offsets=offsets,
            consumers=consumers,
            store=store,
            searches=path.searches,
            clock=clock,
        )
        offsets.on_lowered = self.resets.note_lowered
        self.lag = Lag(
            broker_name=config.identity.broker_name,
            address=address,
            topics=topics,
            groups=groups,
            offsets=offsets,
            consumers=consumers,
            stats=stats,
            store=store,
            searches=path.searches,
            clock=clock,
        )
        self.clients = ClientRequests(self.membership, state.filters)
        self.runtime_info = RuntimeInfo(
            config=config,
            stats=stats,
            store=store,
            searches=path.searches,
            delay_progress=lambda: path.delays.progress,
            clock=clock,
            files=state.files,
            load=lambda: path.load,
            put_times=path.writer.put_times,
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
            OffsetRequests(self.progress),
            SettingRequests(state.live, self.runtime_info.all),
            InspectionRequests(stats=stats, consumers=consumers, store=store),
            *self._operator_requests(state, path, store),
        )

    def _operator_requests(
        self, state: State, path: MessagePath, store: Store
    ) -> tuple[Requests, ...]:
        name, consumers = state.live.current.identity.broker_name, state.consumers
        return (
            TopicRequests(
                broker_name=name,
                operations=self.operations,
                topics=state.topics,
                offsets=state.offsets,
                consumers=consumers,
                store=store,
                searches=path.searches,
            ),
            GroupRequests(
                operations=self.operations,
                consumers=consumers,
                producers=state.producers,
                conflicts=state.conflicts,
            ),
            ProgressRequests(self.lag),
            ResetRequests(self.resets),
            RelayRequests(
                broker_name=name, consumers=consumers, store=store, searches=path.searches
            ),
        )

    def handlers(self) -> dict[int, Handler]:
        return handler_table(self._requests)
