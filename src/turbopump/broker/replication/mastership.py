"""A broker's claim to be master: kept in a file, shown to name servers, checked against theirs."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from random import Random

from msgspec.structs import replace

from turbopump.broker.config import BrokerConfig, Role
from turbopump.broker.replication.claims import Ask, Claims, Found
from turbopump.broker.replication.roles import (
    MASTER_ROLES,
    Judgement,
    RoleRecord,
    Verdict,
    demoted,
    effective,
    is_in_effect,
    is_majority,
    is_of,
    judge,
    promoted,
    undone,
)
from turbopump.clock import Clock
from turbopump.errors import RemoteError, WriteFailed
from turbopump.message import PhysicalOffset
from turbopump.tables import Table, TableFile
from turbopump.timeouts import timeout
from turbopump.wire.codes import ResponseCode
from turbopump.wire.mastership import CLAIMS_NAMESPACE, EPOCH_MAX, MasterClaim

_log = logging.getLogger(__name__)

SLAVE_SILENCE_MAX_MS = 30_000
"""A slave asks for tables every 10 s; a master forgets the id of one that does not."""

SLAVE_IDS_MAX = 32
"""As many slaves as may be connected."""

ENDED_MAX = 32
"""Claims that a master remembers as abandoned."""

EPOCH_STEP_MAX = 1000
"""How far an epoch may be ahead of all that a broker knows: it may have missed promotions."""

START_TIMEOUT_MS = 1000
"""How long a start waits for name servers; a master that they do not confirm refuses writes."""


class Mastership:
    """A broker's role after promotions, and whether it still counts."""

    def __init__(
        self,
        config: BrokerConfig,
        file: TableFile,
        ask: Ask,
        chance: Random,
        clock: Clock,
        name_servers: Callable[[], Sequence[str]],
    ) -> None:
        self._config = config
        self._file = file
        self._claims = Claims(config.identity.broker_name, name_servers, ask, clock)
        self._chance = chance
        self._clock = clock
        self._asked_ms: dict[int, int] = {}
        """By slave, when it last asked this master for a table, the latest at the end."""
        self.is_followed: Callable[[], bool] = lambda: False
        """Whether a slave follows the log of this broker; set once there is a log to follow."""
        self._ids_from_master = ""
        self._ended: deque[MasterClaim] = deque(maxlen=ENDED_MAX)
        """The last abandoned claims that this master has removed."""
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
        if judgement.verdict is Verdict.ABANDONED:
            await self.undo()
            return self.load(), None
        if judgement.verdict is not Verdict.CONFIRMED:
            return config, unconfirmed()
        self.note_confirmed()
        return config, None

    @property
    def is_at_risk(self) -> bool:
        """Whether it may have been replaced, and there are name servers to ask."""
        has_history = self.record.has_slaves or self.record.epoch > 0
        return has_history and bool(self._config.registration.sources)

    @property
    def role(self) -> Role:
        """The role that counts."""
        return effective(self._config, self.record).identity.role

    @property
    def was_replaced(self) -> bool:
        """Whether it is a slave because another broker was promoted."""
        record = self.record
        return is_in_effect(self._config, record) and record.role == Role.SLAVE.value

    @property
    def is_promoted(self) -> bool:
        """Whether it is a master because it was promoted, or becomes one with its next start."""
        record = self.record
        return is_in_effect(self._config, record) and record.role != Role.SLAVE.value

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

    async def undo(self) -> None:
        """Record that this broker's promotion was abandoned; raises WriteFailed."""
        text = "the promotion to epoch %d was not completed in time: this broker is a slave again"
        _log.warning(text, self.record.epoch)
        await self.save(undone(self._config, self.record))

    def note_confirmed(self) -> None:
        """Record that the promotion of this broker is complete."""
        if self.record.is_pending:
            self._note(replace(self.record, is_pending=False))

    def note_slave(self, slave_id: int | None) -> None:
        """Note that a slave has asked this broker for a table."""
        if slave_id is None:
            return
        self._asked_ms = {each: self._asked_ms[each] for each in self._asking if each != slave_id}
        while len(self._asked_ms) >= SLAVE_IDS_MAX:
            del self._asked_ms[next(iter(self._asked_ms))]
        self._asked_ms[slave_id] = self._clock.monotonic_ms()
        self.note_following()

    def note_following(self) -> None:
        """Record that this broker has slaves, one of which may replace it while it is away.

        A slave both follows the log and asks for tables: a single request proves nothing.
        """
        if not self.record.has_slaves and self._asking and self.is_followed():
            self._note(replace(self.record, has_slaves=True))

    @property
    def _asking(self) -> list[int]:
        """The slaves that have asked for a table lately, the last one at the end."""
        since_ms = self._clock.monotonic_ms() - SLAVE_SILENCE_MAX_MS
        return [each for each, at_ms in self._asked_ms.items() if at_ms >= since_ms]

    @property
    def slave_ids(self) -> str:
        """The ids of the slaves of this master, or of a slave's last known master."""
        return ",".join(map(str, sorted(self._asking))) or self._ids_from_master

    def note_master_begin(self, position: PhysicalOffset) -> None:
        """Record where the log of a slave's master begins: what the slave keeps."""
        if position != self.record.master_begin:
            self._note(replace(self.record, master_begin=position))

    def note_master_role(self, role: str) -> None:
        """Record the role of a slave's master; empty if it does not say."""
        if role in MASTER_ROLES and role != self.record.master_role:
            self._note(replace(self.record, master_role=role))

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

    async def claim(self, address: str, broker_id: int) -> tuple[MasterClaim, Found]:
        """Make more than half of the name servers store a pending claim, newer than all known.

        Returns the claim, and what they had before. Raises RemoteError if too few store it; those
        then have again what they had before.
        """
        sources = self._config.registration.sources
        if sources and not self._claims.servers:
            raise RemoteError.system(
                f"{';'.join(sources)} has not returned the name servers yet, and more than half of"
                " them must store the claim of this promotion: nothing has changed, retry later"
            )
        found = await self._claims.read()
        claim = self._next_claim(found.newest, address, broker_id)
        problems = await self._claims.write(claim, found)
        kept = set(await self._claims.kept(claim)) - problems.keys()
        servers = self._claims.servers
        if not is_majority(len(kept), len(servers)):
            await self._claims.withdraw(claim, found)
            lacking = (server for server in servers if server not in kept)
            raise _refused(len(servers), {each: _why(each, found, problems) for each in lacking})
        return claim, found

    def _next_claim(self, newest: MasterClaim | None, address: str, broker_id: int) -> MasterClaim:
        """Return a claim that is newer than all that this broker and name servers know.

        Raises RemoteError if there can be none.
        """
        known = max(self.record.epoch, 0 if newest is None else newest.epoch)
        if known >= EPOCH_MAX:
            raise RemoteError.system(
                f"epoch {known} is the last one: stop the brokers of this name, delete their"
                f" config/brokerRole.json and the key-value {self._config.identity.broker_name} in"
                f" {CLAIMS_NAMESPACE} of the name servers, and start the intended master first"
            )
        return MasterClaim(
            epoch=known + 1,
            token=f"{self._chance.getrandbits(64):016x}",
            master_address=address,
            former_id=broker_id,
            pending=True,
        )

    async def check_plausible(self, claim: MasterClaim) -> None:
        """Raise RemoteError for a claim that no promotion can have led to.

        Name servers are asked only if this broker's own record does not make the claim plausible.
        """
        record = self.record
        is_replica = self._config.identity.is_slave or record.has_slaves or record.epoch > 0
        if is_replica and claim.epoch <= record.epoch + EPOCH_STEP_MAX:
            return
        newest = (await self._claims.read()).newest
        known = max(record.epoch, 0 if newest is None else newest.epoch)
        if not is_replica and newest is None:
            raise RemoteError.system(
                f"epoch {claim.epoch} of {claim.master_address} is ignored: no slave has followed"
                " this broker, and name servers know of no promotion"
            )
        if claim.epoch > known + EPOCH_STEP_MAX:
            raise RemoteError.system(
                f"epoch {claim.epoch} of {claim.master_address} is ignored: the newest one known"
                f" here and at the name servers is {known}, and at most {EPOCH_STEP_MAX} more are"
                " plausible"
            )

    async def check_current(self, claim: MasterClaim) -> None:
        """Raise RemoteError for the claim of a promotion that this master has ended.

        A request may arrive long after its sender has given it up. The claim counts all the same if
        it is final somewhere, or if fewer than half of the name servers are known to lack it.
        """
        if not any(is_of(claim, ended) for ended in self._ended):
            return
        found = await self._claims.read()
        having = [each for each in found.claims if is_of(claim, each)]
        lacking = len(found.entries) - len(having)
        if lacking > found.servers // 2 and all(each.pending for each in having):
            raise RemoteError.system(
                f"epoch {claim.epoch} of {claim.master_address} is ignored: that promotion was not"
                " completed in time, and its claim was removed"
            )

    def promoted(
        self, claim: MasterClaim, role: Role, unfenced: str, *, has_fenced: bool
    ) -> RoleRecord:
        record = self.record
        return promoted(self._config, record, claim, role, unfenced, has_fenced=has_fenced)

    def demoted(self, claim: MasterClaim) -> RoleRecord:
        return demoted(self._config, self.record, claim)

    # --- name servers -----------------------------------------------------------------------------

    async def check(self, address: str) -> Judgement:
        """Compare this master's claim with those of the name servers, and show it to them."""
        own = self.own_claim(address)
        if not self._claims.servers:
            # They are configured, but a URL has not returned them yet.
            return Judgement(Verdict.UNCONFIRMED)
        found = await self._claims.read()
        judgement = judge(own, found.claims, found.servers)
        if judgement.verdict is Verdict.REPLACED:
            return judgement
        replaceable = self._claims.replaceable(own, found)
        if self.record.is_pending:
            why_not = await self._may_not_complete(own, found, replaceable)
            if why_not is not None:
                return Judgement(why_not)
            if not await self._note_final():
                return Judgement(Verdict.UNCONFIRMED)
        if replaceable.entries:
            others = (claim for claim in replaceable.claims if not is_of(own, claim))
            self._ended.extend(claim for claim in others if claim.pending)
            await self._claims.write(own, replaceable)
            # Only name servers that have it now count.
            found = await self._claims.read()
        counted = self._claims.settled(own, found).entries.values()
        return judge(own, [entry.claim for entry in counted], found.servers)

    async def _note_final(self) -> bool:
        """Record that the claim may be final somewhere from now on; return whether it is saved."""
        if not self.record.may_be_final:
            self.record = replace(self.record, may_be_final=True)
            self.saving.changes += 1
        await self.saving.try_save()
        return not self.saving.is_dirty

    async def _may_not_complete(
        self, own: MasterClaim, found: Found, replaceable: Found
    ) -> Verdict | None:
        """Return why a promotion must not be completed; None if it may.

        Once its claim was removed from too many name servers, the old master may accept writes, and
        must not be replaced by a promotion that its operator believes to be over. But a final claim
        replaces it in any case: without this broker, there would be no master. So a promotion whose
        claim may be final somewhere is over only when that is known not to be so, and one that has
        fenced the old master is completed unless another one is under way.
        """
        if own in found.claims:
            return None
        count = len(self._claims.servers)
        if is_majority(sum(is_of(own, claim) for claim in found.claims), count):
            return None
        others = len(replaceable.entries) - sum(is_of(own, claim) for claim in replaceable.claims)
        if self.record.has_fenced:
            # Only another promotion, which has failed since, can have replaced the claim.
            return None if is_majority(len(replaceable.entries), count) else Verdict.UNCONFIRMED
        if not is_majority(others, count):
            return Verdict.UNCONFIRMED
        is_over = not self.record.may_be_final or await self._claims.end(own, found)
        return Verdict.ABANDONED if is_over else Verdict.UNCONFIRMED


def unconfirmed() -> RemoteError:
    """Return why a master refuses writes when it cannot know whether it was replaced."""
    return RemoteError(
        ResponseCode.SERVICE_NOT_AVAILABLE,
        "this broker may have been replaced while it was away: it takes writes when more than half"
        " of its name servers have confirmed that it was not",
    )


def _why(server: str, found: Found, problems: Mapping[str, str]) -> str:
    """Return why a name server does not have a claim."""
    if server not in found.entries:
        return "does not answer"
    return problems.get(server) or "has another claim since: another promotion is under way"


def _refused(count: int, problems: Mapping[str, str]) -> RemoteError:
    """Return why a promotion does not take place."""
    reasons = "; ".join(f"{server}: {problem}" for server, problem in problems.items())
    return RemoteError.system(
        f"{count - len(problems)} of {count} name servers store the claim of this promotion, and"
        f" more than half must: nothing has changed, retry when they do ({reasons})"
    )
