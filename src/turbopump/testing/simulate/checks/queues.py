"""Queues have no gaps and no foreign bodies, and preserve the order of each producer."""

from __future__ import annotations

from collections.abc import Iterator

from turbopump.message import MessageQueue
from turbopump.testing.simulate.events import (
    DAMAGED,
    Acknowledged,
    BrokerDown,
    BrokerUp,
    ConsumeBegan,
    Down,
    Readable,
)
from turbopump.testing.simulate.history import on
from turbopump.testing.simulate.ledger import Check, Ledger
from turbopump.wire.names import DEAD_LETTER_PREFIX


class QueuesDense(Check):
    """Offsets of a queue are consecutive, and each holds one intact message."""

    name = "queues are dense"

    @on(Readable)
    def _next(self, event: Readable) -> Iterator[str]:
        expected = self._ledger.end_of(event.queue)
        if event.offset != expected:
            yield f"{event.queue} continues with offset {event.offset}, not {expected}"
        if event.message.key is None:
            yield f"{event.queue} offset {event.offset} holds a body that was never sent"

    @on(BrokerUp)
    def _all(self, event: BrokerUp) -> Iterator[str]:
        for queue, (begin, messages) in event.contents.items():
            if begin != 0 and messages:
                yield f"{queue} begins with offset {begin}, not 0"
            for offset, message in enumerate(messages, begin):
                if message.key is None:
                    yield f"{queue} offset {offset} holds a body that was never sent there"


class DamageContained(Check):
    """A damaged body is where a bit was flipped, and in dead letters; no listener gets it."""

    name = "damage is contained"

    @on(Readable)
    def _readable(self, event: Readable) -> Iterator[str]:
        is_dead_letter = event.queue.topic.startswith(DEAD_LETTER_PREFIX)
        is_known = is_dead_letter or self._ledger.is_damaged(event.queue, event.offset)
        if event.message.is_damaged and not is_known:
            key = event.message.key
            yield f"{event.queue} offset {event.offset} is a copy of the damaged body of {key}"

    @on(ConsumeBegan)
    def _consumed(self, event: ConsumeBegan) -> Iterator[str]:
        if event.key == DAMAGED:
            yield f"{event.member} gets a damaged body from {event.queue} offset {event.offset}"


class ProducerOrder(Check):
    """Messages that a producer sends one after the other have increasing offsets in each queue."""

    name = "order of each producer"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._last: dict[tuple[str, MessageQueue], Acknowledged] = {}

    @on(Acknowledged)
    def _follow(self, event: Acknowledged) -> Iterator[str]:
        send = self._ledger.sends[event.key]
        # A failed flush rolls back what was sent without waiting for it.
        if send.delay_us or send.in_burst or not send.is_durable:
            return
        if self._ledger.was_replaced(event.machine, event.queue.broker):
            return
        # Of a broker that has just ended, or serves before it is seen to have started.
        machine = self._ledger.masters[event.queue.broker]
        if not self._ledger.is_up(machine) and self._may_have_lost(machine):
            return
        last = self._last.get((event.producer, event.queue))
        self._last[event.producer, event.queue] = event
        if last is not None and event.offset <= last.offset:
            yield (
                f"{event.producer} sent {last.key} before {event.key}, but their offsets in "
                f"{event.queue} are {last.offset} and {event.offset}"
            )

    @on(BrokerDown, BrokerUp)
    def _forget_lost(self, event: BrokerDown | BrokerUp) -> None:
        """Expect lower offsets from a broker that may have lost what it has acknowledged."""
        masters = self._ledger.masters
        name, machine = event.broker, masters.get(event.broker, "")
        if isinstance(event, BrokerDown):
            name = next((name for name, at in masters.items() if at == event.broker), "")
            machine = event.broker
        is_promotion = isinstance(event, BrokerUp) and event.promoted
        if is_promotion or self._may_have_lost(machine):
            for place in [place for place in self._last if place[1].broker == name]:
                del self._last[place]

    def _may_have_lost(self, machine: str) -> bool:
        """Whether the last end of a broker may have lost what it has acknowledged."""
        down = self._ledger.downs.get(machine)
        is_lossy = down is not None and down.how is Down.POWER_LOST
        return is_lossy and not self._ledger.plan.is_sync
