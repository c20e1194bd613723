"""The invariants: each is a check that follows a history and names what must not have happened."""

from __future__ import annotations

from collections.abc import Sequence

from turbopump.testing.simulate.checks.commits import CommitsBehindConsumption, CommitsKept
from turbopump.testing.simulate.checks.delays import NeverEarly
from turbopump.testing.simulate.checks.duplicates import BoundedDuplicates
from turbopump.testing.simulate.checks.durability import (
    AcknowledgedKept,
    KeyValuesKept,
    ReadableKept,
)
from turbopump.testing.simulate.checks.failures import NothingUnexpected, RecoveryIdempotent
from turbopump.testing.simulate.checks.outcomes import DeadLettersExact, EveryMessageEnds
from turbopump.testing.simulate.checks.owners import InOrder, OneOwner, RestartMovesNoQueue
from turbopump.testing.simulate.checks.promptness import DeliveredPromptly
from turbopump.testing.simulate.checks.queues import (
    DamageContained,
    ProducerOrder,
    QueuesDense,
)
from turbopump.testing.simulate.checks.replicas import (
    AcknowledgedCopied,
    CopiesKept,
    OneMaster,
    ReplacedMastersSilent,
    ReplicasAgree,
)
from turbopump.testing.simulate.checks.transactions import TransactionsEnd
from turbopump.testing.simulate.history import Follower
from turbopump.testing.simulate.ledger import Ledger


def all_checks(ledger: Ledger) -> Sequence[Follower]:
    """Return every check; the ledger comes first, as they query it, except for comparing ones."""
    # These compare what a broker holds with what it held before, so they see events first.
    before = (ReadableKept, QueuesDense, CopiesKept)
    after = (
        AcknowledgedKept,
        AcknowledgedCopied,
        ReplicasAgree,
        ReplacedMastersSilent,
        OneMaster,
        ProducerOrder,
        DamageContained,
        EveryMessageEnds,
        DeadLettersExact,
        CommitsBehindConsumption,
        CommitsKept,
        OneOwner,
        InOrder,
        RestartMovesNoQueue,
        NeverEarly,
        TransactionsEnd,
        BoundedDuplicates,
        DeliveredPromptly,
        KeyValuesKept,
        RecoveryIdempotent,
        NothingUnexpected,
    )
    return [*(check(ledger) for check in before), ledger, *(check(ledger) for check in after)]
