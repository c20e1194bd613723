"""Role changes: promotion, fencing, and the checks of both.

A broker changes its role by recording it and restarting within its process, so that a promoted
broker is built as any master is. Writes stop before anything else happens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from turbopump.broker.config import Role
from turbopump.broker.message_writer import MessageWriter
from turbopump.broker.replication.claims import Ask, Found
from turbopump.broker.replication.mastership import Mastership
from turbopump.broker.replication.roles import Verdict, is_newer
from turbopump.errors import NetworkError, RemoteError, WireError
from turbopump.message import PhysicalOffset
from turbopump.store.store import Store
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import request
from turbopump.wire.mastership import (
    FenceBroker,
    FenceBrokerAnswer,
    MasterClaim,
    PromoteBrokerAnswer,
)

_log = logging.getLogger(__name__)

CHECK_MS = 10_000
"""How often a master with slaves asks name servers whether it was replaced."""
UNCONFIRMED_MS = 1000
FENCE_MS = 5000
"""How often the previous master is notified that it was replaced, until it confirms."""
CATCH_UP_MS = 7000
"""How long a promotion waits for what a fenced master has yet to send."""

_FENCE_TIMEOUT_MS = 3000
_POLL_MS = 50


@dataclass(eq=False, kw_only=True)
class RoleChanges:
    """Changes the role of one broker.

    ``restart`` is called when a new role is recorded, ``on_confirmed`` when refused writes become
    permitted. ``is_followed`` returns whether a slave has the whole log.
    """

    mastership: Mastership
    writes: MessageWriter
    store: Store
    settle: Callable[[], Awaitable[None]]
    address: str
    broker_id: int
    master_address: Callable[[], str]
    is_followed: Callable[[], bool]
    ask: Ask
    on_confirmed: Callable[[], None]
    restart: Callable[[], None]

    def __post_init__(self) -> None:
        self._changing = asyncio.Lock()
        self._is_over = False

    @property
    def epoch(self) -> int:
        return self.mastership.record.epoch

    # --- by operators -----------------------------------------------------------------------------

    async def promote(self, role: Role, *, is_forced: bool = False) -> PromoteBrokerAnswer:
        """Become master: claim, fence the previous one, copy what it still has, record the role.

        Raises RemoteError on a master, if name servers do not store the claim and, unless forced,
        on a slave whose log begins later than its master's, or ends before that begins; and
        WriteFailed. Then nothing has changed here, and unless the disk failed during the copy,
        nowhere.
        """
        async with self._changing:
            if self._is_over or (self.broker_id == 0 and self.writes.suspension is None):
                raise RemoteError.system(f"this broker is master already, with epoch {self.epoch}")
            if not is_forced:
                self._refuse_late_begin()
            # Before the old master is fenced, all that can refuse has agreed.
            await self.mastership.save(self.mastership.record)
            claim, found = await self.mastership.claim(self.address, self.broker_id)
            masters = self._old_masters(found)
            ends = await asyncio.gather(*(self._fenced_end(each, claim) for each in masters))
            master_end = next((end for end in ends if end is not None), None)
            if master_end is not None:
                last = master_end
                await _catch_up(lambda: self.store.written_end >= last)
            end = self.store.written_end
            unfenced = [
                each for each, its_end in zip(masters, ends, strict=True) if its_end is None
            ]
            record = self.mastership.promoted(
                claim, role, ";".join(unfenced), has_fenced=master_end is not None
            )
            await self.mastership.save(record)
            self._is_over = True
        _log.warning("promoted to %s with epoch %d, log end %d", role.value, claim.epoch, end)
        self.restart()
        return PromoteBrokerAnswer(
            epoch=claim.epoch,
            log_end=end,
            missing_bytes=None if master_end is None else max(0, master_end - end),
            old_master=masters[0] if masters else None,
        )

    def _refuse_late_begin(self) -> None:
        begin, end = self.store.min_offset, self.store.written_end
        master_begin = self.mastership.record.master_begin
        if master_begin is None or begin <= master_begin <= end:
            return
        problem, lost = f"begins at {begin}, its master's at {master_begin}", "the messages between"
        if end < master_begin:
            problem = f"ends at {end}, before its master's begins at {master_begin}"
            lost = "all messages that the master has"
        raise RemoteError.system(
            f"this slave's log {problem}: {lost} would be lost; promote another slave, or add"
            " --force to lose them"
        )

    def _old_masters(self, found: Found) -> list[str]:
        """Return the addresses of masters to fence, the last one promoted first.

        This slave may follow another one, if that one was promoted just before. One with a pending
        claim may still become master. A master that is not confirmed may not have fenced all.
        """
        claimed = "" if found.master is None else found.master.master_address
        pending = [claim.master_address for claim in found.claims if claim.pending]
        known = (claimed, self.master_address(), *pending, *self.mastership.unfenced)
        return [each for each in dict.fromkeys(known) if each not in ("", self.address)]

    async def fence(self, claim: MasterClaim) -> PhysicalOffset:
        """Refuse writes, because another broker becomes master; return where the log ends.

        Raises RemoteError if the claim is not newer than what this broker knows, implausible, or of
        a promotion that has ended.
        """
        async with self._changing:
            own = self.mastership.own_claim(self.address)
            has_claim = self.broker_id == 0 or self.mastership.is_promoted
            if claim.epoch < own.epoch or (has_claim and not is_newer(claim, own)):
                other = f"epoch {claim.epoch} of {claim.master_address}"
                text = f"{other} is not newer than {own.epoch}, the one known here"
                raise RemoteError.system(text)
            await self.mastership.check_plausible(claim)
            await self.mastership.check_current(claim)
            if self.broker_id == 0 and not self._is_over:
                await self._demote(claim)
            elif self.mastership.is_promoted:
                # Not a master yet: it starts as a slave instead.
                await self.mastership.save(self.mastership.demoted(claim))
            else:
                self.mastership.note_epoch(claim.epoch)
            return self.store.written_end

    async def _demote(self, claim: MasterClaim) -> None:
        self.writes.suspension = replaced_by(claim)
        await self.mastership.save(self.mastership.demoted(claim))
        self._is_over = True
        _log.warning(
            "replaced by %s with epoch %d: this broker becomes a slave",
            claim.master_address,
            claim.epoch,
        )
        await self.settle()
        self.restart()

    async def _fenced_end(self, master: str, claim: MasterClaim) -> int | None:
        """Fence the old master; return its log end, or None if it does not answer."""
        command = request(RequestCode.FENCE_BROKER, FenceBroker.of(claim))
        try:
            answer = await self.ask(master, command, _FENCE_TIMEOUT_MS)
        except (NetworkError, WireError) as error:
            _log.info("master %s does not answer, tried again later: %s", master, error)
            return None
        if answer.code != ResponseCode.SUCCESS:
            _log.warning("master %s is not fenced: %s", master, answer.remark)
            return None
        return FenceBrokerAnswer.from_ext_fields(answer.ext_fields).log_end

    async def wait_followed(self) -> None:
        """Give slaves time to copy the end of a fenced master's log."""
        await _catch_up(self.is_followed)

    # --- periodic checks --------------------------------------------------------------------------

    def check_interval_ms(self) -> int:
        return CHECK_MS if self.writes.suspension is None else UNCONFIRMED_MS

    def check(self) -> Awaitable[None] | None:
        """Ask name servers whether this master was replaced; call it repeatedly."""
        is_checked = self.mastership.is_at_risk and not self._is_over
        return self._checked() if is_checked else None

    async def _checked(self) -> None:
        judgement = await self.mastership.check(self.address)
        async with self._changing:
            if self._is_over:
                # Promoted or fenced while name servers were asked: their answers are out of date.
                return
            if judgement.verdict is Verdict.REPLACED and judgement.claim is not None:
                await self._demote(judgement.claim)
            elif judgement.verdict is Verdict.ABANDONED:
                await self.mastership.undo()
                self._is_over = True
                self.restart()
            elif judgement.verdict is Verdict.CONFIRMED and self.writes.suspension is not None:
                self.writes.suspension = None
                self.mastership.note_confirmed()
                _log.info("confirmed as master with epoch %d: writes are accepted", self.epoch)
                self.on_confirmed()

    def fence_predecessor(self) -> Awaitable[None] | None:
        """Notify previous masters that they were replaced, unless they know; call it repeatedly.

        Until this broker was confirmed as master, they were not.
        """
        masters = self.mastership.unfenced
        is_due = masters and not self.mastership.record.is_pending
        return self._fence(masters) if is_due else None

    async def _fence(self, masters: Sequence[str]) -> None:
        claim = self.mastership.own_claim(self.address)
        for master in masters:
            if await self._fenced_end(master, claim) is not None:
                _log.info("the master before this one, %s, knows that it was replaced", master)
                self.mastership.note_fenced(master)


async def _catch_up(is_done: Callable[[], bool]) -> None:
    """Wait, up to a limit, until a slave has caught up."""
    for _ in range(CATCH_UP_MS // _POLL_MS):
        if is_done():
            return
        await asyncio.sleep(_POLL_MS / 1000)


def replaced_by(claim: MasterClaim) -> RemoteError:
    """Return why a fenced master refuses writes."""
    remark = f"this broker was replaced by {claim.master_address} with epoch {claim.epoch}"
    return RemoteError(ResponseCode.SERVICE_NOT_AVAILABLE, f"{remark}: send to that")
