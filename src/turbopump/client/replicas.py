"""A broker's master and slaves: which to read from, and how to interpret a slave's answer. Pure.

A slave copies the master's log, so it may lag behind it, or begin after it. Only the master knows
that an offset does not exist: if a slave lacks it, ask the master or wait, but never move the
offset.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from turbopump.client.calls import NothingMatched, OffsetIllegal, PullOutcome, RecordsOutcome
from turbopump.client.routes import MASTER_ID
from turbopump.filters.tags import EVERYTHING
from turbopump.wire.bodies import Subscription


class Replica(NamedTuple):
    """One server of a broker name."""

    broker_id: int
    address: str

    @property
    def is_master(self) -> bool:
        return self.broker_id == MASTER_ID


def replica_to_read(addresses: Mapping[int, str], broker_id: int) -> Replica | None:
    """Return the wanted replica, the one after a missing slave, or any; None if there is none."""
    for wanted in (broker_id, broker_id + 1) if broker_id != MASTER_ID else (MASTER_ID,):
        if wanted in addresses:
            return Replica(wanted, addresses[wanted])
    return next((Replica(*each) for each in addresses.items()), None)


def first_slave_id(addresses: Mapping[int, str]) -> int:
    """Return the id of the first slave, or the master's if there is none."""
    return min((each for each in addresses if each != MASTER_ID), default=MASTER_ID)


def is_refused(outcome: PullOutcome | RecordsOutcome, asked: int) -> bool:
    """Whether only a slave answers this way: ask another replica for the same offset.

    From a server that was the master, it means that it was replaced.
    """
    return isinstance(outcome, NothingMatched) and outcome.next_offset <= asked


def lacks_offset(outcome: PullOutcome | RecordsOutcome, asked: int, wanted: Subscription) -> bool:
    """Whether a slave's answer to a pull only says that it lacks the requested offset."""
    match outcome:
        case OffsetIllegal():
            return True
        case NothingMatched(next_offset=next_offset):
            # Every message matches `*`: those skipped were deleted or are damaged.
            return next_offset <= asked or wanted.sub_string == EVERYTHING
        case _:
            return False
