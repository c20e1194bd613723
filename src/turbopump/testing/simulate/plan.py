"""What a seed decides: the cluster, its settings, its load, and which faults happen when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from random import Random

from turbopump.testing.simulate.events import Down
from turbopump.testing.simulate.fault_plan import (
    Fault,
    FaultKind,
    in_order,
    planned_fault,
    planned_faults,
)
from turbopump.testing.simulate.machine_plan import (
    MachinePlan,
    planned_disk_faults,
    planned_machine_faults,
)
from turbopump.testing.simulate.replica_plan import ReplicaPlan, planned_replicas
from turbopump.testing.simulate.transaction_plan import TransactionPlan, planned_transactions

PLAIN = "plain"
ORDERED = "ordered"
NEW = "new"
"""In some runs: a topic that its only message creates; operators create the others."""

DELAYS_S = (1, 2, 3, 4, 5, 6, 8, 10)
"""The broker's delay levels, from level 1 on: short, so that retries end within the run."""

CONSUME_TIMEOUT_S = 60
"""After this time, a message still in its listener is sent back; the shortest setting."""


_BURSTS_SHARE = 0.4
"""The share of runs, and of their sends, that may be bursts."""
_BURST_SHARE = 0.3
_BURST_WORK_S = (0.0, 0.0, 0.001, 0.05)

_NEW_TOPIC_SHARE = 0.3
"""The share of runs that have the topic `NEW`, of those with one broker and no batch at first."""
_NEW_TOPIC_QUEUES = 4
"""What clients request, and what a topic recovered from its messages gets."""
_TABLE_CHANGES = 6
"""About as many changes on disk save the table of topics."""


class GroupKind(Enum):
    """How a group consumes."""

    CONCURRENT = "concurrent"
    ORDERLY = "orderly"
    PULL = "pull"


class SendMode(Enum):
    """How a message is sent."""

    PLAIN = "plain"
    ORDERED = "ordered"
    DELAYED = "delayed"
    BATCH = "batch"
    UNFLUSHED = "without waiting for the disk"
    ONE_WAY = "one way"


_BURST_MODES = (SendMode.PLAIN, SendMode.DELAYED)
"""Sends in order wait for each other."""


@dataclass(frozen=True, slots=True)
class Send:
    """One send of a producer, after a pause."""

    pause_s: float
    mode: SendMode
    keys: tuple[str, ...]
    """Those of a batch, otherwise one."""
    size: int
    delay_level: int = 0
    shard: int = 0
    """What a send in order is hashed by."""
    beside: tuple[str, ...] = ()
    """Keys of messages of the same kind that are sent at the same time, each separately."""
    creates_topic: bool = False
    """Whether it is the only message of the topic `NEW`, which it creates."""

    def parts(self) -> tuple[Send, ...]:
        """Return the sends that begin at the same time."""
        return tuple(replace(self, keys=keys, beside=()) for keys in (self.keys, *zip(self.beside)))

    @property
    def topic(self) -> str:
        if self.creates_topic:
            return NEW
        return ORDERED if self.mode is SendMode.ORDERED else PLAIN


class FateKind(Enum):
    """What a group's listener does with a message."""

    SUCCEEDS = "succeeds"
    FAILS = "fails at first"
    RAISES = "raises at first"
    HANGS = "hangs at first"
    ALWAYS_FAILS = "always fails"


@dataclass(frozen=True, slots=True)
class Fate:
    """What happens to a message in a group."""

    kind: FateKind
    work_s: float
    failures: int = 0
    """How often it fails before it succeeds."""

    def fails(self, times: int) -> bool:
        """Whether the listener fails after this number of retries."""
        return self.kind is FateKind.ALWAYS_FAILS or times < self.failures


@dataclass(frozen=True, slots=True)
class Group:
    """A consumer group."""

    name: str
    kind: GroupKind
    topics: tuple[str, ...]
    members: int
    max_attempts: int
    threads: int
    batch_max: int
    fates: Mapping[str, Fate]
    """By the key of the message."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is decided before a run starts."""

    seed: int
    nameservers: int
    brokers: tuple[str, ...]
    """The masters."""
    queues: Mapping[str, int]
    is_sync: bool
    settings: Mapping[str, str]
    latency_ms: float
    jitter_ms: float
    producers: Mapping[str, tuple[Send, ...]]
    groups: tuple[Group, ...]
    faults: tuple[Fault, ...]
    load_s: float
    """How long the load, and with it the faults, last."""
    sync_ms: int
    """How long a disk takes to sync without faults."""
    keeps_some: bool
    """Whether a power loss leaves some sectors of unsynced data, or nothing."""
    last_restart: Down | None
    """How a broker ends in the calm after the load, before it restarts."""
    opens_twice: bool
    """Whether the store of a crashed broker is opened, and abandoned, before it starts."""
    replicas: ReplicaPlan = field(default_factory=ReplicaPlan)
    transactions: TransactionPlan = field(default_factory=TransactionPlan)
    machine: MachinePlan = field(default_factory=MachinePlan)

    @property
    def machines(self) -> tuple[str, ...]:
        """The names of all masters and slaves."""
        return (*self.brokers, *self.replicas.names)

    @property
    def mode(self) -> str:
        return "SYNC_FLUSH" if self.is_sync else "ASYNC_FLUSH"

    def described(self) -> list[str]:
        """Describe the run for users."""
        groups = ", ".join(
            f"{group.name} ({group.kind.value}, {group.members} members, "
            f"{group.max_attempts} retries, topics {'+'.join(group.topics)})"
            for group in self.groups
        )
        counts = {
            name: sum(len(s.keys) + len(s.beside) for s in sends)
            for name, sends in self.producers.items()
        }
        return [
            f"{len(self.brokers)} brokers with {self.mode}, {self.nameservers} name servers",
            *self.replicas.described(),
            *self.transactions.described(),
            f"queues: {dict(self.queues)}",
            f"groups: {groups}",
            f"producers: {', '.join(f'{name} ({count})' for name, count in counts.items())}",
            *(f"fault planned: {fault}" for fault in self.faults),
        ]


def planned(seed: int) -> Plan:
    """Return what a seed decides."""
    chance = Random(seed)  # noqa: S311 - the same in every run
    brokers = ("broker-a", "broker-b")[: chance.choice((1, 1, 2))]
    nameservers = chance.choice((1, 1, 2))
    load_s = chance.uniform(10, 40)
    producers = {
        f"producer-{number}": _sends(chance, f"p{number}", load_s)
        for number in range(chance.choice((1, 2)))
    }
    groups = _groups(chance, [key for sends in producers.values() for s in sends for key in s.keys])
    made = Plan(
        seed=seed,
        nameservers=nameservers,
        brokers=brokers,
        queues={PLAIN: chance.choice((1, 2, 3)), ORDERED: chance.choice((1, 2))},
        is_sync=chance.random() < 0.5,
        settings=_settings(chance),
        latency_ms=chance.choice((0.2, 0.2, 1, 5)),
        jitter_ms=chance.choice((0, 0.1, 2, 10)),
        producers=producers,
        groups=groups,
        faults=planned_faults(
            chance, brokers, nameservers, {group.name: group.members for group in groups},
            tuple(producers), load_s,
        ),
        load_s=load_s,
        sync_ms=chance.choice((0, 0, 0, 0, 0, 1, 8)),
        keeps_some=chance.random() < 0.7,
        last_restart=chance.choice((None, None, Down.STOPPED, Down.KILLED, Down.POWER_LOST)),
        opens_twice=chance.random() < 0.3,
    )  # fmt: skip
    made = _with_bursts(_with_machine_faults(_with_transactions(_with_replicas(made))))
    return _with_new_topic(made)


def _with_replicas(plan: Plan) -> Plan:
    """Add the slaves that the seed decides on, with their faults and settings."""
    found = planned_replicas(plan.seed, plan.brokers, plan.load_s, is_calm=not plan.faults)
    faults = (*plan.faults, *found.faults)
    if found.promotes:
        # Consumers find what two masters have in common by times, and clocks have to agree. And no
        # operator promotes a slave that has just got a new disk: it has neither log nor topics. A
        # master without room would delete messages that no group has consumed.
        left_out = (FaultKind.CLOCK_JUMP, FaultKind.NEW_DISK, FaultKind.CROWDED_SLAVE)
        faults = tuple(fault for fault in faults if fault.kind not in left_out)
    if any(fault.kind is FaultKind.CROWDED_SLAVE for fault in faults):
        plan = _with_small_files(plan)
    nameservers = found.nameservers or plan.nameservers
    missing = {f"ns{number}" for number in range(nameservers, plan.nameservers)}
    faults = tuple(fault for fault in faults if missing.isdisjoint((fault.target, fault.other)))
    return replace(
        plan,
        replicas=found,
        nameservers=nameservers,
        settings={**plan.settings, **found.settings},
        faults=in_order(faults),
    )


def _with_small_files(plan: Plan) -> Plan:
    """Let messages fill several files of the log: only whole ones can be deleted.

    For that, `_with_bursts` adds more of them.
    """
    smallest = {"mappedFileSizeCommitLog": "73728", "maxMessageSize": "4096"}
    producers = {
        # Larger ones are compressed.
        name: tuple(replace(send, size=4000) for send in sends)
        for name, sends in plan.producers.items()
    }
    return replace(plan, settings={**plan.settings, **smallest}, producers=producers)


def _with_transactions(plan: Plan) -> Plan:
    """Add the transactions that the seed decides on, where no slave is promoted."""
    if plan.replicas.promotes:
        return plan
    found = planned_transactions(plan.seed, plan.brokers, plan.load_s, is_calm=not plan.faults)
    fates = dict.fromkeys(found.keys, Fate(FateKind.SUCCEEDS, 0.001))
    return replace(
        plan,
        transactions=found,
        settings={**plan.settings, **found.settings},
        groups=tuple(replace(each, fates={**each.fates, **fates}) for each in plan.groups),
        faults=in_order((*plan.faults, *found.faults)),
    )


def _with_machine_faults(plan: Plan) -> Plan:
    """Add the faults of machines, their clocks and their disks that the seed decides on."""
    if not plan.faults:
        return plan
    machines = planned_machine_faults(plan.seed, plan.nameservers, plan.brokers, plan.load_s)
    disks = planned_disk_faults(plan.seed, plan.nameservers, plan.machines, plan.load_s)
    left_out = set()
    if plan.replicas.promotes:
        # Clocks have to agree where slaves are promoted.
        left_out.add(FaultKind.ONE_CLOCK_JUMP)
    if plan.replicas.names:
        # The logs of replicas have to agree, and no log gets its damaged bytes from another one.
        left_out.add(FaultKind.FLIP_BITS)
    found = [each for each in (*machines.faults, *disks.faults) if each.kind not in left_out]
    return replace(
        plan,
        machine=MachinePlan(values=machines.values or disks.values),
        faults=in_order((*plan.faults, *found)),
    )


def _with_bursts(plan: Plan) -> Plan:
    """Let producers send several messages concurrently, in the runs that the seed decides on.

    They arrive in one chunk if they are for the same broker, and are stored with one write. They
    draw from their own random numbers, so that everything else stays the same.
    """
    chance = Random(f"bursts of {plan.seed}")  # noqa: S311 - the same in every run
    fills_files = any(fault.kind is FaultKind.CROWDED_SLAVE for fault in plan.faults)
    if chance.random() >= _BURSTS_SHARE and not fills_files:
        return plan
    share = 1.0 if fills_files else _BURST_SHARE
    producers = {
        name: tuple(
            replace(send, beside=_beside(chance, send.keys[0]))
            if send.mode in _BURST_MODES and chance.random() < share
            else send
            for send in sends
        )
        for name, sends in plan.producers.items()
    }
    keys = [key for sends in producers.values() for send in sends for key in send.beside]
    groups = tuple(
        replace(
            group,
            fates={
                **group.fates,
                **{key: Fate(FateKind.SUCCEEDS, chance.choice(_BURST_WORK_S)) for key in keys},
            },
        )
        for group in plan.groups
    )
    return replace(plan, producers=producers, groups=groups)


def _with_new_topic(plan: Plan) -> Plan:
    """Let one message, often a delayed one, create its own topic, and crash the broker soon.

    In the runs that the seed decides on, with their own random numbers.
    """
    chance = Random(f"new topic of {plan.seed}")  # noqa: S311 - the same in every run
    name, (first, *rest) = next(iter(plan.producers.items()))
    if len(plan.brokers) > 1 or len(first.keys) > 1 or chance.random() >= _NEW_TOPIC_SHARE:
        return plan
    level = chance.randint(0, len(DELAYS_S))
    mode = SendMode.DELAYED if level else SendMode.PLAIN
    first = replace(first, mode=mode, delay_level=level, creates_topic=True, beside=())
    crash = planned_fault(chance, FaultKind.CRASH_AT_CHANGE, plan.brokers[0], "", plan.load_s)
    crash = replace(crash, at_s=first.pause_s, amount=chance.randint(1, _TABLE_CHANGES))
    return replace(
        plan,
        queues={**plan.queues, NEW: _NEW_TOPIC_QUEUES},
        producers={**plan.producers, name: (first, *rest)},
        groups=tuple(
            replace(group, topics=(*group.topics, NEW)) if PLAIN in group.topics else group
            for group in plan.groups
        ),
        faults=in_order((*plan.faults, crash)) if plan.faults else (),
    )


def _beside(chance: Random, key: str) -> tuple[str, ...]:
    return tuple(f"{key}.{number}" for number in range(1, chance.randint(3, 8)))


def _settings(chance: Random) -> dict[str, str]:
    return {
        "messageDelayLevel": " ".join(f"{delay}s" for delay in DELAYS_S),
        "maxMessageSize": "8192",
        "mappedFileSizeCommitLog": str(chance.choice((96 * 1024, 128 * 1024, 1024 * 1024))),
        "mappedFileSizeConsumeQueue": str(20 * chance.choice((20, 100, 1000))),
        "messageIndexEnable": chance.choice(("true", "false")),
        "flushDelayOffsetInterval": str(chance.choice((1000, 10_000))),
    }


def _sends(chance: Random, prefix: str, load_s: float) -> tuple[Send, ...]:
    count = chance.randint(6, 20)
    sends, number = [], 0
    modes = chance.choices(
        list(SendMode), weights=(10, 8, chance.choice((0, 3)), 2, chance.choice((0, 1)), 1), k=count
    )
    for mode in modes:
        size = chance.randint(2, 4) if mode is SendMode.BATCH else 1
        keys = tuple(f"{prefix}-{number + at}" for at in range(size))
        number += size
        sends.append(
            Send(
                pause_s=chance.expovariate(count / load_s),
                mode=mode,
                keys=keys,
                size=chance.choice((20, 1500, 3000, 3000)),
                delay_level=chance.randint(1, 6) if mode is SendMode.DELAYED else 0,
                shard=chance.randrange(4),
            )
        )
    return tuple(sends)


def _groups(chance: Random, keys: list[str]) -> tuple[Group, ...]:
    kinds = list(GroupKind)
    chance.shuffle(kinds)
    kinds = [*kinds[: chance.choice((1, 1, 2))], GroupKind.CONCURRENT]
    return tuple(
        _group(chance, f"group-{number}", kind, keys) for number, kind in enumerate(kinds[:3])
    )


def _group(chance: Random, name: str, kind: GroupKind, keys: list[str]) -> Group:
    max_attempts = chance.choice((1, 2, 3))
    is_orderly = kind is GroupKind.ORDERLY
    topics = (ORDERED,) if is_orderly and chance.random() < 0.6 else (PLAIN, ORDERED)
    hangs = chance.random() < 0.15 and kind is GroupKind.CONCURRENT
    # Pull consumers of this kind have no retries: whoever polls handles failures itself.
    failing = 0.0 if kind is GroupKind.PULL else chance.choice((0.0, 0.1, 0.25))
    return Group(
        name=name,
        kind=kind,
        topics=topics,
        members=chance.choice((1, 1, 2, 2, 3)),
        max_attempts=max_attempts,
        threads=chance.choice((1, 2, 20)),
        # A call fails or succeeds as a whole, so failing messages are not passed with others.
        batch_max=1 if failing or hangs else chance.choice((1, 4)),
        fates={key: _fate(chance, failing, max_attempts, hangs=hangs) for key in keys},
    )


def _fate(chance: Random, failing: float, max_attempts: int, *, hangs: bool) -> Fate:
    work_s = chance.choice((0.0, 0.0, 0.001, 0.05, 0.5, 2.0))
    if chance.random() >= failing:
        if hangs and chance.random() < 0.05:
            return Fate(FateKind.HANGS, chance.uniform(5, CONSUME_TIMEOUT_S + 20))
        return Fate(FateKind.SUCCEEDS, work_s)
    kind = chance.choice((FateKind.FAILS, FateKind.RAISES, FateKind.ALWAYS_FAILS))
    failures = 0 if kind is FateKind.ALWAYS_FAILS else chance.randint(1, max_attempts)
    return Fate(kind, work_s, failures)
