"""What an outcome of a read means to the consumer, and where it should pull next. Pure."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from turbopump.broker.config import BrokerConfig
from turbopump.store import outcomes
from turbopump.store.outcomes import ReadOutcome
from turbopump.wire.bodies import GroupConfig

MASTER_ID = 0


class Status(Enum):
    """What an outcome means for the puller."""

    FOUND = "found"
    RETRY = "nothing here: pull again from the next offset"
    NOT_FOUND = "nothing yet"
    MOVED = "no such offset: continue at the returned one"


STATUS: dict[type[ReadOutcome], Status] = {
    outcomes.Found: Status.FOUND,
    outcomes.NoMatch: Status.RETRY,
    outcomes.MessagesRemoved: Status.RETRY,
    outcomes.MessageDamaged: Status.RETRY,
    outcomes.QueueUnknown: Status.NOT_FOUND,
    outcomes.QueueEmpty: Status.NOT_FOUND,
    outcomes.OffsetTooSmall: Status.MOVED,
    outcomes.UpToDate: Status.NOT_FOUND,
    outcomes.OffsetTooLarge: Status.MOVED,
    outcomes.UnitsMissing: Status.NOT_FOUND,
}

_EMPTY = (outcomes.QueueEmpty, outcomes.QueueUnknown)
_UNREADABLE = (outcomes.MessagesRemoved, outcomes.MessageDamaged)
"""Outcomes that skip messages which another copy of the log may still have."""
_CORRECTED = (
    *_EMPTY,
    *_UNREADABLE,
    outcomes.OffsetTooSmall,
    outcomes.OffsetTooLarge,
    outcomes.UnitsMissing,
)
"""Outcomes with another offset than the requested one."""


class ReadRules(Struct, frozen=True):
    """How the role and the settings of a broker shape its answers to pulls."""

    suggests_slaves: bool = False
    """Whether group settings choose the broker to pull from; otherwise it is the master."""
    corrects_offsets: bool = True
    """Whether an offset outside a queue is corrected. A slave's copy may end before the master's or
    begin after it, so a slave normally leaves that to the master."""

    @classmethod
    def of(cls, config: BrokerConfig) -> ReadRules:
        reads = config.slave_reads
        return cls(reads.enabled, not config.identity.is_slave or reads.corrects_offsets)

    def status_of(self, outcome: ReadOutcome, asked: int) -> Status:
        """Return the meaning of an outcome for a pull from an offset."""
        status = _status_on_master(outcome, asked)
        # The client pulls again with the same offset, from the master.
        is_unknown_here = status is Status.MOVED and not self.corrects_offsets
        return Status.RETRY if is_unknown_here else status

    def reported(self, outcome: ReadOutcome, asked: int) -> ReadOutcome:
        """Return an outcome as it is reported to a pull from an offset."""
        if self.corrects_offsets or not isinstance(outcome, _CORRECTED):
            return outcome
        return replace(outcome, next_offset=asked)

    def suggested_broker_id(self, group: GroupConfig, outcome: ReadOutcome, asked: int) -> int:
        """Return the id of the broker to pull from next."""
        if not self.corrects_offsets and _is_missing(outcome, asked):
            return group.broker_id
        if not self.suggests_slaves:
            return MASTER_ID
        is_slow = getattr(outcome, "suggest_slave", False)
        return group.which_broker_when_consume_slowly if is_slow else group.broker_id


def _is_missing(outcome: ReadOutcome, asked: int) -> bool:
    """Whether this copy of the log does not have what was asked for."""
    is_moved = _status_on_master(outcome, asked) is Status.MOVED
    return is_moved or isinstance(outcome, _UNREADABLE)


def _status_on_master(outcome: ReadOutcome, asked: int) -> Status:
    if asked and isinstance(outcome, _EMPTY):
        # The queue is empty, so no client can have come that far.
        return Status.MOVED
    return STATUS[type(outcome)]
