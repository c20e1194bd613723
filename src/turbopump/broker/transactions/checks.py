"""Check-backs: producers are asked about half messages whose transaction stays open."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from turbopump.broker.clients import Member, Producers
from turbopump.broker.live_config import LiveConfig
from turbopump.broker.message_writer import MessageWriter
from turbopump.broker.topics import Topics
from turbopump.broker.transactions import half as halves
from turbopump.broker.transactions.half import Half, Rules, Verdict, verdict
from turbopump.broker.transactions.ledger import Fate
from turbopump.broker.transactions.transactions import LOAD_MAX, Replacement, Transactions
from turbopump.clock import Clock
from turbopump.errors import DiskFailed, NetworkError, RemoteError
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store.outcomes import Appended
from turbopump.wire.ids import offset_id
from turbopump.wire.names import CHECKED_TOO_OFTEN_TOPIC
from turbopump.wire.record import MessageView

_log = logging.getLogger(__name__)

BATCH_MAX = 64
"""Half messages handled in one iteration of the event loop, and with one write."""

BATCH_BYTES_MAX = 8 * 1024 * 1024

BUSY_MS = 100
"""How long to wait while the disk, or the producers of a group, do not keep up."""

TRIES_MAX = 30
"""How often to repeat this wait; then a group is skipped for the rest of this round."""


class Question(Struct, frozen=True):
    """A question to a producer: how the transaction of a half message ended."""

    queue_offset: QueueOffset
    physical_offset: PhysicalOffset
    offset_id: str
    unique_key: str | None
    message: bytes
    """The half message as a record of its own topic."""


class _Due(Struct, frozen=True):
    """A half message, and the action that is due."""

    half: Half
    view: MessageView
    verdict: Verdict


Ask = Callable[[Member, Question], None]
"""Sends a question to a producer; raises NetworkError."""


@dataclass(eq=False, kw_only=True)
class Checks:
    """Checks all open half messages periodically."""

    config: LiveConfig
    transactions: Transactions
    writer: MessageWriter
    topics: Topics
    producers: Producers
    ask: Ask
    clock: Clock

    def __post_init__(self) -> None:
        self._turn = 0
        self._unreachable: set[str] = set()
        """Groups whose producers do not read; they are skipped for the rest of this round."""

    @property
    def _rules(self) -> Rules:
        config = self.config.current
        return Rules(
            timeout_ms=config.transactions.timeout_ms,
            checks_max=config.transactions.checks_max,
            reserved_ms=config.store.retention.reserved_ms,
        )

    async def run(self) -> None:
        """Check, renew or abandon what is due, and note the progress."""
        if not self.transactions.queues.half_range[1]:
            return
        self._unreachable.clear()
        has_more = True
        while has_more:
            has_more = await self.transactions.load_open(self._rules.timeout_ms)
            await asyncio.sleep(0)
        ledger, rules = self.transactions.ledger, self._rules
        is_crowded = ledger.is_crowded
        due: list[_Due] = []
        due_bytes = 0
        for number, offset in enumerate(list(ledger.open), start=1):
            decided = self._decided(offset, rules, is_crowded=is_crowded)
            found = None if decided is None else await self._due(*decided)
            if found is not None:
                due.append(found)
                due_bytes += found.view.size
            if len(due) == BATCH_MAX or due_bytes > BATCH_BYTES_MAX:
                await self._deal_with(due)
                due, due_bytes = [], 0
            elif number % LOAD_MAX == 0:
                await asyncio.sleep(0)
        await self._deal_with(due)
        self.transactions.advance()

    # --- acting -----------------------------------------------------------------------------------

    def _decided(
        self, offset: QueueOffset, rules: Rules, *, is_crowded: bool
    ) -> tuple[Half, Verdict] | None:
        """Return a half message and the action due for it; None if there is none."""
        transactions, now_ms = self.transactions, self.clock.now_ms()
        half = transactions.ledger.open.get(offset)
        if half is None or transactions.is_ending(half):
            return None
        group = half.group
        has_producer = group not in self._unreachable and bool(self.producers.members(group))
        decision = verdict(half, now_ms, rules, has_producer=has_producer, is_crowded=is_crowded)
        return None if decision is Verdict.WAIT else (half, decision)

    async def _due(self, half: Half, decision: Verdict) -> _Due | None:
        """Read a half message for which an action is due; None if it is missing, or committed.

        Also if the disk cannot read it: the next round tries again.
        """
        transactions = self.transactions
        try:
            view = await transactions.queues.fetched_message(half.physical_offset)
            if view is None:
                self._note_missing(half)
                return None
            is_committed = await transactions.was_committed(half.queue_offset, view)
        except DiskFailed as error:
            text = "half message %d of group %r cannot be checked: %s"
            _log.error(text, half.queue_offset, half.group, error)
            return None
        return None if is_committed else _Due(half, view, decision)

    async def _deal_with(self, due: Sequence[_Due]) -> None:
        """Carry out what is due."""
        for _ in range(TRIES_MAX):
            if self.writer.busy() is None:
                break
            await asyncio.sleep(BUSY_MS / 1000)
        await self._abandon([each for each in due if each.verdict is Verdict.ABANDON])
        await self._renew([each for each in due if each.verdict is Verdict.RENEW])
        await self._check([each for each in due if each.verdict is Verdict.CHECK])

    def _note_missing(self, half: Half) -> None:
        if self.transactions.queues.is_removed(half.physical_offset):
            _log.error(
                "half message %d of group %r was deleted with its log file before its transaction"
                " ended",
                half.queue_offset,
                half.group,
            )
            self.transactions.ledger.forget(half.queue_offset)

    async def _abandon(self, due: Sequence[_Due]) -> None:
        replaced = [
            Replacement(each.half, halves.abandoned(each.view)) for each in self._still(due)
        ]
        if not replaced:
            return
        self.topics.create_internal(CHECKED_TOO_OFTEN_TOPIC, queues=1)
        await self.transactions.replace(replaced, Fate.ABANDONED)
        for old in replaced:
            _log.warning(
                "abandoned half message %d of group %r after %d checks; it is kept in %s",
                old.half.queue_offset,
                old.half.group,
                old.half.checks,
                CHECKED_TOO_OFTEN_TOPIC,
            )

    async def _renew(self, due: Sequence[_Due]) -> None:
        made = [_copied(each, each.half.checks) for each in self._still(due)]
        replaced = [old for old in made if old is not None]
        if replaced:
            await self.transactions.replace(replaced, Fate.REPLACED)

    async def _check(self, due: Sequence[_Due]) -> None:
        replaced, views = [], []
        for each in self._still(due):
            old = _copied(each, each.half.checks + 1)
            if old is not None:
                replaced.append(old)
                views.append(each.view)
        if not replaced:
            return
        places = await self.transactions.replace(replaced, Fate.REPLACED)
        for old, view, place in zip(replaced, views, places, strict=True):
            if old.half.group not in self._unreachable:
                await self._send(old.half.group, _question(view, old.checks, place))

    def _still(self, due: Sequence[_Due]) -> list[_Due]:
        """Return those that are still open: transactions end while others are stored."""
        transactions = self.transactions
        return [
            each
            for each in due
            if each.half.queue_offset in transactions.ledger.open
            and not transactions.is_ending(each.half)
        ]

    # --- asking -----------------------------------------------------------------------------------

    async def _send(self, group: str, question: Question) -> None:
        """Ask one producer of a group, in turn; wait while none of them reads."""
        for _ in range(TRIES_MAX):
            members = self.producers.members(group)
            for _ in members:
                self._turn += 1
                try:
                    self.ask(members[self._turn % len(members)], question)
                except NetworkError:
                    continue
                return
            if not members:
                break
            await asyncio.sleep(BUSY_MS / 1000)
        _log.warning("no producer of group %r accepts transaction checks; will retry", group)
        self._unreachable.add(group)


def _copied(due: _Due, checks: int) -> Replacement | None:
    """Return a copy of a half message; None if it cannot be built."""
    try:
        return Replacement(due.half, halves.copy_of(due.view, checks), checks)
    except RemoteError as error:
        _log.warning("half message %s cannot be copied: %s", due.view.message_id, error)
        return None


def _question(view: MessageView, checks: int, place: Appended) -> Question:
    return Question(
        queue_offset=place.queue_offset,
        physical_offset=place.physical_offset,
        offset_id=offset_id(view.store_host, place.physical_offset),
        unique_key=view.unique_key,
        message=halves.question(view, checks, place.queue_offset, place.physical_offset),
    )
