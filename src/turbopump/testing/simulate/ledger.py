"""Shared by the checks: what was sent, what is stored, what was consumed, what was lost.

It judges nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from turbopump.message import MessageQueue
from turbopump.testing.simulate.events import (
    US_PER_S,
    Acknowledged,
    BitFlipped,
    BrokerDown,
    BrokerUp,
    ClockJumped,
    ConsumeBegan,
    ConsumeEnded,
    Down,
    FaultBegan,
    FaultEnded,
    Joined,
    Left,
    Readable,
    ReplicaHolds,
    Replicated,
    Result,
    SendBegan,
    StaleWrite,
    Stored,
)
from turbopump.testing.simulate.fault_plan import DISK_FAULTS, FaultKind
from turbopump.testing.simulate.history import Follower, on
from turbopump.testing.simulate.plan import Group, GroupKind, Plan
from turbopump.wire.names import (
    CHECKED_TOO_OFTEN_TOPIC,
    DEAD_LETTER_PREFIX,
    HALF_TOPIC,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
)

UNFLUSHED_US = 11 * US_PER_S
"""How much may be lost in a power loss in asynchronous mode: 10 s, and the flush itself."""

_SKEW_US = 60 * US_PER_S
"""How far the clocks of brokers may differ for consumers to find what replaces a loss."""

_OWN_OF_BROKERS = frozenset({SCHEDULE_TOPIC, HALF_TOPIC, CHECKED_TOO_OFTEN_TOPIC})

_DISK_FAULTS = frozenset(kind.value for kind in DISK_FAULTS)
_CUTS = frozenset(kind.value for kind in (FaultKind.ISOLATE, FaultKind.PARTITION, FaultKind.FREEZE))
"""Faults that delay what was sent until they end."""
_NO_END_US = 1 << 62
_IN_FLIGHT_US = 10 * US_PER_S
"""No message is in flight for longer, not even over slow links."""


@dataclass(slots=True)
class Attempts:
    """What a group has done with one message of one queue."""

    begun_us: dict[tuple[str, int], int] = field(default_factory=dict)
    """Calls that run, by member and number."""
    results: set[tuple[Result, int]] = field(default_factory=set)
    """How calls ended, and the number of earlier retries of the message."""

    def is_done(self, group: Group) -> bool:
        """Whether the group may commit an offset beyond this message, according to its calls."""
        if any(result is Result.SUCCESS for result, _ in self.results):
            return True
        failures = [times for result, times in self.results if result is Result.FAILURE]
        if group.kind is GroupKind.ORDERLY:
            # Not sent back before its retries are exhausted, as that would change the order.
            return any(times >= group.max_attempts for times in failures)
        return bool(failures)


Place = tuple[str, MessageQueue]
"""A queue as one group sees it."""


class Ledger(Follower):
    """Follows a history."""

    name = "ledger"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.groups = {group.name: group for group in plan.groups}
        self.sends: dict[str, SendBegan] = {}
        self.acknowledged: dict[str, Acknowledged] = {}
        self.stored: defaultdict[MessageQueue, dict[int, Stored]] = defaultdict(dict)
        """What can be read now, or could be when the broker last ran."""
        self.stored_us: dict[tuple[MessageQueue, int], int] = {}
        self.doubtful: defaultdict[MessageQueue, set[int]] = defaultdict(set)
        """Offsets that the last start may have found lost, and whose messages were stored again."""
        self._attempts: defaultdict[Place, defaultdict[tuple[int, str | None], Attempts]] = (
            defaultdict(lambda: defaultdict(Attempts))
        )
        """By offset and key: one lost in a power loss leaves its offset to another."""
        self.running = 0
        """How many calls of listeners run, counted by message."""
        self.consumed_us = 0
        """When the last of them ended."""
        self.succeeded: defaultdict[str, set[str]] = defaultdict(set)
        """Keys by group."""
        self.downs: dict[str, BrokerDown] = {}
        """How each broker ended: the last time, or before its failed starts."""
        self._last_down_us: dict[str, int] = {}
        self._up_us: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        """When each broker ran."""
        self._up_since_us: dict[str, int] = {}
        self.power_losses_us: list[int] = []
        self.lost: set[str] = set()
        """Keys of messages of which a copy was lost in a power loss, wherever it was stored."""
        self._stored_by_us: defaultdict[str, list[int]] = defaultdict(list)
        """When a broker was asked to store a message, by key: by a producer, or after a failure."""
        self._unsettled_us: defaultdict[str, int] = defaultdict(int)
        """When members of a group last changed, by group; "" is for changes of all groups."""
        self.copies: defaultdict[str, dict[tuple[MessageQueue, int], tuple[Stored, int]]] = (
            defaultdict(dict)
        )
        """What each slave has of its master's queues, and since when."""
        self._lost_copies: defaultdict[str, set[tuple[MessageQueue, int]]] = defaultdict(set)
        """By slave: the positions of messages that it had and was permitted to lose."""
        self._lies_us: defaultdict[str, list[list[int]]] = defaultdict(list)
        """By broker name: when a slave reported what it did not store."""
        self._copied: defaultdict[str, set[tuple[str, tuple[MessageQueue, int] | None]]] = (
            defaultdict(set)
        )
        """What each slave ever had: keys with their positions, and without."""
        self._copied_records: defaultdict[str, set[tuple[MessageQueue, int, tuple[int, int]]]] = (
            defaultdict(set)
        )
        self._disk_faults: defaultdict[str, list[list[int]]] = defaultdict(list)
        self.network_cuts_us: list[list[int]] = []
        """When bytes were delayed: from and until."""
        self.masters = {name: name for name in plan.brokers}
        """By broker name: the machine that is master."""
        self.former_masters: set[str] = set()
        self.left_behind: set[str] = set()
        """Keys of messages of which a copy was on a replaced master, and not on its successor."""
        self._jumps: list[ClockJumped] = []
        self._replaced: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        """By broker name: when messages may have been lost, and by how much its clock was off."""
        self._damaged: dict[tuple[MessageQueue, int], BitFlipped] = {}
        """Messages in whose bodies bits were flipped, by their positions."""

    # --- questions --------------------------------------------------------------------------------

    def may_be_lost(self, broker: str, since_us: int) -> bool:
        """Whether data written then may be lost, given how the broker ended the last time.

        For messages that are not flushed before they are acknowledged: asynchronous mode, or
        sends that do not wait for the disk.
        """
        down = self.downs.get(broker)
        if down is None or down.how is not Down.POWER_LOST:
            return False
        if since_us > self._last_down_us[broker]:
            return False
        flushing_us = sum(
            end_us - max(begin_us, since_us)
            for begin_us, end_us in self._up_us[broker]
            if since_us < end_us <= down.at_us
        )
        return flushing_us < UNFLUSHED_US or self.disk_failed(broker, since_us)

    def is_up(self, machine: str) -> bool:
        """Whether a broker was seen to have started, and has not ended since."""
        return machine in self._up_since_us

    def disk_failed(self, broker: str, since_us: int) -> bool:
        """Whether a broker's disk did not work as it should at any time from then on."""
        return any(end >= since_us - UNFLUSHED_US for _, end in self._disk_faults[broker])

    def unsettled_us(self, group: str) -> int:
        """Return when anything last happened that may move the queues of a group."""
        return max(self._unsettled_us[group], self._unsettled_us[""])

    def was_copied(
        self, replica: str, key: str, place: tuple[MessageQueue, int] | None = None
    ) -> bool:
        """Whether a slave has or had a message, at a place or anywhere."""
        return (key, place) in self._copied[replica]

    def may_be_lied_to(self, broker: str, at_us: int) -> bool:
        """Whether a peer may have reported to a master what it has not stored.

        The acknowledgement that follows may arrive later.
        """
        lies_us = self._lies_us[broker]
        return any(begin <= at_us <= end + _IN_FLIGHT_US for begin, end in lies_us)

    def was_record_copied(
        self, replica: str, queue: MessageQueue, offset: int, message: Stored
    ) -> bool:
        """Whether a slave has or had a message as it was stored this time, not another time."""
        return (queue, offset, message.record) in self._copied_records[replica]

    def must_have(self, machine: str, key: str, queue: MessageQueue, offset: int) -> bool:
        """Whether a slave that is promoted must have a message, given what it ever had."""
        is_lost = (queue, offset) in self._lost_copies[machine]
        if is_lost or not self.was_copied(machine, key, (queue, offset)):
            return False
        acknowledged = self.acknowledged.get(key)
        since_us = 0 if acknowledged is None else acknowledged.at_us
        return self.plan.is_sync or not self.may_be_lost(machine, since_us)

    def was_replaced(self, machine: str, broker: str) -> bool:
        """Whether a machine, if one is given, is not the master of a broker name."""
        return machine not in ("", self.masters[broker])

    def end_of(self, queue: MessageQueue) -> int:
        """Return where a queue ends."""
        return max(self.stored.get(queue, {}), default=-1) + 1

    def cut_to_ends(self, broker: str, positions: dict[Place, int]) -> None:
        """Set positions back that a broker's queues no longer reach."""
        for (group, queue), position in tuple(positions.items()):
            if queue.broker == broker:
                positions[group, queue] = min(position, self.end_of(queue))

    def is_stored(self, queue: MessageQueue, offset: int, key: str) -> bool:
        """Whether an offset has a message now, and not another one after it was lost."""
        message = self.stored.get(queue, {}).get(offset)
        return message is not None and message.key == key

    def attempts_at(self, place: Place, offset: int) -> Attempts | None:
        """Return what a group has done with the message at an offset, None if there is none."""
        message = self.stored.get(place[1], {}).get(offset)
        return None if message is None else self._attempts[place][offset, message.key]

    def has_lost(self, key: str) -> bool:
        """Whether a copy of a message was lost with the power, or may have been unseen."""
        return key in self.lost or any(
            0 <= loss_us - at_us < US_PER_S
            for loss_us in self.power_losses_us
            for at_us in self._stored_by_us.get(key, ())
        )

    def may_be_hidden(self, queue: MessageQueue, offset: int) -> bool:
        """Whether consumers may skip a message: it is damaged, or has the offset of a lost one.

        They search for the latter by time, from a minute before the lost one. They miss it if it
        was stored by a clock that is behind by more than that.
        """
        if (queue, offset) in self._damaged:
            return True
        at_us = self.stored_us.get((queue, offset), 0)
        off_us = self._clock_off_us(self.masters[queue.broker], at_us)
        return any(
            lost_us <= at_us and off_us < lost_off_us - _SKEW_US
            for lost_us, lost_off_us in self._replaced[queue.broker]
        )

    def _clock_off_us(self, machine: str, at_us: int) -> int:
        return sum(
            jump.by_us
            for jump in self._jumps
            if jump.at_us <= at_us and jump.machine in ("", machine)
        )

    def _note_replaced(self, broker: str, lost_us: int) -> None:
        machine = self.masters[broker]
        times_us = (lost_us - UNFLUSHED_US, lost_us)
        off_us = max(self._clock_off_us(machine, at_us) for at_us in times_us)
        self._replaced[broker].append((lost_us, off_us))

    def dead_letters(self, group: str) -> set[str]:
        """Return the keys of a group's dead letters."""
        return set(self.keys_in(DEAD_LETTER_PREFIX + group))

    def keys_in(self, topic: str) -> Iterable[str]:
        """Return the keys of all messages that can be read from a topic."""
        return [
            message.key
            for queue, messages in self.stored.items()
            if queue.topic == topic
            for message in messages.values()
            if message.key is not None
        ]

    def is_hidden_in(self, topics: Container[str], key: str) -> bool:
        """Whether consumers may skip a message in every topic that has it."""
        return bool(self._jumps or self._damaged) and all(
            self.may_be_hidden(queue, offset)
            for queue, messages in self.stored.items()
            if queue.topic in topics
            for offset, message in messages.items()
            if message.key == key
        )

    def is_damaged(self, queue: MessageQueue, offset: int) -> bool:
        """Whether bits were flipped in the message at a place."""
        return (queue, offset) in self._damaged

    def is_copy_damaged(self, key: str, topic: str) -> bool:
        """Whether bits were flipped in a copy of a message that is for a topic, or in it."""
        return any(
            flip.key == key and topic in (flip.topic, queue.topic)
            for (queue, _), flip in self._damaged.items()
        )

    def knows_damage(self, text: str) -> bool:
        """Whether what was logged is about a message in which bits were flipped."""
        return any(
            # Consumers name the broker, operators do not.
            f"{queue.topic}, {broker}queue {queue.queue_id}, offset {offset}:" in text
            for queue, offset in self._damaged
            for broker in (f"broker {queue.broker}, ", "")
        )

    def is_own(self, topic: str) -> bool:
        """Whether producers send to a topic, and not the broker itself."""
        return topic not in _OWN_OF_BROKERS and not topic.startswith(
            (RETRY_PREFIX, DEAD_LETTER_PREFIX)
        )

    # --- events -----------------------------------------------------------------------------------

    @on(SendBegan)
    def _send_began(self, event: SendBegan) -> None:
        self.sends[event.key] = event

    @on(Acknowledged)
    def _acknowledged(self, event: Acknowledged) -> None:
        self._stored_by_us[event.key].append(event.at_us)
        self.acknowledged[event.key] = event

    @on(Readable)
    def _readable(self, event: Readable) -> None:
        self.stored[event.queue][event.offset] = event.message
        self.stored_us[event.queue, event.offset] = event.at_us

    @on(ConsumeBegan)
    def _consume_began(self, event: ConsumeBegan) -> None:
        attempts = self._attempts[event.group, event.queue][event.offset, event.key]
        attempts.begun_us[event.member, event.call] = event.at_us
        self.running += 1

    @on(ConsumeEnded)
    def _consume_ended(self, event: ConsumeEnded) -> None:
        attempts = self._attempts[event.group, event.queue][event.offset, event.key]
        attempts.begun_us.pop((event.member, event.call), None)
        self.running -= 1
        self.consumed_us = event.at_us
        attempts.results.add((event.result, event.times))
        if event.result is Result.SUCCESS:
            self.succeeded[event.group].add(event.key)
        else:
            self._stored_by_us[event.key].append(event.at_us)

    @on(Joined, Left)
    def _members_changed(self, event: Joined | Left) -> None:
        self._unsettled_us[event.group] = event.at_us

    @on(BrokerDown)
    def _down(self, event: BrokerDown) -> None:
        self._unsettled_us[""] = event.at_us
        if event.how is Down.POWER_LOST and event.broker in self.masters.values():
            self.power_losses_us.append(event.at_us)
            name = next(name for name, master in self.masters.items() if master == event.broker)
            self._note_replaced(name, event.at_us)
        self._last_down_us[event.broker] = event.at_us
        before = self.downs.get(event.broker)
        if before is not None and event.broker not in self._up_since_us:
            # It had not started again: what the first left unflushed, the second may lose. It may
            # have served meanwhile, as long as no name server knew it.
            how = Down.POWER_LOST if Down.POWER_LOST in {before.how, event.how} else event.how
            event = BrokerDown(before.at_us, event.broker, how)
            if how is Down.POWER_LOST and event.broker in self.masters.values():
                self.power_losses_us.append(event.at_us)
        self.downs[event.broker] = event
        up_us = self._up_since_us.pop(event.broker, None)
        if up_us is not None:
            self._up_us[event.broker].append((up_us, event.at_us))

    @on(BrokerUp)
    def _up(self, event: BrokerUp) -> None:
        if event.promoted:
            self._note_replaced(event.broker, event.at_us)
            self._promoted(event)
        machine = self.masters[event.broker]
        if machine in self._up_since_us:
            # It has started again within its process.
            self._up_us[machine].append((self._up_since_us[machine], event.at_us))
        self._up_since_us[machine] = event.at_us
        self._unsettled_us[""] = event.at_us
        for queue in [queue for queue in self.stored if queue.broker == event.broker]:
            begin, messages = event.contents.get(queue, (0, ()))
            now = dict(enumerate(messages, begin))
            for offset, message in self.stored.pop(queue).items():
                if now.get(offset) == message:
                    continue
                del self.stored_us[queue, offset]
                if event.promoted:
                    self.left_behind.add(message.key or "")
                else:
                    self.lost.add(message.key or "")
        down_us = self.downs[machine].at_us if machine in self.downs else 0
        for queue, (begin, messages) in event.contents.items():
            self.stored[queue] = dict(enumerate(messages, begin))
            self.doubtful[queue].clear()
            for offset in self.stored[queue]:
                since_us = self.stored_us.setdefault((queue, offset), event.at_us)
                if self.may_be_lost(machine, min(since_us, down_us)):
                    self.doubtful[queue].add(offset)
                    self.stored_us[queue, offset] = event.at_us

    def _promoted(self, event: BrokerUp) -> None:
        """Treat another machine as the master: what it has, it has since it was copied."""
        former, machine = self.masters[event.broker], event.promoted
        self.former_masters.add(former)
        self.masters[event.broker] = machine
        for key, acknowledged in self.acknowledged.items():
            # The former master may have died before anyone saw what it had stored.
            if acknowledged.machine == former and not self.was_copied(machine, key):
                self.left_behind.add(key)
        for place, (_, since_us) in self.copies.pop(machine, {}).items():
            if place in self.stored_us:
                self.stored_us[place] = since_us
        for queue in self.doubtful:
            if queue.broker == event.broker:
                self.doubtful[queue].clear()

    @on(ClockJumped)
    def _clock_jumped(self, event: ClockJumped) -> None:
        self._jumps.append(event)

    @on(BitFlipped)
    def _bit_flipped(self, event: BitFlipped) -> None:
        if event.queue is not None:
            self._damaged[event.queue, event.offset] = event

    @on(StaleWrite)
    def _stale_write(self, event: StaleWrite) -> None:
        self.left_behind.update(event.keys)

    @on(Replicated)
    def _replicated(self, event: Replicated) -> None:
        self._note_copy(event.replica, event.queue, event.offset, event.message, event.at_us)

    @on(ReplicaHolds)
    def _replica_holds(self, event: ReplicaHolds) -> None:
        self._unsettled_us[""] = event.at_us
        if event.is_start:
            self._up_since_us[event.replica] = event.at_us
        before = self.copies[event.replica]
        self._lost_copies[event.replica] |= {
            place
            for place, (_, since_us) in before.items()
            if self.may_be_lost(event.replica, since_us)
            or self.was_replaced(event.followed, place[0].broker)
        }
        self.copies[event.replica] = {}
        for queue, (begin, messages) in event.contents.items():
            for offset, message in enumerate(messages, begin):
                same, since_us = before.get((queue, offset), (None, event.at_us))
                known_us = since_us if same == message else event.at_us
                if self.may_be_lost(event.replica, known_us):
                    # Perhaps it was lost, and copied again before it was seen here.
                    known_us = event.at_us
                self._note_copy(event.replica, queue, offset, message, known_us)

    def _note_copy(
        self, replica: str, queue: MessageQueue, offset: int, message: Stored, since_us: int
    ) -> None:
        self.copies[replica][queue, offset] = (message, since_us)
        self._lost_copies[replica].discard((queue, offset))
        self._copied_records[replica].add((queue, offset, message.record))
        if message.key is not None:
            self._copied[replica] |= {(message.key, (queue, offset)), (message.key, None)}

    @on(FaultBegan)
    def _fault_began(self, event: FaultBegan) -> None:
        self._unsettled_us[""] = event.at_us
        if event.kind == FaultKind.NEW_DISK.value:
            self.copies.pop(event.target, None)
        if event.kind in _DISK_FAULTS:
            self._disk_faults[event.target].append([event.at_us, _NO_END_US])
        if event.kind in _CUTS:
            self.network_cuts_us.append([event.at_us, _NO_END_US])
        if event.kind == FaultKind.LYING_SLAVE.value:
            self._lies_us[event.target].append([event.at_us, _NO_END_US])

    @on(FaultEnded)
    def _fault_ended(self, event: FaultEnded) -> None:
        self._unsettled_us[""] = event.at_us
        if event.kind in _DISK_FAULTS:
            _end_first(self._disk_faults[event.target], event.at_us)
        if event.kind in _CUTS:
            _end_first(self.network_cuts_us, event.at_us)
        if event.kind == FaultKind.LYING_SLAVE.value:
            _end_first(self._lies_us[event.target], event.at_us)


def _end_first(faults: list[list[int]], at_us: int) -> None:
    """Note the end of the first fault that has not ended."""
    for fault in faults:
        if fault[1] == _NO_END_US:
            fault[1] = at_us
            return


class Check(Follower):
    """One invariant, judged by what the ledger knows."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
