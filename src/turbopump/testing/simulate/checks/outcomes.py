"""Every message ends in success or in the dead letters, in every group."""

from __future__ import annotations

from collections.abc import Iterator

from turbopump.testing.simulate.events import Calm, ConsumeEnded, Readable, Result
from turbopump.testing.simulate.history import on
from turbopump.testing.simulate.ledger import Check
from turbopump.testing.simulate.plan import FateKind, Group
from turbopump.wire.names import DEAD_LETTER_PREFIX, RETRY_PREFIX


class EveryMessageEnds(Check):
    """Each readable message is consumed or dead-lettered by each group that subscribes to it.

    In asynchronous mode a power loss may take a message that was about to be retried. So may
    the promotion of a slave, if it was not copied. A clock that is set back after a loss may hide
    messages (`Ledger.may_be_hidden`). Damaged messages are skipped, delayed ones and retries
    too.
    """

    name = "every message ends"

    def unfinished(self) -> Iterator[tuple[Group, str]]:
        """Return the messages that groups have still to consume."""
        ledger = self._ledger
        for group in ledger.plan.groups:
            wanted = {key for topic in group.topics for key in ledger.keys_in(topic)}
            done = ledger.succeeded[group.name] | ledger.dead_letters(group.name)
            for key in sorted(wanted - done):
                if not self._may_be_lost(group, key):
                    yield group, key

    def missing(self) -> Iterator[str]:
        """Return the keys of acknowledged delayed messages that are not delivered."""
        ledger = self._ledger
        readable = {key for topic in ledger.plan.queues for key in ledger.keys_in(topic)}
        for key in ledger.acknowledged:
            send = ledger.sends[key]
            may_be_lost = self._delay_may_be_lost(key) or ledger.is_copy_damaged(key, send.topic)
            if send.delay_us and key not in readable and not may_be_lost:
                yield key

    @on(Calm)
    def _at_end(self, _: Calm) -> Iterator[str]:
        for key in self.missing():
            yield f"{key} was acknowledged, and never delivered after its delay"
        for group in self._ledger.plan.groups:
            keys = [key for of_group, key in self.unfinished() if of_group is group]
            if keys:
                fates = ", ".join(f"{key} ({group.fates[key].kind.value})" for key in keys)
                yield f"{group.name} has neither consumed nor dead-lettered {fates}"

    def _may_be_lost(self, group: Group, key: str) -> bool:
        ledger, fate = self._ledger, group.fates.get(key)
        # Orderly groups send their dead letters by way of a delay, as retries are sent.
        copies = (RETRY_PREFIX + group.name, DEAD_LETTER_PREFIX + group.name)
        is_copy_damaged = any(ledger.is_copy_damaged(key, topic) for topic in copies)
        if is_copy_damaged or ledger.is_hidden_in(group.topics, key):
            return True
        fails = fate is not None and fate.fails(0)
        if fails and key in ledger.left_behind:
            # Sent back to a master, and not copied before a slave was promoted.
            return True
        # Sent back, and lost before it was flushed.
        return not ledger.plan.is_sync and fails and self._delay_may_be_lost(key)

    def _delay_may_be_lost(self, key: str) -> bool:
        ledger = self._ledger
        if key in ledger.left_behind:
            return True
        is_promised = ledger.plan.is_sync and ledger.sends[key].is_durable
        return not is_promised and ledger.has_lost(key)


class DeadLettersExact(Check):
    """Dead letters are exactly the messages that failed every time, and damaged ones."""

    name = "dead letters are exact"

    @on(Readable)
    def _dead(self, event: Readable) -> Iterator[str]:
        group = self._ledger.groups.get(event.queue.topic.removeprefix(DEAD_LETTER_PREFIX))
        if not event.queue.topic.startswith(DEAD_LETTER_PREFIX) or group is None:
            return
        key = event.message.key or ""
        fate = group.fates.get(key)
        always_fails = fate is not None and fate.kind is FateKind.ALWAYS_FAILS
        if not always_fails and not event.message.is_damaged:
            yield f"{key} is a dead letter of {group.name}, but would have succeeded"

    @on(ConsumeEnded)
    def _consumed(self, event: ConsumeEnded) -> Iterator[str]:
        fate = self._ledger.groups[event.group].fates.get(event.key)
        always_fails = fate is not None and fate.kind is FateKind.ALWAYS_FAILS
        if event.result is Result.SUCCESS and always_fails:
            yield f"{event.key} succeeded in {event.group}, but always fails"
