"""Ending a transaction: its state, the request to the broker, and hooks."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import Enum
from typing import Protocol

from msgspec import Struct

from turbopump.client.send_hooks import SendHook
from turbopump.message import Message
from turbopump.wire.record import MessageView
from turbopump.wire.sysflag import Transaction as Wire

_log = logging.getLogger(__name__)


class TransactionState(Enum):
    """The state of the local transaction that a message belongs to.

    ::

        def check(message):
            is_stored = orders.exists(message.keys[0])
            return TransactionState.COMMIT if is_stored else TransactionState.UNKNOWN
    """

    COMMIT = int(Wire.COMMIT)
    """It committed: consumers get the message."""

    ROLLBACK = int(Wire.ROLLBACK)
    """It was rolled back and can never commit: the message is discarded."""

    UNKNOWN = int(Wire.NONE)
    """Unknown yet: the broker asks again, by default after a minute and up to 15 times."""


class TransactionEnd(Struct, frozen=True):
    """One decision that a producer sent to a broker, or failed to send."""

    group: str
    transaction_id: str
    message: Message | MessageView
    """As it was sent, or as the broker that asked for the state has it."""

    state: TransactionState
    is_check: bool
    """Whether the broker had asked for it."""

    error: Exception | None = None
    """Why it was not sent; the broker will ask for it."""


class TransactionHook(SendHook, Protocol):
    """A hook that also sees how transactions end; exceptions in `transaction_ended` are logged.

    ::

        class Count:
            def before_send(self, group, sent, queue): ...
            def after_send(self, group, sent, queue, outcome): ...
            def transaction_ended(self, end):
                counts[end.state] += 1
    """

    def transaction_ended(self, end: TransactionEnd) -> None:
        """See a decision after it was sent; the broker does not acknowledge it."""


def report_end(end: TransactionEnd, hooks: Iterable[TransactionHook]) -> None:
    """Log a decision that was not sent, and pass every decision to the hooks."""
    if end.error is not None:
        _log.warning(
            "transaction %s of %s: %s was not sent: %s; the broker will ask for it",
            end.transaction_id,
            end.group,
            end.state.name,
            end.error,
        )
    for hook in hooks:
        try:
            hook.transaction_ended(end)
        except Exception:  # noqa: BLE001 - the local transaction is over and must not seem to fail
            _log.exception("transaction_ended of %r failed", hook)


def state_from(answer: object, function: str, transaction_id: str) -> TransactionState:
    """Return the state from the application's function; any other result means UNKNOWN."""
    if isinstance(answer, TransactionState):
        return answer
    _log.error(
        "%s returned %r for transaction %s: expected a TransactionState, taken as UNKNOWN",
        function,
        answer,
        transaction_id,
    )
    return TransactionState.UNKNOWN


def state_after(error: BaseException | None) -> TransactionState:
    """Return the state of a transaction whose block ended normally or with an exception.

    Interrupts and cancellation may arrive while the database commits: only a check can determine
    the state then.
    """
    if error is None:
        return TransactionState.COMMIT
    return TransactionState.ROLLBACK if isinstance(error, Exception) else TransactionState.UNKNOWN
