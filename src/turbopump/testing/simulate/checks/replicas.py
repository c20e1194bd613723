"""What a slave has: everything its master acknowledged with its help, and the same bytes."""

from __future__ import annotations

from collections.abc import Iterator

from turbopump.testing.simulate.events import (
    US_PER_S,
    Acknowledged,
    Contested,
    LogsCompared,
    ReplicaHolds,
    StaleWrite,
)
from turbopump.testing.simulate.history import on
from turbopump.testing.simulate.ledger import Check

FENCED_US = 25 * US_PER_S
"""A replaced master queries name servers every 10 s, and its successor notifies it every 5 s."""


class AcknowledgedCopied(Check):
    """When a SYNC_MASTER acknowledges a message, a slave has it.

    Except for messages that do not wait for it. A master cannot know that a slave reports what it
    has not stored: meanwhile, nothing is required.
    """

    name = "acknowledged messages have a copy"

    @on(Acknowledged)
    def _acknowledged(self, event: Acknowledged) -> Iterator[str]:
        ledger = self._ledger
        send, replicas = ledger.sends[event.key], ledger.plan.replicas
        if not replicas.is_sync_master or not send.is_durable:
            return
        broker = event.queue.broker
        if ledger.may_be_lied_to(broker, event.at_us):
            return
        slaves = [
            name for name in replicas.machines_of(broker) if name != (event.machine or broker)
        ]
        # The receipt of a delayed message refers to a topic of the broker's own.
        place = None if send.delay_us else (event.queue, event.offset)
        if not any(ledger.was_copied(slave, event.key, place) for slave in slaves):
            yield (
                f"{event.key} was acknowledged at {event.queue} offset {event.offset}, "
                f"but {' and '.join(slaves)} never had it there"
            )


class CopiesKept(Check):
    """A slave loses no message that its master still has.

    Except for what had not been flushed in asynchronous mode, when its power fails, for a new disk,
    and for what it truncates because a replaced master, which it still follows, lost it.
    """

    name = "copies stay"

    @on(ReplicaHolds)
    def _compare(self, event: ReplicaHolds) -> Iterator[str]:
        ledger = self._ledger
        is_own = not event.is_start and event.replica in ledger.former_masters
        if is_own or event.replica in ledger.masters.values():
            # What it truncates, it has written itself as a replaced master.
            return
        for (queue, offset), (message, since_us) in ledger.copies[event.replica].items():
            begin, found = event.contents.get(queue, (0, ()))
            if 0 <= offset - begin < len(found) and found[offset - begin] == message:
                continue
            if ledger.was_replaced(event.followed, queue.broker):
                continue
            masters = ledger.stored.get(queue, {}).get(offset)
            if masters is None or masters.record != message.record:
                # The master has lost it, and its slaves follow; or it is from a replaced master.
                # Perhaps the same message was stored again, as with retries: it is another record.
                continue
            if ledger.plan.is_sync or not ledger.may_be_lost(event.replica, since_us):
                yield f"{event.replica} no longer has {message.key} at {queue} offset {offset}"


class ReplacedMastersSilent(Check):
    """A replaced master writes nothing once it knows, or could know, that it was replaced."""

    name = "replaced masters are silent"

    @on(StaleWrite)
    def _wrote(self, event: StaleWrite) -> Iterator[str]:
        quiet_us = event.at_us - self._ledger.unsettled_us("")
        if event.must_know:
            yield f"{event.machine} has written: {event.must_know}"
        elif quiet_us > FENCED_US:
            yield f"{event.machine} has written {quiet_us / US_PER_S:g} s after the last fault"


class OneMaster(Check):
    """Of one epoch, one master accepts writes; most name servers have a claim that fences one."""

    name = "one master of each epoch"

    @on(Contested)
    def _contested(self, event: Contested) -> Iterator[str]:
        yield f"{event.machine} {event.how}"


class ReplicasAgree(Check):
    """Up to where a slave has reported, its log is the same as the master's, byte for byte.

    At the end of a run, both logs are equal.
    """

    name = "replicas agree"

    @on(LogsCompared)
    def _compared(self, event: LogsCompared) -> Iterator[str]:
        if event.difference:
            yield f"{event.replica}: {event.difference}"
