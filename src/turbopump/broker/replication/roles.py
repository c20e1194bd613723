"""Which broker is master: epochs, their records, and what follows from them. Without IO.

Each promotion gives a broker name a new epoch. The promoted broker's claim to it is a key-value of
every name server, Apache's included: a returning master reads it before it accepts the first write,
and becomes a slave if another broker has a newer epoch. A claim counts when more than half of the
name servers have exactly it, so that two brokers cannot both find enough of them. It is pending
until the promoted broker is a master; a pending claim replaces no master, and a master removes one
that is abandoned. The promoted broker becomes master only if its claim was not removed, or is final
somewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from msgspec import Struct
from msgspec.structs import replace as replaced

from turbopump.broker.config import BrokerConfig, Role
from turbopump.wire.mastership import MasterClaim
from turbopump.wire.schema import I64, Body

MASTER_ROLES = (Role.ASYNC_MASTER.value, Role.SYNC_MASTER.value)


class RoleRecord(Body, frozen=True, kw_only=True):
    """The file (brokerRole.json): what a broker has become since it was configured."""

    epoch: I64 = 0
    """The newest known epoch of its broker name; 0 before the first promotion."""
    has_slaves: bool = False
    """Whether a slave has ever followed it: it may have been replaced while it was away."""
    role: str = ""
    """Its role in place of the configured one; empty while the configured one counts."""
    broker_id: I64 = 0
    configured_role: str = ""
    """What was configured then. A configuration changed since then takes precedence."""
    configured_id: I64 = 0
    former_id: I64 = 0
    token: str = ""
    """Of a promoted broker: the id that it had as a slave, and its claim's token."""
    master_begin: I64 | None = None
    """Of a slave: where its master's log began, as last known."""
    master_role: str = ""
    """Of a slave: its master's role, as last known."""
    unfenced: str = ""
    """Of a promoted broker: the addresses of previous masters that have not confirmed yet that they
    refuse writes, joined by ";"; empty if all have."""
    is_pending: bool = False
    """Of a promoted broker: whether name servers have never confirmed that it is master."""
    has_fenced: bool = False
    """Of a promoted broker: whether its previous masters are known, and all refuse writes."""
    may_be_final: bool = False
    """Of a promoted broker: whether a name server may have its final claim, even one that did not
    answer."""


class Verdict(Enum):
    """Whether a master may accept writes."""

    CONFIRMED = "confirmed"
    UNCONFIRMED = "unconfirmed"
    """Too few name servers answered to know."""
    REPLACED = "replaced"
    """Another broker has a newer epoch."""
    ABANDONED = "abandoned"
    """Its promotion was not completed before its claim was removed."""


class Judgement(Struct, frozen=True):
    """A verdict, and the claim that it follows from, if there is one."""

    verdict: Verdict
    claim: MasterClaim | None = None


def judge(own: MasterClaim, answers: Sequence[MasterClaim | None], count: int) -> Judgement:
    """Decide by the claims of the name servers that answered; None for one without a claim.

    ``count`` is the number of name servers; with none, no other claim can be found either.
    """
    claims = (claim for claim in answers if claim is not None and not claim.pending)
    newest = max(claims, key=rank, default=None)
    if newest is not None and is_newer(newest, own):
        return Judgement(Verdict.REPLACED, newest)
    having = sum(is_own(own, claim) for claim in answers)
    return Judgement(Verdict.CONFIRMED if is_majority(having, count) else Verdict.UNCONFIRMED)


def is_majority(having: int, count: int) -> bool:
    """Whether enough of all name servers have a claim; without any, none are needed."""
    return having > count // 2 or not count


def is_of(own: MasterClaim, claim: MasterClaim) -> bool:
    """Whether a claim is of the same promotion as the own one, pending or not."""
    return (claim.epoch, claim.token) == (own.epoch, own.token)


def is_own(own: MasterClaim, claim: MasterClaim | None) -> bool:
    """Whether a name server has exactly the own claim, or none for a broker never promoted."""
    if not own.epoch:
        return claim is None or not claim.epoch
    return claim == own


def is_newer(claim: MasterClaim, own: MasterClaim) -> bool:
    """Whether a claim is another broker's, and takes precedence over the own one.

    All brokers reach the same decision between two of the same epoch, which only name servers that
    have lost their key-values leave behind.
    """
    return claim.token != own.token and rank(claim) > rank(own)


def rank(claim: MasterClaim) -> tuple[int, str]:
    """Return the order of claims: the highest takes precedence."""
    return claim.epoch, claim.token if claim.epoch else ""


def effective(config: BrokerConfig, record: RoleRecord) -> BrokerConfig:
    """Return a configuration with the role in effect, configured or recorded."""
    if not is_in_effect(config, record):
        return config
    identity = replace(config.identity, role=Role(record.role), broker_id=record.broker_id)
    replication = config.replication
    if config.registration.sources:
        # A configured master may have been replaced: name servers know the current one.
        replication = replace(replication, master_address="")
    return replace(config, identity=identity, replication=replication)


def is_in_effect(config: BrokerConfig, record: RoleRecord) -> bool:
    """Whether the recorded role counts: not after the configured one was changed."""
    configured = (config.identity.role.value, config.identity.broker_id)
    is_same = configured == (record.configured_role, record.configured_id)
    return bool(record.role) and is_same


def promoted(
    config: BrokerConfig,
    record: RoleRecord,
    claim: MasterClaim,
    role: Role,
    unfenced: str,
    *,
    has_fenced: bool = False,
) -> RoleRecord:
    """Return the record of a broker that becomes master; ``config`` is the configured one.

    A promotion that is repeated before it was completed has fenced what the first one had.
    """
    is_repeated = is_in_effect(config, record) and record.is_pending
    return replaced(
        _recorded(config, record, claim.epoch, role, 0),
        former_id=claim.former_id,
        token=claim.token,
        unfenced=unfenced,
        has_fenced=not unfenced and (has_fenced or (is_repeated and record.has_fenced)),
        is_pending=bool(config.registration.sources),
    )


def demoted(config: BrokerConfig, record: RoleRecord, claim: MasterClaim) -> RoleRecord:
    """Return the record of a master that was replaced: it takes the place of its successor."""
    broker_id = claim.former_id or config.identity.broker_id or 1
    role = effective(config, record).identity.role
    before = record.master_role if role is Role.SLAVE else role.value
    found = _recorded(config, record, claim.epoch, Role.SLAVE, broker_id)
    return replaced(found, master_role=before)


def undone(config: BrokerConfig, record: RoleRecord) -> RoleRecord:
    """Return the record of a broker whose promotion was abandoned: the slave that it was."""
    configured = config.identity
    if configured.is_slave and configured.broker_id == record.former_id:
        return RoleRecord(epoch=record.epoch, has_slaves=record.has_slaves, master_role=record.role)
    broker_id = record.former_id or configured.broker_id or 1
    found = _recorded(config, record, record.epoch, Role.SLAVE, broker_id)
    return replaced(found, master_role=record.role)


def _recorded(
    config: BrokerConfig, record: RoleRecord, epoch: int, role: Role, broker_id: int
) -> RoleRecord:
    return RoleRecord(
        epoch=epoch,
        has_slaves=record.has_slaves,
        role=role.value,
        broker_id=broker_id,
        configured_role=config.identity.role.value,
        configured_id=config.identity.broker_id,
    )
