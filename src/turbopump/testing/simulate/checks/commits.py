"""Committed offsets stay behind what is consumed, and do not decrease."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from turbopump.message import MessageQueue
from turbopump.testing.simulate.events import (
    US_PER_S,
    Assigned,
    BitFlipped,
    BrokerUp,
    Committed,
    ConsumeBegan,
    Down,
    FaultBegan,
)
from turbopump.testing.simulate.fault_plan import FaultKind
from turbopump.testing.simulate.history import on
from turbopump.testing.simulate.ledger import Attempts, Check, Ledger, Place
from turbopump.testing.simulate.plan import CONSUME_TIMEOUT_S, Group

SAVED_US = 6 * US_PER_S
"""A broker saves offsets every 5 s, and needs a little time for it."""
SETTLED_US = 70 * US_PER_S
"""After this time without a fault or a new member, each queue has one owner."""
OWNED_US = 10 * US_PER_S
"""After this time with one owner, no commit of the previous owner is in flight."""


class CommitsBehindConsumption(Check):
    """A group's committed offset passes no message that its listeners have not finished.

    Except for those that a listener has had for longer than the consumer's timeout, which are sent
    back, and those that a clock set back after a loss hides (`Ledger.may_be_hidden`).
    """

    name = "commits pass no unfinished message"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._checked: defaultdict[Place, int] = defaultdict(int)

    @on(Committed)
    def _committed(self, event: Committed) -> Iterator[str]:
        ledger, place = self._ledger, (event.group, event.queue)
        group = ledger.groups.get(event.group)
        if group is None:
            return
        for offset in range(self._checked[place], event.offset):
            attempts = ledger.attempts_at(place, offset)
            if attempts is None or self._is_finished(group, attempts, event.at_us):
                continue
            if not ledger.may_be_hidden(event.queue, offset):
                yield (
                    f"{event.group} committed {event.offset} in {event.queue}, "
                    f"but has not finished offset {offset}"
                )
        self._checked[place] = max(self._checked[place], event.offset)

    def _is_finished(self, group: Group, attempts: Attempts, now_us: int) -> bool:
        oldest_us = min(attempts.begun_us.values(), default=now_us)
        is_expired = now_us - oldest_us > CONSUME_TIMEOUT_S * US_PER_S
        return attempts.is_done(group) or is_expired

    @on(BrokerUp)
    def _forget_lost(self, event: BrokerUp) -> None:
        self._ledger.cut_to_ends(event.broker, self._checked)


class CommitsKept(Check):
    """Committed offsets do not decrease, except after a crash, which may lose the last 5 s.

    A damaged table is replaced by its backup. A promoted slave has those that it has copied. After
    a loss of messages, the first commit of a queue's owner may be lower: it has compared what it
    has with the broker, and resumes from the first message that differs. So may the first commit
    of a new owner where there are slaves: it may have started at an older offset that a slave had
    copied, while the master was down. So may that of a member that was isolated, and has kept the
    queue while another one owned it. And so may one that repeats a lower commit which a crash has
    lost.

    A member that gets a queue starts at what is committed then. If the previous owner commits
    after that, the next commit of the new one may be lower. So commits are judged while a queue has
    had the same owner for `OWNED_US`, whatever happens to other queues. A cut of the network delays
    commits of the previous owner until it ends.
    """

    name = "commits do not go back"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._commits: defaultdict[Place, list[tuple[int, int]]] = defaultdict(list)
        """Time and offset of the latest commits."""
        self._backups: dict[str, Mapping[Place, int]] = {}
        """By broker: the content of a damaged table's backup."""
        self._save_fails: set[str] = set()
        """Brokers that skip one save."""
        self._queues: dict[str, tuple[MessageQueue, ...]] = {}
        """By member."""
        self._owners: defaultdict[Place, set[str]] = defaultdict(set)
        self._owned_us: dict[Place, int] = {}
        """When the owners of a queue were last seen to change."""
        self._callers: dict[Place, str] = {}
        """Which member's listener was called last."""
        self._may_go_back: set[Place] = set()
        """Where a sole owner has not committed since it may have had to rewind."""

    @on(BitFlipped)
    def _bit_flipped(self, event: BitFlipped) -> None:
        if event.committed is not None:
            self._backups[event.broker] = event.committed

    @on(FaultBegan)
    def _fault_began(self, event: FaultBegan) -> None:
        if event.kind == FaultKind.BROKEN_WORK.value and event.text.startswith("(try_save"):
            self._save_fails.add(event.target)

    @on(Committed)
    def _committed(self, event: Committed) -> Iterator[str]:
        place = (event.group, event.queue)
        self._commits[place].append((event.at_us, event.offset))
        is_judged = self._is_judged(place, event.at_us)
        if event.before is not None and event.offset < event.before and is_judged:
            yield f"{event.group} committed {event.offset} in {event.queue} after {event.before}"

    def _is_judged(self, place: Place, now_us: int) -> bool:
        """Whether a commit must not be lower than the previous one."""
        if now_us - self._ledger.unsettled_us(place[0]) > SETTLED_US:
            return True
        if len(self._owners[place]) != 1 or now_us - self._owned_us[place] <= OWNED_US:
            return False
        if self._is_held_up(place, now_us):
            return False
        if place in self._may_go_back:
            self._may_go_back.remove(place)
            return False
        return True

    def _is_held_up(self, place: Place, now_us: int) -> bool:
        """Whether a cut of the network may have delayed a commit of the owner before this one."""
        return any(
            begin_us < self._owned_us[place] + OWNED_US and now_us <= end_us + OWNED_US
            for begin_us, end_us in self._ledger.network_cuts_us
        )

    @on(Assigned)
    def _assigned(self, event: Assigned) -> None:
        before = self._queues.get(event.member, ())
        self._queues[event.member] = event.queues
        for queue in {*before} ^ {*event.queues}:
            place = (event.group, queue)
            self._owners[place] ^= {event.member}
            self._note_change(place, event.at_us)
            if len(self._owners[place]) > 1:
                # One of them was isolated and keeps its queues: it commits later what it has
                # finished, although the other may have advanced further.
                self._may_go_back.add(place)

    @on(ConsumeBegan)
    def _called(self, event: ConsumeBegan) -> None:
        """Record a new owner before its queues are inspected, which happens once a second."""
        place = (event.group, event.queue)
        if self._callers.get(place) != event.member:
            self._callers[place] = event.member
            self._note_change(place, event.at_us)

    def _note_change(self, place: Place, at_us: int) -> None:
        self._owned_us[place] = at_us
        if self._ledger.plan.replicas.names:
            # While the master is down, a new owner starts at the offset that a slave has copied.
            # That is older than the master's, to which the owner commits later.
            self._may_go_back.add(place)

    @on(BrokerUp)
    def _came_up(self, event: BrokerUp) -> Iterator[str]:
        self._note_loss(event)
        backup = self._backups.pop(event.broker, None)
        if backup is not None:
            yield from self._compare_with_backup(event, backup)
        if event.promoted or backup is not None:
            self._start_over(event)
            return
        machine = self._ledger.masters[event.broker]
        down = self._ledger.downs.get(machine)
        if down is None:
            return
        is_clean = down.how is Down.STOPPED
        saves = 2 if machine in self._save_fails else 1
        self._save_fails.discard(machine)
        saved_until_us = down.at_us - (0 if is_clean else SAVED_US * saves)
        for (group, queue), commits in self._commits.items():
            if queue.broker != event.broker or not commits:
                continue
            saved = [offset for at_us, offset in commits if at_us <= saved_until_us]
            # Saved then or at any time later: a reset may have lowered it in between.
            later = [offset for at_us, offset in commits if at_us > saved_until_us]
            least = min(saved[-1] if saved else 0, *later, self._kept_end(queue))
            now = event.committed.get((group, queue), 0)
            if now < least and not self._is_late(saved_until_us):
                yield f"{group} had committed {least} in {queue}, after the start it is {now}"
            if now > commits[-1][1]:
                # A lower commit was not saved, and its owner repeats it.
                self._may_go_back.add((group, queue))
            commits[:] = [(event.at_us, now)]

    def _compare_with_backup(self, event: BrokerUp, backup: Mapping[Place, int]) -> Iterator[str]:
        for place, offset in backup.items():
            least, now = min(offset, self._kept_end(place[1])), event.committed.get(place, 0)
            if now < least:
                yield f"{place[0]} had {least} of {place[1]} in the backup, after the start {now}"

    def _note_loss(self, event: BrokerUp) -> None:
        """Expect lower offsets where members may find that messages were lost."""
        down = self._ledger.downs.get(self._ledger.masters[event.broker])
        is_lossy = down is not None and down.how is Down.POWER_LOST
        if event.promoted or (is_lossy and not self._ledger.plan.is_sync):
            self._may_go_back |= {
                place for place in self._commits if place[1].broker == event.broker
            }

    def _start_over(self, event: BrokerUp) -> None:
        """Start with what the backup or a promoted slave has: saved every 10 s without faults."""
        for (group, queue), commits in self._commits.items():
            if queue.broker == event.broker:
                commits[:] = [(event.at_us, event.committed.get((group, queue), 0))]

    def _is_late(self, saved_until_us: int) -> bool:
        """Whether saves may have failed, or waited for a broker that starts on a slow disk."""
        ledger = self._ledger
        return any(ledger.disk_failed(broker, saved_until_us) for broker in ledger.plan.machines)

    def _kept_end(self, queue: MessageQueue) -> int:
        """Return up to where a queue certainly had its messages after the last start."""
        ledger = self._ledger
        end = ledger.end_of(queue)
        return end if ledger.plan.is_sync else min(ledger.doubtful[queue], default=end)
