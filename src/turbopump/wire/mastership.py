"""Mastership of a broker name: the claim that name servers store, and the requests around it.

All of it is Turbopump's own. Apache RocketMQ's name servers store the claim too: to them it is an
ordinary key-value.
"""

from __future__ import annotations

from typing import Annotated, Self

from msgspec import Meta, structs

from turbopump.errors import BodyError
from turbopump.wire.schema import I64, Body, Header

CLAIMS_NAMESPACE = "TURBOPUMP_MASTERS"
"""The namespace of the key-values; the keys are broker names."""


EPOCH_MAX = 2**53 - 1
"""The highest epoch; every JSON parser reads it exactly. Higher ones are not claims."""

Epoch = Annotated[int, Meta(ge=0, le=EPOCH_MAX)]

BrokerId = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class MasterClaim(Body, frozen=True, kw_only=True):
    """A broker's claim to be master of its broker name."""

    epoch: Epoch
    """Grows with each promotion; 0 before the first."""
    token: str
    """Random, created at the promotion: addresses may change."""
    master_address: str
    """The address for clients when it was promoted."""
    former_id: BrokerId
    """Its id as a slave, which is free for the former master."""
    pending: bool | None = None
    """True until its promotion has fenced the former master, absent afterwards. A pending claim
    keeps other promotions out, and replaces no master."""


def parse_claim(text: str | None) -> MasterClaim | None:
    """Parse a claim; None if it is invalid, written by another tool."""
    try:
        return None if text is None else MasterClaim.decode(text.encode())
    except BodyError:
        return None


class PromoteBroker(Header, frozen=True, kw_only=True):
    """A slave becomes master (91002)."""

    broker_role: str
    """Its new role."""
    forced: bool | None = None
    """Whether to promote it even if its log begins later than the master's."""


class PromoteBrokerAnswer(Header, frozen=True, kw_only=True):
    """The result of a promotion."""

    epoch: I64
    log_end: I64
    """Where its log ends."""
    missing_bytes: I64 | None = None
    """Bytes that only the old master has; absent if the old master did not answer."""
    old_master: str | None = None


class FenceBroker(Header, frozen=True, kw_only=True):
    """A master was replaced and stops accepting writes (91003)."""

    epoch: Epoch
    token: str
    master_address: str
    former_id: BrokerId

    @classmethod
    def of(cls, claim: MasterClaim) -> Self:
        return cls(
            epoch=claim.epoch,
            token=claim.token,
            master_address=claim.master_address,
            former_id=claim.former_id,
        )

    @property
    def claim(self) -> MasterClaim:
        return MasterClaim(**structs.asdict(self))


class FenceBrokerAnswer(Header, frozen=True, kw_only=True):
    """Where its log ends."""

    log_end: I64
