"""Injects the planned faults, and repairs them."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import product
from random import Random
from unittest.mock import patch

from turbopump.broker import durability
from turbopump.broker.jobs import when_done
from turbopump.testing.disk import Disk
from turbopump.testing.loop import virtual_loop
from turbopump.testing.memory_net import LinkQuality
from turbopump.testing.simulate.bit_flips import flip_bits
from turbopump.testing.simulate.broken_work import BrokenWork
from turbopump.testing.simulate.events import (
    ClockJumped,
    Down,
    Event,
    FaultBegan,
    FaultEnded,
    Healed,
)
from turbopump.testing.simulate.false_slave import follow_falsely
from turbopump.testing.simulate.fault_plan import DISK_FAULTS, Fault, FaultKind
from turbopump.testing.simulate.load import Load
from turbopump.testing.simulate.roles import is_ready
from turbopump.testing.simulate.world import OnDeath, World

Ends = tuple[str, ...]
"""A host, or two that are linked."""
Switch = Callable[..., object]
"""Called with a host, or with two that are linked."""

_DOOM_S = 10.0
_FALSE_SLAVE = "false slave of"
_NOWHERE = "nowhere:1"
_MEMBERS_MAX = 4
_PROMOTIONS_MAX = 10
_SETTLE_S = 20.0
"""Longer than a broker takes to change its role."""
_DOWN = {
    FaultKind.KILL_BROKER: Down.KILLED,
    FaultKind.POWER_LOSS: Down.POWER_LOST,
    FaultKind.RESTART_BROKER: Down.STOPPED,
    FaultKind.NEW_DISK: Down.KILLED,
}


class Faults:
    """Injects the faults of a plan."""

    def __init__(self, world: World, load: Load, broken: list[BrokenWork]) -> None:
        self.injected: Counter[str] = Counter()
        """How many faults had an effect, by kind."""
        self._world = world
        self._load = load
        self._broken = broken
        self._calm_quality = world.network.quality
        self._restarting: set[str] = set()
        self._disturbed_disks: Counter[str] = Counter()
        self._happening: list[asyncio.Task[None]] = []
        for producer in load.transacting.values():
            producer.crash_broker = self._crash_soon

    async def run(self) -> None:
        """Inject all faults, and return when none is active."""
        self._happening += [
            asyncio.create_task(self._happen(fault)) for fault in self._world.plan.faults
        ]
        while self._happening:
            # More may start in the meantime.
            begun, self._happening = self._happening, []
            await asyncio.gather(*begun)
        for producer in self._load.transacting.values():
            producer.crash_broker = None
        self._world.heal()
        for name in self._world.plan.machines:
            self._world.calm_disk(name)
        self._world.network.quality = self._calm_quality
        if self._world.plan.replicas.promotes:
            await self._complete_promotions()
        self._note(Healed(self._world.now_us))

    def _crash_soon(self, broker: str, changes: int) -> None:
        """Let a broker die at one of the next changes on its disk: what a commit changes there."""
        fault = Fault(
            0, FaultKind.CRASH_AT_CHANGE, broker, duration_s=1, amount=changes, turns=changes % 2
        )
        self._happening.append(asyncio.create_task(self._happen(fault)))

    async def _happen(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        for _ in range(fault.turns):
            await asyncio.sleep(0)
        happened = await self._effect(fault)(fault)
        if happened:
            self.injected[fault.kind.name.lower().replace("_", " ")] += 1

    def _effect(self, fault: Fault) -> Callable[[Fault], Awaitable[bool]]:
        if fault.kind in _DOWN:
            return self._restart_broker
        if fault.kind in DISK_FAULTS:
            return self._disturb_disk
        effects: dict[FaultKind, Callable[[Fault], Awaitable[bool]]] = {
            FaultKind.RESET: self._reset,
            FaultKind.ISOLATE: self._isolate,
            FaultKind.PARTITION: self._partition,
            FaultKind.LOSE: self._lose,
            FaultKind.SLOW_NETWORK: self._slow_network,
            FaultKind.REFUSE: self._refuse,
            FaultKind.FREEZE: self._freeze,
            FaultKind.KILL_NAMESERVER: self._kill_nameserver,
            FaultKind.NAMESERVER_POWER_LOSS: self._kill_nameserver,
            FaultKind.CRASH_NAMESERVER_AT_CHANGE: self._crash_nameserver_at_change,
            FaultKind.KILL_MEMBER: self._replace_member,
            FaultKind.LEAVE: self._replace_member,
            FaultKind.JOIN: self._join,
            FaultKind.KILL_PRODUCER: self._kill_producer,
            FaultKind.CRASH_AT_CHANGE: self._crash_at_change,
            FaultKind.PROMOTE: self._promote,
            FaultKind.PROMOTE_TWO: self._promote,
            FaultKind.CROWDED_SLAVE: self._crowd_disk,
            FaultKind.LATE_NOTICES: self._delay_notices,
            FaultKind.MUTE_SLAVE: self._follow_falsely,
            FaultKind.LYING_SLAVE: self._follow_falsely,
            FaultKind.FAIL_READS: self._fail_reads,
            FaultKind.FLIP_BITS: self._flip_bits,
            FaultKind.BROKEN_WORK: self._break_work,
            FaultKind.CLOCK_JUMP: self._jump_clock,
            FaultKind.ONE_CLOCK_JUMP: self._jump_clock,
        }
        return effects[fault.kind]

    # --- network ----------------------------------------------------------------------------------

    async def _reset(self, fault: Fault) -> bool:
        count = sum(self._world.network.cut(*host) for host in self._ends(fault))
        self._began(fault, f"({count} connections)")
        return count > 0

    async def _isolate(self, fault: Fault) -> bool:
        network, everyone = self._world.network, self._world.all_hosts()
        pairs = [(*one, other) for one in self._ends(fault) for other in everyone]
        apart = [pair for pair in pairs if pair[0] != pair[1]]
        return await self._last(fault, network.partition, network.join, apart)

    async def _partition(self, fault: Fault) -> bool:
        network = self._world.network
        return await self._last(fault, network.partition, network.join, self._ends(fault))

    async def _lose(self, fault: Fault) -> bool:
        """Lose what one end sends, then reset: TCP delivers no stream with a hole in it."""
        network = self._world.network

        def stop_losing(source: str, target: str) -> None:
            network.stop_losing(source, target)
            network.cut(source, target)

        return await self._last(fault, network.lose, stop_losing, self._ends(fault))

    async def _slow_network(self, fault: Fault) -> bool:
        network = self._world.network
        self._began(fault, f"({fault.amount:g} ms)")
        network.quality = LinkQuality(
            latency=fault.amount / 4000, jitter=fault.amount / 1000, cut_chance=0.1
        )
        await asyncio.sleep(fault.duration_s)
        network.quality = self._calm_quality
        self._ended(fault)
        return True

    async def _refuse(self, fault: Fault) -> bool:
        network = self._world.network

        def refuse(host: str) -> None:
            network.refuse(host)
            network.cut(host)

        return await self._last(fault, refuse, network.accept, self._ends(fault))

    async def _freeze(self, fault: Fault) -> bool:
        network, hosts = self._world.network, self._ends(fault)
        return await self._last(fault, network.stop_reading, network.resume_reading, hosts)

    async def _last(self, fault: Fault, begin: Switch, end: Switch, ends: Sequence[Ends]) -> bool:
        """Disturb hosts, or links between two, for as long as a fault lasts."""
        self._began(fault)
        for each in ends:
            begin(*each)
        await asyncio.sleep(fault.duration_s)
        for each in ends:
            end(*each)
        self._ended(fault)
        return bool(ends)

    def _ends(self, fault: Fault) -> list[Ends]:
        """Return the hosts that a fault hits, or the pairs of hosts at both ends of links."""
        names = (fault.target, fault.other) if fault.other else (fault.target,)
        return list(product(*map(self._world.host_names, names)))

    # --- processes --------------------------------------------------------------------------------

    async def _restart_broker(self, fault: Fault) -> bool:
        name = fault.target
        if name in self._restarting or name not in self._world.brokers:
            return False
        is_new = fault.kind is FaultKind.NEW_DISK
        meanwhile = partial(self._world.replace_disk, name) if is_new else None
        await self._restart(name, _DOWN[fault.kind], fault.duration_s, meanwhile)
        return True

    async def _flip_bits(self, fault: Fault) -> bool:
        """Flip bits while a broker is down: state in memory would hide what is on the disk."""
        name, flipped = fault.target, 0
        if name in self._restarting or name not in self._world.brokers:
            return False

        def flip() -> None:
            nonlocal flipped
            flipped = flip_bits(self._world, name, int(fault.amount))

        self._began(fault)
        how = (Down.KILLED, Down.STOPPED, Down.POWER_LOST)[fault.turns % 3]
        await self._restart(name, how, fault.duration_s, flip)
        return flipped > 0

    async def _promote(self, fault: Fault) -> bool:
        """Promote slaves, as operators do; partial promotions are completed at the end."""
        self._began(fault)
        is_contested = fault.kind is FaultKind.PROMOTE_TWO
        promote = self._world.promote_all if is_contested else self._world.promote
        is_done = await promote(fault.target)
        self._ended(fault)
        return is_done

    async def _follow_falsely(self, fault: Fault) -> bool:
        """Let a peer follow a master that stores nothing of what it gets."""
        world, network = self._world, self._world.network.host(f"{_FALSE_SLAVE} {fault.target}")

        def ha_address() -> str:
            broker = world.brokers.get(world.roles.masters[fault.target])
            return _NOWHERE if broker is None else broker.replication.ha_address or _NOWHERE

        self._began(fault)
        lies = fault.kind is FaultKind.LYING_SLAVE
        follows = asyncio.create_task(follow_falsely(network, ha_address, lies=lies))
        await asyncio.sleep(fault.duration_s)
        follows.cancel()
        await asyncio.wait([follows])
        self._ended(fault)
        return True

    async def _delay_notices(self, fault: Fault) -> bool:
        """Let brokers hear of flushes late, as if their loops were busy: slaves may be faster."""
        self._began(fault, f"({fault.amount:g} ms)")
        delay_s = fault.amount / 1000

        def late(job: Future[None], on_done: Callable[[Future[None]], None]) -> None:
            def later(done: Future[None]) -> None:
                asyncio.get_running_loop().call_later(delay_s, on_done, done)

            when_done(job, later)

        with patch.object(durability, "when_done", late):
            await asyncio.sleep(fault.duration_s)
        self._ended(fault)
        return True

    async def _complete_promotions(self) -> None:
        """Ensure a master for each broker name, as promotions may have failed half way."""
        world = self._world
        for name in world.plan.brokers:
            for _ in range(_PROMOTIONS_MAX):
                await self.restart_failed()
                await asyncio.sleep(_SETTLE_S)
                if world.roles.has_master(name):
                    break
                await world.promote(name)

    async def restart_failed(self) -> None:
        """Restart processes that have ended because they could not change their roles."""
        for name in self._world.failed_machines():
            if name not in self._restarting:
                await self._restart(name, Down.KILLED, 0)

    async def _crash_at_change(self, fault: Fault) -> bool:
        """Let a broker die at one of the next changes on its disk, even while it starts."""
        name, how = fault.target, Down.KILLED if fault.turns in (0, 2) else Down.POWER_LOST
        if not await self._is_struck(fault, partial(self._world.crash_at_disk_change, name, how)):
            return False
        if name in self._world.brokers and name not in self._restarting:
            await self._restart(name, how, fault.duration_s)
        return True

    async def _restart(
        self, name: str, how: Down, down_s: float, meanwhile: Switch | None = None
    ) -> None:
        self._restarting.add(name)
        try:
            await self._world.end_broker(name, how)
            if meanwhile is not None:
                meanwhile()
            await asyncio.sleep(down_s)
            await self._world.begin_broker(name)
        finally:
            self._restarting.discard(name)

    async def _kill_nameserver(self, fault: Fault) -> bool:
        number = int(fault.target.removeprefix("ns"))
        if number in self._world.down_nameservers:
            return False
        loses_power = fault.kind is FaultKind.NAMESERVER_POWER_LOSS
        await self._restart_nameserver(fault, Down.POWER_LOST if loses_power else Down.KILLED)
        return True

    async def _restart_nameserver(self, fault: Fault, how: Down) -> None:
        number = int(fault.target.removeprefix("ns"))
        await self._world.kill_nameserver(number, how)
        await asyncio.sleep(fault.duration_s)
        await self._world.restart_nameserver(number)

    async def _crash_nameserver_at_change(self, fault: Fault) -> bool:
        """Let a name server die at one of the next changes on its disk."""
        world, number = self._world, int(fault.target.removeprefix("ns"))
        if number in world.down_nameservers:
            return False
        if not await self._is_struck(fault, partial(world.crash_nameserver_at_change, number)):
            return False
        if number in world.down_nameservers:
            # Another fault has ended it in the same turn.
            return False
        await self._restart_nameserver(fault, Down.KILLED if fault.turns % 2 else Down.POWER_LOST)
        return True

    async def _is_struck(
        self, fault: Fault, crash_at_change: Callable[[int, OnDeath], None]
    ) -> bool:
        """Wait until a process dies at a change on its disk; False if there are too few changes."""
        if self._world.disk_of(fault.target).on_operation is not None:
            return False
        struck = asyncio.Event()
        self._began(fault, f"({fault.amount:g} changes on)")
        crash_at_change(int(fault.amount), struck.set)
        try:
            async with asyncio.timeout(_DOOM_S):
                await struck.wait()
        except TimeoutError:
            self._world.cancel_crash(fault.target)
            return False
        return True

    async def _replace_member(self, fault: Fault) -> bool:
        """Kill a member, or let it leave; another process replaces it."""
        member = self._load.any_member(fault.target, fault.turns)
        if member is None:
            return False
        is_kill = fault.kind is FaultKind.KILL_MEMBER
        await self._load.remove(member, is_crash=is_kill)
        await asyncio.sleep(fault.duration_s)
        await self._load.add_member(fault.target)
        return True

    async def _join(self, fault: Fault) -> bool:
        if len(self._load.members[fault.target]) >= _MEMBERS_MAX:
            return False
        await self._load.add_member(fault.target)
        return True

    async def _kill_producer(self, fault: Fault) -> bool:
        self._began(fault)
        await self._load.crash_producer(fault.target)
        return True

    async def _break_work(self, fault: Fault) -> bool:
        """Let a piece of background work raise once, as if it had a bug."""
        is_broker = fault.target in self._world.plan.brokers
        work = self._broker_work(fault) if is_broker else self._member_work(fault)
        if work is not None:
            self._began(fault, f"({work.name})")
            self._broken.append(work)
        return work is not None

    def _broker_work(self, fault: Fault) -> BrokenWork | None:
        world, name = self._world, fault.target
        broker = world.brokers.get(name)
        if broker is None or name in world.doomed:
            return None
        owner, method = (
            (broker.path.arrivals, "wake_stale"),
            (broker.store, "retain"),
            (broker.state.offsets.saving, "try_save"),
        )[int(fault.amount)]

        def is_running() -> bool:
            return world.brokers.get(name) is broker and is_ready(broker)

        # Offsets are saved only when there are new ones.
        is_regular = method != "try_save"
        return BrokenWork(owner, method, f"{method} of {name}", is_running, is_regular=is_regular)

    def _member_work(self, fault: Fault) -> BrokenWork | None:
        member = self._load.any_member(fault.target, fault.turns)
        if member is None:
            return None
        members = self._load.members[fault.target]
        name = f"heartbeat of {member.name}"
        return BrokenWork(member.session, "heartbeat", name, lambda: member in members)

    # --- disks and clocks -------------------------------------------------------------------------

    async def _fail_reads(self, fault: Fault) -> bool:
        """Let reads fail for a while, often while the broker starts."""
        name, restart = fault.target, None
        may_restart = name in self._world.brokers and name not in self._restarting

        def again() -> None:
            # The end of the broker repairs the disk. It may last longer than the fault.
            if self._disturbed_disks[name]:
                self._disturb(fault)

        if fault.turns % 2 and may_restart:
            restart = asyncio.create_task(self._restart(name, Down.KILLED, 0, again))
        await self._disturb_disk(fault)
        if restart is not None:
            await restart
        return True

    async def _disturb_disk(self, fault: Fault) -> bool:
        name = fault.target
        self._began(fault, f"({fault.amount:g})" if fault.amount else "")
        self._disturb(fault)
        self._disturbed_disks[name] += 1
        await asyncio.sleep(fault.duration_s)
        self._disturbed_disks[name] -= 1
        if not self._disturbed_disks[name]:
            self._world.calm_disk(name)
        self._ended(fault)
        return True

    async def _crowd_disk(self, fault: Fault) -> bool:
        """Leave no room on a slave's disk, also after restarts, which repair it."""
        name, end_s = fault.target, virtual_loop().time() + fault.duration_s
        self._began(fault, f"({fault.amount:g})")
        self._disturbed_disks[name] += 1
        while virtual_loop().time() < end_s:
            self._world.crowd_disk(name, fault.amount)
            await asyncio.sleep(1)
        self._disturbed_disks[name] -= 1
        if not self._disturbed_disks[name]:
            self._world.calm_disk(name)
        self._ended(fault)
        return True

    def _disturb(self, fault: Fault) -> None:
        disk = self._world.disk_of(fault.target)
        match fault.kind:
            case FaultKind.SLOW_DISK:
                disk.sync_time = int(fault.amount) / 1000
            case FaultKind.STALL_DISK:
                disk.stall()
            case FaultKind.FAIL_SYNCS:
                disk.fail_syncs()
            case FaultKind.FAIL_WRITES:
                disk.fail_writes(errno.ENOSPC)
            case FaultKind.FLAKY_DISK:
                disk.random = self._chance_of(disk)
                disk.chances.write_fails = disk.chances.sync_fails = fault.amount
            case FaultKind.FAIL_READS:
                disk.random = self._chance_of(disk)
                disk.chances.read_fails = fault.amount
            case _:
                self._world.fill_disk(fault.target)

    def _chance_of(self, disk: Disk) -> Random:
        return disk.random or Random(self._world.plan.seed)  # noqa: S311 - the same in every run

    async def _jump_clock(self, fault: Fault) -> bool:
        """Set the clock of one machine, or all of them."""
        by_ms, machine = round(fault.amount * 1000), fault.target
        clock = self._world.machine_clock(machine) if machine else virtual_loop().clock
        clock.jump_wall(by_ms / 1000)
        self._note(ClockJumped(self._world.now_us, by_ms * 1000, machine))
        return True

    # --- recording --------------------------------------------------------------------------------

    def _began(self, fault: Fault, text: str = "") -> None:
        target = f"{fault.target} {fault.other}".strip()
        self._note(FaultBegan(self._world.now_us, fault.kind.value, target, text))

    def _ended(self, fault: Fault) -> None:
        target = f"{fault.target} {fault.other}".strip()
        self._note(FaultEnded(self._world.now_us, fault.kind.value, target))

    def _note(self, event: Event) -> None:
        self._world.history.add(event)
