"""The parts that a message passes through, wired together; `broker` runs them."""

from __future__ import annotations

from random import Random

from turbopump.broker.arrivals import Arrivals
from turbopump.broker.config import Role
from turbopump.broker.delays import Delays
from turbopump.broker.durability import Durability
from turbopump.broker.handlers.common import Requests, handler_table
from turbopump.broker.handlers.pull import PullRequests
from turbopump.broker.handlers.queries import QueryRequests, QueueEndsRequests
from turbopump.broker.handlers.reply import ReplyRequests, push_reply
from turbopump.broker.handlers.send import SendBackRequests, SendRequests
from turbopump.broker.handlers.transactions import TransactionRequests, ask_producer
from turbopump.broker.message_writer import MessageWriter
from turbopump.broker.pull import Pulls
from turbopump.broker.queueing_delay import QueueingDelay
from turbopump.broker.replication.master import Slaves
from turbopump.broker.replies import Replies
from turbopump.broker.retries import Retries
from turbopump.broker.runtime_info import Load
from turbopump.broker.searches import Searches
from turbopump.broker.send import Sends
from turbopump.broker.state import State
from turbopump.broker.transactions.checks import Checks
from turbopump.broker.transactions.transactions import Transactions
from turbopump.clock import Clock
from turbopump.core import TypedFrame
from turbopump.net.deadlines import Deadlines
from turbopump.net.router import FrameHandler, Handler
from turbopump.store.store import Store
from turbopump.supervisor import Supervisor
from turbopump.wire.hosts import Host


class MessagePath:
    """Accepts, stores, delivers, retries and delays messages."""

    def __init__(
        self,
        state: State,
        store: Store,
        store_host: Host,
        clock: Clock,
        chance: Random,
        work: Supervisor,
        slaves: Slaves,
    ) -> None:
        config = state.live.current
        self._store, self._clock, self._store_host, self._chance = store, clock, store_host, chance
        self.deadlines = Deadlines(clock)
        self.queueing_delay = QueueingDelay(clock)
        self.searches = Searches(store.fetch)
        self.arrivals = Arrivals(clock, config.long_polling)
        replicas = slaves if config.identity.role is Role.SYNC_MASTER else None
        self.durability = Durability(store, self.deadlines, config.overload, replicas)
        levels = config.store.delay_levels
        is_slave = config.identity.is_slave
        self.writer = MessageWriter(store, self.durability, len(levels), clock, is_slave=is_slave)
        progress = state.file("delayOffset.json")
        self.delays = Delays(store, self.writer, progress, levels, state.topics, clock, work)
        self._add_transactions(state, work)
        self._add_sends(state)
        self._add_pulls(state)
        self._requests: tuple[Requests, ...] = (
            SendRequests(config=state.live, store_host=store_host, sends=self.sends, clock=clock),
            PullRequests(self.pulls),
            SendBackRequests(self.retries),
            ReplyRequests(state.live, store_host, self.replies),
            QueryRequests(state.live, store, self.searches),
            QueueEndsRequests(state.topics, store, self.pulls, self.arrivals),
            TransactionRequests(config.identity, self.transactions),
        )

    def _add_transactions(self, state: State, work: Supervisor) -> None:
        self.transactions = Transactions(
            store=self._store,
            writer=self.writer,
            topics=state.topics,
            offsets=state.offsets,
            store_host=self._store_host,
            clock=self._clock,
            watch=work.watch("transaction operations"),
            searches=self.searches,
        )
        self.checks = Checks(
            config=state.live,
            transactions=self.transactions,
            writer=self.writer,
            topics=state.topics,
            producers=state.producers,
            ask=ask_producer,
            clock=self._clock,
        )

    def _add_sends(self, state: State) -> None:
        self.sends = Sends(
            config=state.live,
            store_host=self._store_host,
            writer=self.writer,
            queueing_delay=self.queueing_delay,
            topics=state.topics,
            groups=state.groups,
            stats=state.stats,
            clock=self._clock,
            chance=self._chance,
        )
        self.replies = Replies(
            store_host=self._store_host,
            sends=self.sends,
            writer=self.writer,
            producers=state.producers,
            push=push_reply,
            clock=self._clock,
        )

    def _add_pulls(self, state: State) -> None:
        self.pulls = Pulls(
            config=state.live,
            store_host=self._store_host,
            store=self._store,
            writer=self.writer,
            arrivals=self.arrivals,
            topics=state.topics,
            groups=state.groups,
            consumers=state.consumers,
            filters=state.filters,
            offsets=state.offsets,
            stats=state.stats,
            clock=self._clock,
        )
        self.retries = Retries(
            config=state.live,
            store=self._store,
            writer=self.writer,
            topics=state.topics,
            groups=state.groups,
            stats=state.stats,
            chance=self._chance,
            searches=self.searches,
        )

    @property
    def load(self) -> Load:
        """Sends and pulls that are waiting now."""
        return Load(
            sends_waiting=len(self.durability),
            send_wait_ms=self.queueing_delay.wait_ms,
            pulls_held=len(self.arrivals),
            pulls_refused=self.arrivals.refused,
        )

    def settle(self) -> None:
        """Append the gathered messages; call it after each chunk of requests."""
        self.writer.settle()
        self.queueing_delay.note_served()

    def handlers(self) -> dict[int, Handler]:
        return handler_table(self._requests)

    def frame_handlers(self) -> dict[type[TypedFrame], FrameHandler]:
        """Return the handlers of the most frequent requests, whose headers the core reads."""
        served = [requests.frame_handlers() for requests in self._requests]
        return {kind: serve for handlers in served for kind, serve in handlers.items()}
