"""What was acknowledged can be read, and what could be read stays, as far as the mode promises."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from turbopump.testing.simulate.events import Acknowledged, BrokerUp, Calm, Event
from turbopump.testing.simulate.history import Handler
from turbopump.testing.simulate.ledger import Ledger


class ReadableKept:
    """Nothing that was readable disappears or changes.

    But for what had not been flushed in asynchronous mode, when the power fails.
    """

    name = "readable messages stay"

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def handlers(self) -> Mapping[type[Event], Handler]:
        return {BrokerUp: self._compare}

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
                since_us = ledger.stored_us[queue, offset]
                if ledger.plan.is_sync or not ledger.may_be_lost(event.broker, since_us):
                    yield f"{queue} offset {offset} was {message.key}, now {now.get(offset)}"


class AcknowledgedKept:
    """Every acknowledged message is at the offset that was acknowledged."""

    name = "acknowledged messages are kept"

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._waiting: dict[str, Acknowledged] = {}

    def handlers(self) -> Mapping[type[Event], Handler]:
        return {Acknowledged: self._note, BrokerUp: self._after_start, Calm: self._at_end}

    def _note(self, event: Acknowledged) -> None:
        # The receipt of a delayed message is about a topic of the broker's own.
        if not self._ledger.sends[event.key].delay_us:
            self._waiting[event.key] = event

    def _after_start(self, event: BrokerUp) -> Iterator[str]:
        for key, acknowledged in tuple(self._waiting.items()):
            if acknowledged.queue.broker != event.broker or self._is_there(acknowledged):
                continue
            if self._may_be_lost(acknowledged):
                del self._waiting[key]
            else:
                yield self._text(acknowledged)

    def _at_end(self, _: Calm) -> Iterator[str]:
        for acknowledged in self._waiting.values():
            if not self._is_there(acknowledged) and not self._may_be_lost(acknowledged):
                yield self._text(acknowledged)

    def _is_there(self, acknowledged: Acknowledged) -> bool:
        stored = self._ledger.stored.get(acknowledged.queue, {}).get(acknowledged.offset)
        return stored is not None and stored.key == acknowledged.key

    def _may_be_lost(self, acknowledged: Acknowledged) -> bool:
        ledger = self._ledger
        is_sync, broker = ledger.plan.is_sync, acknowledged.queue.broker
        if is_sync and ledger.sends[acknowledged.key].is_durable:
            return False
        # A flush that fails in synchronous mode takes back what was sent without waiting for it.
        is_taken_back = is_sync and ledger.disk_failed(broker, acknowledged.at_us)
        return is_taken_back or ledger.may_be_lost(broker, acknowledged.at_us)

    def _text(self, acknowledged: Acknowledged) -> str:
        queue, offset = acknowledged.queue, acknowledged.offset
        found = self._ledger.stored.get(queue, {}).get(offset)
        return f"{acknowledged.key} was acknowledged at {queue} offset {offset}, which has {found}"
