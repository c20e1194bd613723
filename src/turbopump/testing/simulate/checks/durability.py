"""Acknowledged messages and values can be read, and readable ones stay, as far as guaranteed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from turbopump.testing.simulate.events import (
    Acknowledged,
    BrokerUp,
    Calm,
    KeyValuesRead,
    KeyValueStored,
)
from turbopump.testing.simulate.history import on
from turbopump.testing.simulate.ledger import Check, Ledger


class ReadableKept(Check):
    """Nothing that was readable disappears or changes.

    Except for what had not been flushed in asynchronous mode, when the power fails, and for what a
    promoted slave never had.
    """

    name = "readable messages stay"

    @on(BrokerUp)
    def _compare(self, event: BrokerUp) -> Iterator[str]:
        ledger = self._ledger
        for queue, messages in ledger.stored.items():
            if queue.broker != event.broker:
                continue
            begin, found = event.contents.get(queue, (0, ()))
            now = dict(enumerate(found, begin))
            for offset, message in messages.items():
                if now.get(offset) == message:
                    continue
                if event.promoted:
                    slave = event.promoted
                    is_kept = ledger.must_have(slave, message.key or "", queue, offset)
                    # Perhaps it has what the master has lost and stored again, as with retries.
                    is_kept &= ledger.was_record_copied(slave, queue, offset, message)
                else:
                    machine = ledger.masters[queue.broker]
                    since_us = ledger.stored_us[queue, offset]
                    is_kept = ledger.plan.is_sync or not ledger.may_be_lost(machine, since_us)
                if is_kept:
                    yield f"{queue} offset {offset} was {message.key}, now {now.get(offset)}"


class AcknowledgedKept(Check):
    """Every acknowledged message is at the offset that was acknowledged.

    Except for what a promoted slave never had: with SYNC_MASTER and one slave, that is
    nothing (see `AcknowledgedCopied`).
    """

    name = "acknowledged messages are kept"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._waiting: dict[str, Acknowledged] = {}

    @on(Acknowledged)
    def _note(self, event: Acknowledged) -> None:
        # The receipt of a delayed message refers to a topic of the broker's own.
        if not self._ledger.sends[event.key].delay_us and not self._is_left_behind(event):
            self._waiting[event.key] = event

    def _is_left_behind(self, event: Acknowledged) -> bool:
        """Whether a replaced master has acknowledged what the current one never had."""
        ledger, master = self._ledger, self._ledger.masters[event.queue.broker]
        is_stale = ledger.was_replaced(event.machine, event.queue.broker)
        return is_stale and not ledger.must_have(master, event.key, event.queue, event.offset)

    @on(BrokerUp)
    def _after_start(self, event: BrokerUp) -> Iterator[str]:
        for key, acknowledged in tuple(self._waiting.items()):
            if acknowledged.queue.broker != event.broker or self._is_there(acknowledged):
                continue
            queue, offset = acknowledged.queue, acknowledged.offset
            if event.promoted:
                may_be_lost = not self._ledger.must_have(event.promoted, key, queue, offset)
            else:
                may_be_lost = self._may_be_lost(acknowledged)
            if may_be_lost:
                del self._waiting[key]
            else:
                yield self._text(acknowledged)

    @on(Calm)
    def _at_end(self, _: Calm) -> Iterator[str]:
        for acknowledged in self._waiting.values():
            if not self._is_there(acknowledged) and not self._may_be_lost(acknowledged):
                yield self._text(acknowledged)

    def _is_there(self, acknowledged: Acknowledged) -> bool:
        queue, offset = acknowledged.queue, acknowledged.offset
        return self._ledger.is_stored(queue, offset, acknowledged.key)

    def _may_be_lost(self, acknowledged: Acknowledged) -> bool:
        ledger = self._ledger
        is_sync, machine = ledger.plan.is_sync, ledger.masters[acknowledged.queue.broker]
        if is_sync and ledger.sends[acknowledged.key].is_durable:
            return False
        # A failed flush in synchronous mode rolls back what was sent without waiting for it.
        is_taken_back = is_sync and ledger.disk_failed(machine, acknowledged.at_us)
        return is_taken_back or ledger.may_be_lost(machine, acknowledged.at_us)

    def _text(self, acknowledged: Acknowledged) -> str:
        queue, offset = acknowledged.queue, acknowledged.offset
        found = self._ledger.stored.get(queue, {}).get(offset)
        return f"{acknowledged.key} was acknowledged at {queue} offset {offset}, which has {found}"


class KeyValuesKept(Check):
    """A value that a name server has acknowledged survives a crash and a power loss."""

    name = "name servers keep values"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._stored: defaultdict[str, set[str]] = defaultdict(set)

    @on(KeyValueStored)
    def _note(self, event: KeyValueStored) -> None:
        self._stored[event.server].add(event.key)

    @on(KeyValuesRead)
    def _compare(self, event: KeyValuesRead) -> Iterator[str]:
        lost = sorted(self._stored[event.server].difference(event.keys))
        if lost:
            yield f"{event.server} has acknowledged {', '.join(lost)}, which it no longer has"
