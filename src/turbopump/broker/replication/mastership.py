"""A broker's claim to be master: kept in a file, shown to name servers, checked against theirs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from random import Random

from msgspec.structs import replace

from turbopump.broker.config import BrokerConfig, Role
from turbopump.broker.replication.roles import (
    Judgement,
    RoleRecord,
    Verdict,
    demoted,
    effective,
    is_in_effect,
    judge,
    promoted,
)
from turbopump.clock import Clock
from turbopump.errors import NetworkError, RemoteError, WireError, WriteFailed
from turbopump.tables import Table, TableFile
from turbopump.timeouts import timeout
from turbopump.wire import headers
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request
from turbopump.wire.mastership import CLAIMS_NAMESPACE, MasterClaim, parse_claim

_log = logging.getLogger(__name__)

CHECK_TIMEOUT_MS = 3000
SLAVE_SILENCE_MAX_MS = 30_000
"""A slave asks for tables every 10 s; a master forgets the id of one that does not."""

START_TIMEOUT_MS = 1000
"""How long a start waits for name servers; a master that they do not confirm refuses writes."""

Ask = Callable[[str, Command, int], Awaitable[Command]]
"""Sends a request to an address and waits for the answer; as `ConnectionPool.request` does."""


class Mastership:
    """A broker's role after promotions, and whether it still counts."""

    def __init__(
        self, config: BrokerConfig, file: TableFile, ask: Ask, chance: Random, clock: Clock
    ) -> None:
        self._config = config
        self._file = file
        self._ask = ask
        self._chance = chance
        self._clock = clock
        self._asked_ms: dict[int, int] = {}
        """By slave, when it last asked this master for a table."""
        self._ids_from_master = ""
        self.record = RoleRecord()
        self.saving = Table("role", file, lambda: self.record.encode())

    def load(self) -> BrokerConfig:
        """Load the record, if any; return the configuration with the role that counts."""
        self.record = self._file.load(RoleRecord) or RoleRecord()
        chosen = effective(self._config, self.record)
        if chosen.identity != self._config.identity:
            _log.warning(
                "this broker is %s with brokerId %d since epoch %d, not %s as configured:"
                " change brokerRole or brokerId to end that",
                chosen.identity.role.value,
                chosen.identity.broker_id,
                self.record.epoch,
                self._config.identity.role.value,
            )
        return chosen

    async def assume(self, address: str) -> tuple[BrokerConfig, RemoteError | None]:
        """Determine this broker's role, before anything is served.

        Returns the configuration with that role and, for a master that may have been replaced while
        it was away, why it must not accept writes yet.
        """
        config = self.load()
        if config.identity.is_slave or not self.is_at_risk:
            return config, None
        try:
            async with timeout(START_TIMEOUT_MS / 1000):
                judgement = await self.check(address)
        except TimeoutError:
            judgement = Judgement(Verdict.UNCONFIRMED)
        if judgement.verdict is Verdict.REPLACED and judgement.claim is not None:
            await self.save(self.demoted(judgement.claim))
            return self.load(), None
        is_confirmed = judgement.verdict is Verdict.CONFIRMED
        return config, None if is_confirmed else unconfirmed()

    @property
    def is_at_risk(self) -> bool:
        """Whether it may have been replaced, and there are name servers to ask."""
        has_history = self.record.has_slaves or self.record.epoch > 0
        return has_history and bool(self._config.registration.name_servers)

    @property
    def was_replaced(self) -> bool:
        """Whether it is a slave because another broker was promoted."""
        record = self.record
        return is_in_effect(self._config, record) and record.role == Role.SLAVE.value

    def own_claim(self, address: str) -> MasterClaim:
        record = self.record
        return MasterClaim(
            epoch=record.epoch,
            token=record.token,
            master_address=address,
            former_id=record.former_id,
        )

    async def save(self, record: RoleRecord) -> None:
        """Save a record; on WriteFailed the previous one counts again."""
        before, self.record = self.record, record
        self.saving.changes += 1
        try:
            await self.saving.save()
        except WriteFailed:
            self.record = before
            self.saving.changes += 1
            raise

    def note_slave(self, slave_id: int | None) -> None:
        """Record that a slave follows this broker, which may replace it while it is away."""
        if slave_id is not None:
            self._asked_ms[slave_id] = self._clock.monotonic_ms()
        if not self.record.has_slaves:
            self._note(replace(self.record, has_slaves=True))

    @property
    def slave_ids(self) -> str:
        """The ids of the slaves of this master, or of a slave's last known master."""
        since_ms = self._clock.monotonic_ms() - SLAVE_SILENCE_MAX_MS
        asking = sorted(each for each, at_ms in self._asked_ms.items() if at_ms >= since_ms)
        return ",".join(map(str, asking)) or self._ids_from_master

    def note_slave_ids(self, ids: str) -> None:
        """Adopt what a slave's master knows of its slaves."""
        self._ids_from_master = ids

    def note_epoch(self, epoch: int) -> None:
        """Adopt the epoch of a slave's master."""
        if epoch > self.record.epoch:
            self._note(replace(self.record, epoch=epoch))

    @property
    def unfenced(self) -> list[str]:
        """Previous masters that may not know that they were replaced."""
        return self.record.unfenced.split(";") if self.record.unfenced else []

    def note_fenced(self, master: str) -> None:
        """Record that a previous master refuses writes."""
        rest = [each for each in self.unfenced if each != master]
        self._note(replace(self.record, unfenced=";".join(rest)))

    def _note(self, record: RoleRecord) -> None:
        self.record = record
        self.saving.changes += 1
        self.saving.save_soon()

    # --- role changes -----------------------------------------------------------------------------

    async def newest_claim(self) -> MasterClaim | None:
        """Return the newest claim that name servers know."""
        claims = (await self._claims_by_server()).values()
        return max(
            (claim for claim in claims if claim is not None),
            key=lambda claim: claim.epoch,
            default=None,
        )

    def next_claim(self, newest: MasterClaim | None, address: str, broker_id: int) -> MasterClaim:
        """Return a claim that is newer than all that this broker and name servers know."""
        known = 0 if newest is None else newest.epoch
        return MasterClaim(
            epoch=max(self.record.epoch, known) + 1,
            token=f"{self._chance.getrandbits(64):016x}",
            master_address=address,
            former_id=broker_id,
        )

    def promoted(self, claim: MasterClaim, role: Role, unfenced: str) -> RoleRecord:
        return promoted(self._config, self.record, claim, role, unfenced)

    def demoted(self, claim: MasterClaim) -> RoleRecord:
        return demoted(self._config, self.record, claim)

    # --- name servers -----------------------------------------------------------------------------

    async def check(self, address: str) -> Judgement:
        """Compare this master's claim with those of the name servers, and show it to them."""
        own, servers = self.own_claim(address), self._config.registration.name_servers
        found = await self._claims_by_server()
        judgement = judge(own, list(found.values()), len(servers))
        if judgement.verdict is Verdict.REPLACED or not own.epoch:
            return judgement
        stale = [server for server, claim in found.items() if claim is None or claim != own]
        await asyncio.gather(*(self._put(server, own) for server in stale))
        # Only name servers that have it now count.
        found = await self._claims_by_server()
        holding = [claim for claim in found.values() if claim is not None and claim != own]
        if holding:
            return judge(own, holding, len(servers))
        return judge(own, [claim for claim in found.values() if claim == own], len(servers))

    async def _claims_by_server(self) -> dict[str, MasterClaim | None]:
        """Return the claims of the name servers that answer."""
        servers = self._config.registration.name_servers
        key = headers.KvKey(namespace=CLAIMS_NAMESPACE, key=self._config.identity.broker_name)
        query = request(RequestCode.GET_KV_CONFIG, key)
        answers = await asyncio.gather(*(self._try(server, query) for server in servers))
        return {
            server: parse_claim(headers.KvValue.from_ext_fields(answer.ext_fields).value)
            for server, answer in zip(servers, answers, strict=True)
            if answer is not None
            and answer.code in (ResponseCode.SUCCESS, ResponseCode.QUERY_NOT_FOUND)
        }

    async def _put(self, server: str, claim: MasterClaim) -> None:
        entry = headers.KvEntry(
            namespace=CLAIMS_NAMESPACE,
            key=self._config.identity.broker_name,
            value=claim.encode().decode(),
        )
        await self._try(server, request(RequestCode.PUT_KV_CONFIG, entry))

    async def _try(self, server: str, command: Command) -> Command | None:
        try:
            return await self._ask(server, command, CHECK_TIMEOUT_MS)
        except (NetworkError, WireError) as error:
            _log.debug("name server %s does not answer: %s", server, error)
            return None


def unconfirmed() -> RemoteError:
    """Return why a master refuses writes when it cannot know whether it was replaced."""
    return RemoteError(
        ResponseCode.SERVICE_NOT_AVAILABLE,
        "this broker may have been replaced while it was away: it takes writes when more than half"
        " of its name servers have confirmed that it was not",
    )
