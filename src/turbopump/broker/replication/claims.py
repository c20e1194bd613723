"""The claims to one broker name that name servers have: read, and written by compare-and-set.

Apache's name servers cannot compare. There, two brokers that write at the same time are told apart
by waiting: whoever reads its own claim back, and again after `SETTLE_MS`, was the last to write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from turbopump.broker.replication.roles import is_of, is_own, rank
from turbopump.clock import Clock
from turbopump.errors import NetworkError, WireError
from turbopump.wire import headers
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request
from turbopump.wire.mastership import CLAIMS_NAMESPACE, MasterClaim, parse_claim

_log = logging.getLogger(__name__)

CHECK_TIMEOUT_MS = 3000

WRITE_MS = 2 * CHECK_TIMEOUT_MS
"""A write counts if it is read back within this time of the read that it was decided by."""

SETTLE_MS = WRITE_MS + 1000
"""How long a claim must stay on a name server that cannot compare until it counts.

Longer than another write can take that was decided before this one was visible.
"""

SEND_MS = SETTLE_MS - CHECK_TIMEOUT_MS
"""A write is not sent later than this after the read that it was decided by.

As when the process was suspended in between: another claim may have settled by then.
"""

ABANDONED_MS = 30_000
"""A pending claim that stays for this long is of a promotion that has ended without result."""

_READ = (ResponseCode.SUCCESS, ResponseCode.QUERY_NOT_FOUND)
_NONE = MasterClaim(epoch=0, token="", master_address="", former_id=0).encode().decode()
"""What stands for no claim: a compare-and-set cannot delete."""

Ask = Callable[[str, Command, int], Awaitable[Command]]
"""Sends a request to an address and waits for the answer; as `ConnectionPool.request` does."""


class Entry(NamedTuple):
    """What one name server has for the broker name."""

    text: str | None
    compares: bool
    """Whether the name server can compare and set."""

    @property
    def claim(self) -> MasterClaim | None:
        return parse_claim(self.text)


class Found(NamedTuple):
    """What the name servers have that answered, by their addresses."""

    asked_ms: int
    entries: Mapping[str, Entry]
    servers: int
    """How many name servers were asked, with those that did not answer."""

    @property
    def newest(self) -> MasterClaim | None:
        """The newest claim, pending or not."""
        return max(self.claims, key=rank, default=None)

    @property
    def master(self) -> MasterClaim | None:
        """The newest claim that is not pending."""
        return max((each for each in self.claims if not each.pending), key=rank, default=None)

    @property
    def claims(self) -> list[MasterClaim]:
        found = (entry.claim for entry in self.entries.values())
        return [claim for claim in found if claim is not None]


class Claims:
    """The claims to a broker name, on all of its name servers."""

    def __init__(
        self, broker_name: str, servers: Callable[[], Sequence[str]], ask: Ask, clock: Clock
    ) -> None:
        self._servers = servers
        self._broker_name = broker_name
        self._ask = ask
        self._clock = clock
        self._since_ms: dict[str, tuple[str | None, int]] = {}
        """By name server: the value that it had last, and since when."""

    @property
    def servers(self) -> Sequence[str]:
        """The current addresses of the name servers; none until all are known."""
        return self._servers()

    async def read(self) -> Found:
        """Read the claims of the name servers that answer."""
        servers = self.servers
        asked_ms = self._clock.uptime_ms()
        key = headers.KvKey(namespace=CLAIMS_NAMESPACE, key=self._broker_name, compare=True)
        query = request(RequestCode.GET_KV_CONFIG, key)
        answers = await asyncio.gather(*(self._try(server, query) for server in servers))
        entries = {
            server: _entry(answer)
            for server, answer in zip(servers, answers, strict=True)
            if isinstance(answer, Command) and answer.code in _READ
        }
        now_ms = self._clock.uptime_ms()
        for server, entry in entries.items():
            if server not in self._since_ms or self._since_ms[server][0] != entry.text:
                self._since_ms[server] = (entry.text, now_ms)
        return Found(asked_ms, entries, len(servers))

    async def write(self, claim: MasterClaim, found: Found) -> dict[str, str]:
        """Write a claim in place of what was found; return by name server why it is not stored.

        A name server that does not answer may have stored it.
        """
        text, entries = claim.encode().decode(), found.entries
        if self._clock.uptime_ms() - found.asked_ms > SEND_MS:
            entries = {server: entry for server, entry in entries.items() if entry.compares}
        answers = await asyncio.gather(
            *(self._try(server, self._put(text, entry.text)) for server, entry in entries.items())
        )
        is_late = self._clock.uptime_ms() - found.asked_ms > WRITE_MS
        problems = dict.fromkeys(found.entries.keys() - entries.keys(), "took too long") | {
            server: "took too long" if is_late and not entry.compares else _problem(answer)
            for (server, entry), answer in zip(entries.items(), answers, strict=True)
        }
        return {server: problem for server, problem in problems.items() if problem}

    async def kept(self, claim: MasterClaim) -> Collection[str]:
        """Return the name servers that have a claim, after the time in which they may lose it."""
        found = await self.read()
        if any(not entry.compares for entry in _having(claim, found).values()):
            await asyncio.sleep(SETTLE_MS / 1000)
            found = await self.read()
        return _having(claim, self.settled(claim, found)).keys()

    async def withdraw(self, claim: MasterClaim, before: Found) -> None:
        """Restore what name servers had before a claim, wherever they have it now."""
        having = _having(claim, await self.read())
        await asyncio.gather(
            *(
                self._try(server, self._put(entry.text or _NONE, claim.encode().decode()))
                for server, entry in before.entries.items()
                # One that stores the claim late compares afterwards.
                if entry.compares or server in having
            )
        )

    async def end(self, own: MasterClaim, found: Found) -> bool:
        """Remove the pending claim of a promotion; return whether no name server can make it final.

        A final claim that was sent before may still be stored, unless the pending one is gone.
        """
        if len(found.entries) < found.servers:
            return False
        pending = [
            (server, entry.text)
            for server, entry in found.entries.items()
            if entry.compares and entry.claim is not None and is_of(own, entry.claim)
        ]
        answers = await asyncio.gather(
            *(self._try(server, self._put(_NONE, text)) for server, text in pending)
        )
        return not any(map(_problem, answers))

    def settled(self, claim: MasterClaim, found: Found) -> Found:
        """Leave out name servers that cannot compare and have had a claim for a short time."""
        return found._replace(
            entries={
                server: entry
                for server, entry in found.entries.items()
                if entry.compares or entry.claim != claim or self._age_ms(server) >= SETTLE_MS
            }
        )

    def replaceable(self, own: MasterClaim, found: Found) -> Found:
        """Leave out name servers that have a master's own claim, or one of a promotion under way.

        Without an epoch, a master has no claim, and only removes abandoned ones.
        """
        return found._replace(
            entries={
                server: entry
                for server, entry in found.entries.items()
                if not is_own(own, entry.claim) and not self._is_under_way(server, entry, own)
            }
        )

    def _is_under_way(self, server: str, entry: Entry, own: MasterClaim) -> bool:
        claim = entry.claim
        is_next = claim is not None and claim.pending and claim.epoch > own.epoch
        return bool(is_next) and self._age_ms(server) < ABANDONED_MS

    def _age_ms(self, server: str) -> int:
        return self._clock.uptime_ms() - self._since_ms[server][1]

    def _put(self, text: str, expected: str | None) -> Command:
        entry = headers.KvEntry(
            namespace=CLAIMS_NAMESPACE,
            key=self._broker_name,
            value=text,
            compare=True,
            expected=expected,
        )
        return request(RequestCode.PUT_KV_CONFIG, entry)

    async def _try(self, server: str, command: Command) -> Command | Exception:
        try:
            return await self._ask(server, command, CHECK_TIMEOUT_MS)
        except (NetworkError, WireError) as error:
            _log.debug("name server %s does not answer: %s", server, error)
            return error


def _entry(answer: Command) -> Entry:
    value = headers.KvValue.from_ext_fields(answer.ext_fields)
    return Entry(value.value, bool(value.compares))


def _having(claim: MasterClaim, found: Found) -> Mapping[str, Entry]:
    return {server: entry for server, entry in found.entries.items() if entry.claim == claim}


def _problem(answer: Command | Exception) -> str:
    """Return why a claim is not stored; empty if it is."""
    if isinstance(answer, Exception):
        return str(answer)
    if answer.code == ResponseCode.KV_VALUE_DIFFERS:
        return "has another claim since: another promotion is under way"
    return "" if answer.code == ResponseCode.SUCCESS else answer.remark or f"code {answer.code}"
