"""Which member consumes a queue: one at a time, in order, and the same across broker restarts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from turbopump.message import MessageQueue
from turbopump.testing.simulate.events import (
    Assigned,
    BrokerUp,
    Calm,
    ConsumeBegan,
    ConsumeEnded,
    Left,
)
from turbopump.testing.simulate.history import on
from turbopump.testing.simulate.ledger import Check, Ledger, Place
from turbopump.testing.simulate.plan import GroupKind


class OneOwner(Check):
    """No two calls of an orderly group's listener run on one queue at the same time."""

    name = "one call per orderly queue"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._running: dict[Place, ConsumeBegan] = {}

    @on(ConsumeBegan)
    def _began(self, event: ConsumeBegan) -> Iterator[str]:
        if self._ledger.groups[event.group].kind is not GroupKind.ORDERLY:
            return
        place = (event.group, event.queue)
        other = self._running.get(place)
        if other is not None and (other.member, other.call) != (event.member, event.call):
            yield (
                f"{event.member} gets {event.key} of {event.queue} while {other.member} "
                f"has {other.key}"
            )
        self._running[place] = event

    @on(ConsumeEnded)
    def _ended(self, event: ConsumeEnded) -> None:
        place = (event.group, event.queue)
        running = self._running.get(place)
        if running is not None and (running.member, running.call) == (event.member, event.call):
            del self._running[place]


class InOrder(Check):
    """An orderly group starts a message only after all earlier ones in its queue are done.

    Except for those that a clock set back after a loss hides (`Ledger.may_be_hidden`).
    """

    name = "orderly groups consume in order"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._done: defaultdict[Place, int] = defaultdict(int)

    @on(ConsumeBegan)
    def _began(self, event: ConsumeBegan) -> Iterator[str]:
        group, place = self._ledger.groups[event.group], (event.group, event.queue)
        if group.kind is not GroupKind.ORDERLY:
            return
        if not self._ledger.is_stored(event.queue, event.offset, event.key):
            # Pulled before it was lost in a power loss.
            return
        for offset in range(self._done[place], event.offset):
            found = self._ledger.attempts_at(place, offset)
            if found is None or (event.member, event.call) in found.begun_us:
                continue
            if not found.is_done(group) and not self._ledger.may_be_hidden(event.queue, offset):
                yield (
                    f"{event.group} begins offset {event.offset} of {event.queue} "
                    f"before offset {offset} is done"
                )
                return
            if offset == self._done[place]:
                self._done[place] = offset + 1

    @on(BrokerUp)
    def _forget_lost(self, event: BrokerUp) -> None:
        self._ledger.cut_to_ends(event.broker, self._done)


class RestartMovesNoQueue(Check):
    """When the only broker restarts in a calm cluster, every queue stays with its owner.

    If there are others, a member that requests routes meanwhile shares the queues on those.
    """

    name = "a restart moves no queue"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._owned: dict[str, tuple[MessageQueue, ...]] = {}
        self._is_calm = False

    @on(Assigned)
    def _assigned(self, event: Assigned) -> Iterator[str]:
        before = self._owned.get(event.member, ())
        self._owned[event.member] = event.queues
        if self._is_calm:
            yield (
                f"{event.member} owned {', '.join(map(str, before)) or 'no queue'}, and owns "
                f"{', '.join(map(str, event.queues)) or 'no queue'} after a restart"
            )

    @on(Calm)
    def _calm(self, _: Calm) -> None:
        self._is_calm = len(self._ledger.plan.brokers) == 1

    @on(Left)
    def _left(self, _: Left) -> None:
        self._is_calm = False
