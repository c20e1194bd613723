"""Who is master of a broker name: the claim that name servers keep, and the requests around it.

All of it is Turbopump's own. Apache RocketMQ's name servers keep the claim too: to them it is one
of any operator's key-values.
"""

from __future__ import annotations

from typing import Self

from msgspec import structs

from turbopump.errors import BodyError
from turbopump.wire.schema import I64, Body, Header

CLAIMS_NAMESPACE = "TURBOPUMP_MASTERS"
"""Of the key-values; the keys are broker names."""


class MasterClaim(Body, frozen=True, kw_only=True):
    """A broker's claim to be master of its broker name."""

    epoch: I64
    """Grows with each promotion; 0 before the first."""
    token: str
    """Made by chance at the promotion: addresses may change."""
    master_address: str
    """Where clients connected to when it was promoted."""
    former_id: I64
    """The id that it had as a slave, which is free for the master before it."""


def parse_claim(text: str | None) -> MasterClaim | None:
    """Read a claim; None for what is none, which somebody else must have put there."""
    try:
        return None if text is None else MasterClaim.decode(text.encode())
    except BodyError:
        return None


class PromoteBroker(Header, frozen=True, kw_only=True):
    """A slave becomes master (91002)."""

    broker_role: str
    """The role that it gets."""


class PromoteBrokerAnswer(Header, frozen=True, kw_only=True):
    """How that went."""

    epoch: I64
    log_end: I64
    """Where its log ends."""
    missing_bytes: I64 | None = None
    """What the old master has beyond that; absent if the old master did not answer."""
    old_master: str | None = None


class FenceBroker(Header, frozen=True, kw_only=True):
    """A master was replaced and takes no more writes (91003)."""

    epoch: I64
    token: str
    master_address: str
    former_id: I64

    @classmethod
    def of(cls, claim: MasterClaim) -> Self:
        return cls(**structs.asdict(claim))

    @property
    def claim(self) -> MasterClaim:
        return MasterClaim(**structs.asdict(self))


class FenceBrokerAnswer(Header, frozen=True, kw_only=True):
    """Where its log ends."""

    log_end: I64
