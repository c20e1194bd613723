"""Role changes: promotion, fencing, and the checks of both.

A broker changes its role by recording it and restarting within its process, so that a promoted
broker is built as any master is. Writes stop before anything else happens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from msgspec import Struct

from turbopump.broker.config import Role
from turbopump.broker.replication.mastership import Ask, Mastership
from turbopump.broker.replication.roles import Verdict, is_newer
from turbopump.errors import NetworkError, RemoteError, WireError
from turbopump.message import PhysicalOffset
from turbopump.store.store import Store
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import request
from turbopump.wire.mastership import FenceBroker, FenceBrokerAnswer, MasterClaim

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


class Writes(Protocol):
    """Operations of `turbopump.broker.message_writer.MessageWriter` used here."""

    suspension: RemoteError | None


class Promotion(Struct, frozen=True, kw_only=True):
    """The result of a promotion."""

    epoch: int
    log_end: int
    """Where the new master's log ends."""
    missing_bytes: int | None
    """Bytes that the old master has and this one lacks; None if it could not be asked."""
    old_master: str
    """Its address; empty if unknown."""


class RoleChanges:
    """Changes the role of one broker.

    ``restart`` is called when a new role is recorded, ``on_confirmed`` when refused writes become
    permitted. ``is_followed`` returns whether a slave has the whole log.
    """

    def __init__(
        self,
        *,
        mastership: Mastership,
        writes: Writes,
        store: Store,
        settle: Callable[[], Awaitable[None]],
        address: str,
        broker_id: int,
        master_address: Callable[[], str],
        is_followed: Callable[[], bool],
        ask: Ask,
        on_confirmed: Callable[[], None],
        restart: Callable[[], None],
    ) -> None:
        self._mastership = mastership
        self._writes = writes
        self._store = store
        self._settle = settle
        self._address = address
        self._broker_id = broker_id
        self._master_address = master_address
        self._is_followed = is_followed
        self._ask = ask
        self._on_confirmed = on_confirmed
        self._restart = restart
        self._changing = asyncio.Lock()
        self._is_over = False

    @property
    def epoch(self) -> int:
        return self._mastership.record.epoch

    # --- by operators -----------------------------------------------------------------------------

    async def promote(self, role: Role) -> Promotion:
        """Become master: fence the previous one, copy what it still has, and record the role.

        Raises RemoteError on a master, and WriteFailed; then nothing has changed here.
        """
        async with self._changing:
            if self._is_over or (self._broker_id == 0 and self._writes.suspension is None):
                text = f"this broker is master already, with epoch {self.epoch}"
                raise RemoteError(ResponseCode.SYSTEM_ERROR, text)
            newest = await self._mastership.newest_claim()
            claim = self._mastership.next_claim(newest, self._address, self._broker_id)
            masters = self._old_masters(newest)
            ends = await asyncio.gather(*(self._fenced_end(each, claim) for each in masters))
            master_end = next((end for end in ends if end is not None), None)
            if master_end is not None:
                await self._catch_up(master_end)
            end = self._store.written_end
            unfenced = [
                each for each, its_end in zip(masters, ends, strict=True) if its_end is None
            ]
            record = self._mastership.promoted(claim, role, ";".join(unfenced))
            await self._mastership.save(record)
            self._is_over = True
        _log.warning("promoted to %s with epoch %d, log end %d", role.value, claim.epoch, end)
        self._restart()
        return Promotion(
            epoch=claim.epoch,
            log_end=end,
            missing_bytes=None if master_end is None else max(0, master_end - end),
            old_master=masters[0] if masters else "",
        )

    def _old_masters(self, newest: MasterClaim | None) -> list[str]:
        """Return the addresses of masters to fence, the last one promoted first.

        This slave may follow another one, if that one was promoted just before.
        """
        claimed = "" if newest is None else newest.master_address
        known = (claimed, self._master_address())
        return [each for each in dict.fromkeys(known) if each not in ("", self._address)]

    async def fence(self, claim: MasterClaim) -> PhysicalOffset:
        """Refuse writes, because another broker becomes master; return where the log ends.

        Raises RemoteError if the claim is not newer than what this broker knows.
        """
        async with self._changing:
            own = self._mastership.own_claim(self._address)
            if claim.epoch < own.epoch or (self._broker_id == 0 and not is_newer(claim, own)):
                other = f"epoch {claim.epoch} of {claim.master_address}"
                text = f"{other} is not newer than {own.epoch}, the one known here"
                raise RemoteError(ResponseCode.SYSTEM_ERROR, text)
            if self._broker_id == 0 and not self._is_over:
                await self._demote(claim)
            else:
                self._mastership.note_epoch(claim.epoch)
            return self._store.written_end

    async def _demote(self, claim: MasterClaim) -> None:
        self._writes.suspension = replaced_by(claim)
        await self._mastership.save(self._mastership.demoted(claim))
        self._is_over = True
        _log.warning(
            "replaced by %s with epoch %d: this broker becomes a slave",
            claim.master_address,
            claim.epoch,
        )
        await self._settle()
        self._restart()

    async def _fenced_end(self, master: str, claim: MasterClaim) -> int | None:
        """Fence the old master; return its log end, or None if it does not answer."""
        command = request(RequestCode.FENCE_BROKER, FenceBroker.of(claim))
        try:
            answer = await self._ask(master, command, _FENCE_TIMEOUT_MS)
        except (NetworkError, WireError) as error:
            _log.info("master %s does not answer, tried again later: %s", master, error)
            return None
        if answer.code != ResponseCode.SUCCESS:
            _log.warning("master %s is not fenced: %s", master, answer.remark)
            return None
        return FenceBrokerAnswer.from_ext_fields(answer.ext_fields).log_end

    async def _catch_up(self, end: int) -> None:
        for _ in range(CATCH_UP_MS // _POLL_MS):
            if self._store.written_end >= end:
                return
            await asyncio.sleep(_POLL_MS / 1000)

    async def wait_followed(self) -> None:
        """Give slaves time to copy the end of a fenced master's log."""
        for _ in range(CATCH_UP_MS // _POLL_MS):
            if self._is_followed():
                return
            await asyncio.sleep(_POLL_MS / 1000)

    # --- periodic checks --------------------------------------------------------------------------

    def check_interval_ms(self) -> int:
        return CHECK_MS if self._writes.suspension is None else UNCONFIRMED_MS

    def check(self) -> Awaitable[None] | None:
        """Ask name servers whether this master was replaced; call it repeatedly."""
        is_checked = self._mastership.is_at_risk and not self._is_over
        return self._checked() if is_checked else None

    async def _checked(self) -> None:
        judgement = await self._mastership.check(self._address)
        async with self._changing:
            if self._is_over:
                # Promoted or fenced while name servers were asked: their answers are out of date.
                return
            if judgement.verdict is Verdict.REPLACED and judgement.claim is not None:
                await self._demote(judgement.claim)
            elif judgement.verdict is Verdict.CONFIRMED and self._writes.suspension is not None:
                self._writes.suspension = None
                _log.info("confirmed as master with epoch %d: writes are accepted", self.epoch)
                self._on_confirmed()

    def fence_predecessor(self) -> Awaitable[None] | None:
        """Notify previous masters that they were replaced, unless they know; call it repeatedly."""
        masters = self._mastership.unfenced
        return self._fence(masters) if masters else None

    async def _fence(self, masters: Sequence[str]) -> None:
        claim = self._mastership.own_claim(self._address)
        for master in masters:
            if await self._fenced_end(master, claim) is not None:
                _log.info("the master before this one, %s, knows that it was replaced", master)
                self._mastership.note_fenced(master)


def replaced_by(claim: MasterClaim) -> RemoteError:
    """Return why a fenced master refuses writes."""
    remark = f"this broker was replaced by {claim.master_address} with epoch {claim.epoch}"
    return RemoteError(ResponseCode.SERVICE_NOT_AVAILABLE, f"{remark}: send to that")
