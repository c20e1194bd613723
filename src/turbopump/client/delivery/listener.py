"""The user's function and the hooks around it, called in a thread or on the loop."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from turbopump.client.delivery.results import (
    Answer,
    ConsumeContext,
    ConsumeOutcome,
    ConsumeResult,
    GiveUp,
    RetryLater,
    Verdict,
    outcome_of,
)
from turbopump.clock import Clock
from turbopump.wire.record import MessageView

_log = logging.getLogger(__name__)

Messages = list[MessageView]
SyncListen = Callable[[Messages, ConsumeContext], Answer]
AsyncListen = Callable[[Messages, ConsumeContext], Awaitable[Answer]]
Listen = SyncListen | AsyncListen
"""``def handle(messages, context)`` runs in a thread, ``async def`` on the loop.

Without a ``return``, which type checkers find, the outcome is logged and counts as RETRY_LATER.
"""

_DONE = ConsumeResult.SUCCESS
_SUCCESS = Verdict(_DONE)
"""The outcome of most calls: they take less than a millisecond."""

_calling: contextvars.ContextVar[Listener | None] = contextvars.ContextVar("calling", default=None)


class ConsumeHook(Protocol):
    """Sees every call of the listener, where it runs; its exceptions are logged and ignored.

    ::

        class Count:
            def before_consume(self, messages, context): ...
            def after_consume(self, messages, context, result): ...
    """

    def before_consume(self, messages: Sequence[MessageView], context: ConsumeContext) -> None:
        """See messages before the listener gets them."""

    def after_consume(
        self, messages: Sequence[MessageView], context: ConsumeContext, result: ConsumeResult
    ) -> None:
        """See the result of a call; ``context.outcome`` says how the call ended."""


class Listener:
    """Calls the user's function and turns its outcome into a verdict."""

    def __init__(
        self, listen: Listen, hooks: Sequence[ConsumeHook], clock: Clock, timeout_ms: int
    ) -> None:
        self._listen: Callable[..., Any] = listen
        self._hooks = tuple(hooks)
        self.clock = clock
        self._timeout_ms = timeout_ms
        self.is_async = is_async(listen)

    @property
    def is_calling(self) -> bool:
        """Whether the caller runs in this listener's function or hooks."""
        return _calling.get() is self

    def call(self, messages: Messages, context: ConsumeContext, start_ms: int) -> Verdict:
        """Call a plain function, in a worker thread; ``start_ms`` is the monotonic time."""
        before = _calling.set(self)
        if self._hooks:
            self._begin(messages, context)
        try:
            # A copy: what the listener does to its list must not change what is acknowledged.
            answer = self._listen(messages.copy(), context)
        except BaseException as error:  # noqa: BLE001 - the user's code: even sys.exit is an answer
            return self._failed(messages, context, start_ms, error)
        else:
            # As `_answered`, without a call for most messages.
            if answer is _DONE and not self._hooks and self.clock.monotonic_ms() == start_ms:
                return _SUCCESS
            return self._answered(messages, context, start_ms, answer)
        finally:
            _calling.reset(before)

    async def acall(self, messages: Messages, context: ConsumeContext, start_ms: int) -> Verdict:
        """Call a coroutine function, on the loop; ``start_ms`` is the monotonic time."""
        before = _calling.set(self)
        if self._hooks:
            self._begin(messages, context)
        try:
            answer = await self._listen(messages.copy(), context)
        except asyncio.CancelledError as error:
            if not is_being_cancelled():
                # Something that the listener waited for was cancelled, not the listener.
                return self._failed(messages, context, start_ms, error)
            # The consumer is closing and no longer waits; the messages are redelivered.
            self._end(messages, context, ConsumeResult.RETRY_LATER, ConsumeOutcome.EXCEPTION)
            raise
        except BaseException as error:  # noqa: BLE001 - the user's code: even sys.exit is an answer
            return self._failed(messages, context, start_ms, error)
        else:
            # As `_answered`, without a call for most messages.
            if answer is _DONE and not self._hooks and self.clock.monotonic_ms() == start_ms:
                return _SUCCESS
            return self._answered(messages, context, start_ms, answer)
        finally:
            _calling.reset(before)

    def _begin(self, messages: Messages, context: ConsumeContext) -> None:
        for hook in self._hooks:
            try:
                hook.before_consume(tuple(messages), context)
            except BaseException:  # noqa: BLE001 - the user's code
                _log.exception("before_consume of %r failed", hook)

    def _answered(
        self, messages: Messages, context: ConsumeContext, start_ms: int, answer: object
    ) -> Verdict:
        spent_ms = self.clock.monotonic_ms() - start_ms
        if isinstance(answer, ConsumeResult):
            if self._hooks:
                is_late = spent_ms >= self._timeout_ms
                self._end(messages, context, answer, outcome_of(answer, is_late=is_late))
            return Verdict(answer, spent_ms)
        if isinstance(answer, RetryLater | GiveUp):
            context.accept(answer)
            is_late = spent_ms >= self._timeout_ms
            ended = outcome_of(ConsumeResult.RETRY_LATER, is_late=is_late)
            self._end(messages, context, ConsumeResult.RETRY_LATER, ended)
            return Verdict(ConsumeResult.RETRY_LATER, spent_ms)
        _log.warning(
            "the listener of %s returned %r for %s: expected a ConsumeResult, will retry",
            context.group,
            answer,
            messages[0].message_id,
        )
        self._end(messages, context, ConsumeResult.RETRY_LATER, ConsumeOutcome.NONE_RETURNED)
        return Verdict(ConsumeResult.RETRY_LATER, spent_ms, is_none=True)

    def _failed(
        self, messages: Messages, context: ConsumeContext, start_ms: int, error: BaseException
    ) -> Verdict:
        if isinstance(error, RetryLater | GiveUp):
            _log.info("the listener of %s: %s: %r", context.group, messages[0].message_id, error)
            return self._answered(messages, context, start_ms, error)
        _log.warning(
            "the listener of %s failed for %s from %s",
            context.group,
            messages[0].message_id,
            context.queue,
            exc_info=error,
        )
        self._end(messages, context, ConsumeResult.RETRY_LATER, ConsumeOutcome.EXCEPTION)
        spent_ms = self.clock.monotonic_ms() - start_ms
        return Verdict(ConsumeResult.RETRY_LATER, spent_ms, error)

    def _end(
        self,
        messages: Messages,
        context: ConsumeContext,
        result: ConsumeResult,
        outcome: ConsumeOutcome,
    ) -> None:
        context.outcome = outcome
        for hook in self._hooks:
            try:
                hook.after_consume(tuple(messages), context, result)
            except BaseException:  # noqa: BLE001 - the user's code
                _log.exception("after_consume of %r failed", hook)


def is_being_cancelled() -> bool:
    """Whether the running task itself is cancelled, not only something it awaits."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        # In a thread without a loop.
        return False
    return task is not None and task.cancelling() > 0


def is_async(listen: Callable[..., Any]) -> bool:
    """Whether a function is a coroutine function, or an object that is called like one."""
    call = getattr(listen, "__call__", None)  # noqa: B004 - its kind matters, not its presence
    return inspect.iscoroutinefunction(listen) or inspect.iscoroutinefunction(call)
