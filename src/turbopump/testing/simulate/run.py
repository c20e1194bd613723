"""Runs one seed: load under faults, healing, draining, a final check of everything."""

from __future__ import annotations

import asyncio
import gc
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from turbopump.broker.broker import Broker
from turbopump.broker.transactions.half import QUEUE_ID
from turbopump.broker.transactions.transactions import PROGRESS_GROUP
from turbopump.client.session import Session
from turbopump.testing import cluster_state
from turbopump.testing.loop import Deadlock, VirtualTimeLoop, virtual_loop
from turbopump.testing.simulate.broken_work import BrokenWork
from turbopump.testing.simulate.checks import all_checks
from turbopump.testing.simulate.checks.duplicates import BoundedDuplicates
from turbopump.testing.simulate.checks.outcomes import EveryMessageEnds
from turbopump.testing.simulate.checks.promptness import PROMPT_US, DeliveredPromptly
from turbopump.testing.simulate.checks.transactions import TransactionsEnd
from turbopump.testing.simulate.error_log import capture_errors, is_bug
from turbopump.testing.simulate.events import (
    US_PER_S,
    Calm,
    Down,
    Ended,
    TransactionsLeft,
    Unexpected,
)
from turbopump.testing.simulate.faults import Faults
from turbopump.testing.simulate.history import History, Violation
from turbopump.testing.simulate.key_values import read_key_values, store_key_values
from turbopump.testing.simulate.ledger import Ledger
from turbopump.testing.simulate.load import Load
from turbopump.testing.simulate.observer import Observer
from turbopump.testing.simulate.plan import NEW, GroupKind, Plan, Send, SendMode, planned
from turbopump.testing.simulate.replica_plan import Slave
from turbopump.testing.simulate.store_contents import open_transactions
from turbopump.testing.simulate.transacting_producers import resume_given_up
from turbopump.testing.simulate.world import World
from turbopump.testing.stack_dump import where
from turbopump.testing.waiting import until
from turbopump.wire.names import HALF_TOPIC

REAL_LIMIT_S = 120.0
_DRAIN_S = 600.0
"""Longer than all timeouts and retries of a run together."""
_SETTLE_S = 60.0
"""After this time without faults, every client and server has recovered."""

_RESUME_EVERY_S = 20.0
"""Longer than all checks of a transaction that is abandoned after two."""
_IDLE_S = 3.0
_ARRIVED_S = 10.0
"""No message is in flight for longer, not even over slow links."""
_SAVED_S = 12.0
_RECONNECTED_S = 40.0
"""More than the 35 s for which a restarted broker expects its earlier members."""


@dataclass(slots=True)
class Outcome:
    """The result of a run."""

    seed: int
    violations: list[Violation]
    digest: str
    virtual_s: float
    faults: Counter[str]
    counts: Counter[str]
    """Of messages and transactions, by outcome."""
    processor_s: float = 0.0
    history: list[str] = field(default_factory=list)


def simulate(seed: int, *, keeps_history: bool = False) -> Outcome:
    """Run a seed; the history is returned if requested, or if a check fails."""
    plan = planned(seed)
    run = _Run(plan)
    start_s = time.process_time()
    with _garbage_kept():
        run.execute()
    outcome = run.outcome()
    outcome.processor_s = time.process_time() - start_s
    if keeps_history or outcome.violations:
        outcome.history = [*plan.described(), *run.history.lines()]
    return outcome


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Collect garbage only when the run requests it, and only its own."""
    was_enabled, is_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        if not is_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


class _Run:
    """One run of a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._ledger = Ledger(plan)
        checks = all_checks(self._ledger)
        self.history = History(checks)
        self._ends = next(check for check in checks if isinstance(check, EveryMessageEnds))
        self._prompt = next(check for check in checks if isinstance(check, DeliveredPromptly))
        self._twice = next(check for check in checks if isinstance(check, BoundedDuplicates))
        self._transactions = next(check for check in checks if isinstance(check, TransactionsEnd))
        self._faults: Counter[str] = Counter()
        self._broken: list[BrokenWork] = []
        self._made: list[weakref.ref[Broker | Session]] = []
        self._virtual_s = 0.0

    def execute(self) -> None:
        """Run to the end, or to the first violation."""
        self._loop = loop = VirtualTimeLoop(self.plan.seed)
        loop.limit_real_time(REAL_LIMIT_S)
        # Even while the loop is closed, which ends what a violation has left running.
        with capture_errors(self._heard) as hear:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                hear(runner.get_loop())
                try:
                    runner.run(self._until_violation())
                except Deadlock as deadlock:
                    self._unexpected(f"no end: {deadlock}")
                self._virtual_s = loop.time()
            # Tasks that failed unnoticed report it when they are collected.
            self._broken.clear()
            gc.collect()
            if not self.history.violations:
                self._look_for_leaks()
            self.history.is_closed = True

    def _look_for_leaks(self) -> None:
        """Report brokers and clients that are still in memory after their end."""
        left = [made for made in (ref() for ref in self._made) if made is not None]
        if left:
            self._unexpected(f"in memory after the end: {left}")

    def _heard(self, text: str, error: BaseException | None) -> None:
        for work in self._broken:
            work.heard(error)
        if is_bug(text, error) and not self._ledger.knows_damage(text):
            self._unexpected(f"{text}: {error!r}")

    def outcome(self) -> Outcome:
        ledger = self._ledger
        counts = Counter(
            sent=len(ledger.sends),
            acknowledged=len(ledger.acknowledged),
            deliveries=sum(map(len, ledger.succeeded.values())),
            stored_twice=self._twice.stored_twice,
            consumed_twice=self._twice.consumed_twice,
            dead_letters=sum(len(ledger.dead_letters(name)) for name in ledger.groups),
            committed=self._transactions.committed,
            rolled_back=self._transactions.rolled_back,
        )
        history = self.history
        return Outcome(
            self.plan.seed,
            history.violations,
            history.digest(),
            self._virtual_s,
            self._faults,
            counts,
        )

    async def _until_violation(self) -> None:
        violated = asyncio.Event()
        self.history.on_violation = violated.set
        work = asyncio.create_task(self._work())
        watch = asyncio.create_task(violated.wait())
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        watch.cancel()
        if not work.done():
            self.history.is_closed = True
            work.cancel()
            await asyncio.wait({work}, timeout=60)
        elif (error := work.exception()) is not None:
            self._unexpected(f"the run ended with {_located(error)}")

    async def _work(self) -> None:
        world = World(self.plan, self.history)
        self._made = world.made
        loop, before = virtual_loop(), asyncio.all_tasks()
        async with world:
            observer = Observer(world)
            with loop.watched(partial(self._look, observer)):
                await self._serve(world, observer)
            for name in tuple(world.brokers):
                await world.end_broker(name, Down.STOPPED)
                world.open_twice(name)
        await asyncio.sleep(_ARRIVED_S)
        self._look_for_rest(world, before)
        self.history.add(Ended(world.now_us))

    def _look(self, observer: Observer) -> bool:
        try:
            return observer.look()
        except Exception as error:  # noqa: BLE001 - fails this seed, not all that follow it
            self._unexpected(f"looking at the brokers failed with {_located(error)}")
            return False

    async def _serve(self, world: World, observer: Observer) -> None:
        for topic, queues in self.plan.queues.items():
            if topic != NEW:
                await world.make_topic(topic, queues=queues)
        load = Load(world, observer)
        await load.start()
        faults = Faults(world, load, self._broken)
        self._faults = faults.injected
        await asyncio.gather(load.send_all(), faults.run(), store_key_values(world))
        if self.plan.replicas.promotes:
            await self._settle_roles(world, faults)
        healed_s = virtual_loop().time()
        await self._end_transactions(world)
        await self._drain(world)
        await asyncio.sleep(max(0.0, healed_s + _SETTLE_S - virtual_loop().time()))
        await self._settle(load)
        await self._catch_up(world)
        for left in _transactions_left(world):
            self.history.add(left)
        self.history.add(Calm(world.now_us))
        await read_key_values(world)
        await self._probe(load, 0)
        if self.plan.last_restart is not None:
            await self._restart_in_calm(world, self.plan.last_restart)
            await self._probe(load, 1)
        now_s = self._loop.time()
        for text in [text for work in self._broken for text in work.violations(now_s)]:
            self._unexpected(text)
        await load.close()
        await self._catch_up(world)
        observer.replicas.compare_all()

    async def _settle_roles(self, world: World, faults: Faults) -> None:
        """Wait until each broker name has one master, and all others follow it."""
        try:
            async with asyncio.timeout(_DRAIN_S):
                while not world.roles.are_settled():
                    await faults.restart_failed()
                    await asyncio.sleep(1)
        except TimeoutError:
            roles = {
                name: (made.config.identity.role.value, made.replica.roles.epoch)
                for name, made in world.brokers.items()
            }
            self._unexpected(f"no settled roles {_DRAIN_S:g} s after the faults: {roles}")

    async def _end_transactions(self, world: World) -> None:
        """Wait until all transactions have ended; `Calm` reports those that have not."""
        deadline_s = self._loop.time() + _DRAIN_S
        while (
            any(left.keys for left in _transactions_left(world)) or self._transactions.invisible()
        ):
            if self._loop.time() > deadline_s:
                return
            await resume_given_up(world)
            await asyncio.sleep(_RESUME_EVERY_S)

    async def _restart_in_calm(self, world: World, how: Down) -> None:
        """Restart a broker when nothing else happens: no member may notice."""
        # Until the latest offsets are saved, and until missing members are dropped.
        await asyncio.sleep(_SAVED_S)
        name = world.roles.masters[self.plan.brokers[-1]]
        await world.end_broker(name, how)
        await world.begin_broker(name)
        await asyncio.sleep(_RECONNECTED_S)

    async def _drain(self, world: World) -> None:
        """Wait until every group has consumed everything; `Calm` reports what is missing."""
        try:
            await until(lambda: self._is_drained(world), _DRAIN_S, pause_s=1)
        except AssertionError:
            self.history.add(Calm(world.now_us))
            if not self.history.violations:
                lines = cluster_state.summary(world.brokers.values())
                self._unexpected(f"not committed {_DRAIN_S:g} s after the faults: {lines}")

    async def _catch_up(self, world: World) -> None:
        """Wait until all slaves have what their masters have."""
        for slave in world.slaves:
            if not self.plan.is_sync and _is_refused(world, slave):
                # Its master has lost everything they had in common: do what the error asks for.
                await world.end_broker(slave.name, Down.STOPPED)
                world.replace_disk(slave.name)
                await world.begin_broker(slave.name)
        slaves = world.slaves
        try:
            await until(lambda: all(map(world.is_copied, slaves)), _DRAIN_S, pause_s=1)
        except AssertionError:
            late = [slave.name for slave in slaves if not world.is_copied(slave)]
            links = [world.broker(name).replication.master_link for name in late]
            self._unexpected(f"not in sync {_DRAIN_S:g} s after everything was consumed: {links}")

    async def _settle(self, load: Load) -> None:
        """Wait until no member is busy and every queue has one owner in each group."""
        # Duplicates may keep members busy, and locks of dead members may orphan queues.
        try:
            await until(lambda: self._is_idle and load.owns_everything, _DRAIN_S, pause_s=1)
        except AssertionError:
            what = "members are busy" if load.owns_everything else "queues do not have one owner"
            self._unexpected(f"{what} {_DRAIN_S:g} s after everything was consumed")
        # A queue that has just got its owner does not get it from the restart that may follow.
        load.note_assignments()

    def _is_drained(self, world: World) -> bool:
        if any(True for _ in self._ends.missing()) or any(True for _ in self._ends.unfinished()):
            return False
        brokers = list(world.masters.values())
        # Consumers that commit manually do not commit again what a crash of the broker has lost.
        pushed = [group.name for group in self.plan.groups if group.kind is not GroupKind.PULL]
        return not any(cluster_state.lag(brokers, name) for name in pushed)

    @property
    def _is_idle(self) -> bool:
        idle_s = self._loop.time() - self._ledger.consumed_us / US_PER_S
        return not self._ledger.running and idle_s > _IDLE_S

    async def _probe(self, load: Load, part: int) -> None:
        """Send a few more messages, which must be delivered immediately."""
        sender = next(iter(load.senders.values()))
        for number, mode in enumerate(
            (SendMode.PLAIN, SendMode.ORDERED, SendMode.PLAIN, SendMode.ORDERED)
        ):
            key = f"probe-{part}-{number}"
            await sender.send(Send(0, mode, (key,), 20, shard=number))
        # Those that do not arrive in time are reported at the end.
        with suppress(AssertionError):
            await until(lambda: not self._prompt.waiting, 2 * PROMPT_US / US_PER_S)

    def _look_for_rest(self, world: World, before: set[asyncio.Task[object]]) -> None:
        """Report what outlives its owner."""
        tasks = sorted(where(task) for task in asyncio.all_tasks() - before)
        if tasks:
            self._unexpected(f"{len(tasks)} tasks left over: {'; '.join(tasks)}")
        timers = self._loop.timers_pending
        if timers:
            self._unexpected(f"{timers} timers left over")
        if world.network.open_connections:
            self._unexpected(f"{world.network.open_connections} connections left open")
        files = world.open_nameserver_files()
        if files:
            self._unexpected(f"name servers have stopped and left files open: {files}")

    def _unexpected(self, text: str) -> None:
        self.history.add(Unexpected(round(self._loop.time() * 1e6), text))


def _located(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{error!r} at {place.filename}:{place.lineno}"


def _transactions_left(world: World) -> Iterator[TransactionsLeft]:
    for name, broker in world.masters.items():
        found = open_transactions(broker.store)
        if found:
            progress = broker.state.offsets.find(PROGRESS_GROUP, HALF_TOPIC, QUEUE_ID) or 0
            keys = tuple(key for offset, key in found if offset >= progress)
            passed = tuple(key for offset, key in found if offset < progress)
            yield TransactionsLeft(world.now_us, name, keys, passed)


def _is_refused(world: World, slave: Slave) -> bool:
    """Whether a slave does not follow because its log has nothing in common with the master's."""
    link = world.broker(slave.name).replication.master_link
    return link is not None and "no message in common" in link.last_error
