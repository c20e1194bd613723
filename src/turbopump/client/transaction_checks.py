"""Transaction checks: a broker asks for a transaction's state, the application's function answers.

The function runs off the loop, in a bounded number of threads (or as tasks if it is ``async def``).
Checks that arrive while too many wait are dropped: brokers repeat them.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from turbopump.client.delivery.listener import is_async, is_being_cancelled
from turbopump.client.delivery.workers import TaskWorkers, ThreadWorkers, Workers
from turbopump.client.transaction_ends import TransactionState, state_from
from turbopump.supervisor import Watch
from turbopump.wire.headers import CheckTransactionState
from turbopump.wire.record import MessageView

_log = logging.getLogger(__name__)

Check = Callable[[MessageView], TransactionState | Awaitable[TransactionState]]
"""``def check(message)`` runs in a thread, ``async def`` on the loop."""

CHECKS_MAX = 2000
"""Checks without an answer."""

_CLOSE_WAIT_MS = 3000
"""How long closing waits for a running check."""

_calling: contextvars.ContextVar[TransactionChecks | None] = contextvars.ContextVar(
    "checking", default=None
)


@dataclass(slots=True)
class CheckRequest:
    """A broker's check, and the application's answer."""

    broker_address: str
    header: CheckTransactionState
    message: MessageView
    state: TransactionState = TransactionState.UNKNOWN


class TransactionChecks:
    """Calls the application's function for each check, and passes its results to ``answer``."""

    def __init__(
        self, group: str, check: Check, answer: Callable[[CheckRequest], None], workers: int
    ) -> None:
        self._group = group
        self._check: Callable[[MessageView], Any] = check
        self._answer = answer
        self._waiting = 0
        watch, limits = Watch(f"transaction checks of {group}"), (workers, workers)
        self._workers: Workers[CheckRequest] = (
            TaskWorkers(self._acall_all, self._answer_all, limits, watch)
            if is_async(check)
            else ThreadWorkers(self._call_all, self._answer_all, limits, watch)
        )

    @property
    def is_calling(self) -> bool:
        """Whether the caller is the application's function, or called by it."""
        return _calling.get() is self

    def submit(self, asked: CheckRequest) -> None:
        """Have a check answered as soon as a worker is free."""
        if self._waiting >= CHECKS_MAX:
            _log.warning(
                "transaction %s of %s is not checked now: %d checks wait for an answer already",
                asked.message.message_id,
                self._group,
                self._waiting,
            )
            return
        self._waiting += 1
        self._workers.submit([asked])

    async def close(self) -> None:
        """Drop waiting checks, and wait for running ones."""
        await self._workers.close(_CLOSE_WAIT_MS)

    def _call_all(self, checks: Iterator[CheckRequest]) -> None:
        for asked in checks:
            with self._checking(asked):
                answer = self._check(asked.message)
                asked.state = state_from(answer, "check", asked.message.message_id)

    async def _acall_all(self, checks: Iterator[CheckRequest]) -> None:
        for asked in checks:
            with self._checking(asked):
                answer = await cast("Awaitable[object]", self._check(asked.message))
                asked.state = state_from(answer, "check", asked.message.message_id)

    @contextmanager
    def _checking(self, asked: CheckRequest) -> Iterator[None]:
        """Note that the function runs; log what it raises, and leave the state UNKNOWN."""
        before = _calling.set(self)
        try:
            yield
        except BaseException as error:  # the user's code: even sys.exit must not end a worker
            if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
                raise
            text = "check of %s failed for transaction %s: taken as UNKNOWN"
            _log.exception(text, self._group, asked.message.message_id)
        finally:
            _calling.reset(before)

    def _answer_all(self, finished: Sequence[CheckRequest]) -> None:
        self._waiting -= len(finished)
        for asked in finished:
            self._answer(asked)
