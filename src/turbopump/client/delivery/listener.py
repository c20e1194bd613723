"""The user's function and the hooks around it, called in a thread or on the loop."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

from msgspec import Struct

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


class Call(Struct, eq=False):
    """Messages for one call of the listener, and its outcome."""

    messages: Messages
    context: ConsumeContext
    start_ms: int = 1 << 62
    """When the listener got them, by the monotonic clock; far ahead until then."""
    verdict: Verdict | None = None

    @property
    def done(self) -> Verdict:
        """The verdict of a call that was made."""
        assert self.verdict is not None, "the call was made"
        return self.verdict


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

    def call(self, call: Call) -> Verdict:
        """Call a plain function once."""
        self.call_all((call,))
        return call.done

    async def acall(self, call: Call) -> Verdict:
        """Call a coroutine function once."""
        await self.acall_all((call,))
        return call.done

    def call_all(self, calls: Iterable[Call]) -> None:
        """Make calls of a plain function, in a worker thread; each gets its verdict."""
        clock_ms, listen, hooks = self.clock.monotonic_ms, self._listen, self._hooks
        before, now_ms = _calling.set(self), clock_ms()
        try:
            for call in calls:
                call.start_ms = now_ms
                if hooks:
                    self._begin(call)
                try:
                    # A copy: changing its list must not change what is acknowledged.
                    answer = listen(call.messages.copy(), call.context)
                except BaseException as error:  # noqa: BLE001 - the user's code: even sys.exit is an answer
                    now_ms = self._failed(call, error)
                else:
                    now_ms = clock_ms()
                    if answer is _DONE and now_ms == call.start_ms and not hooks:
                        call.verdict = _SUCCESS
                    else:
                        self._answered(call, answer, now_ms)
        finally:
            _calling.reset(before)

    async def acall_all(self, calls: Iterable[Call]) -> None:
        """Make calls of a coroutine function, on the loop; each gets its verdict."""
        clock_ms, listen, hooks = self.clock.monotonic_ms, self._listen, self._hooks
        before, now_ms = _calling.set(self), clock_ms()
        try:
            for call in calls:
                call.start_ms = now_ms
                if hooks:
                    self._begin(call)
                try:
                    answer = await listen(call.messages.copy(), call.context)
                except asyncio.CancelledError as error:
                    if is_being_cancelled():
                        # The consumer is closing and no longer waits; messages are redelivered.
                        self._end(call, ConsumeResult.RETRY_LATER, ConsumeOutcome.EXCEPTION)
                        raise
                    # Something that the listener waited for was cancelled, not the listener.
                    now_ms = self._failed(call, error)
                except BaseException as error:  # noqa: BLE001 - the user's code: even sys.exit is an answer
                    now_ms = self._failed(call, error)
                else:
                    now_ms = clock_ms()
                    if answer is _DONE and now_ms == call.start_ms and not hooks:
                        call.verdict = _SUCCESS
                    else:
                        self._answered(call, answer, now_ms)
        finally:
            _calling.reset(before)

    def _begin(self, call: Call) -> None:
        for hook in self._hooks:
            try:
                hook.before_consume(tuple(call.messages), call.context)
            except BaseException:  # noqa: BLE001 - the user's code
                _log.exception("before_consume of %r failed", hook)

    def _answered(
        self, call: Call, answer: object, now_ms: int, error: BaseException | None = None
    ) -> None:
        """Set the verdict of a call from what the listener returned."""
        spent_ms, context = now_ms - call.start_ms, call.context
        result = answer if isinstance(answer, ConsumeResult) else ConsumeResult.RETRY_LATER
        outcome = outcome_of(result, is_late=spent_ms >= self._timeout_ms)
        is_none = False
        if isinstance(answer, RetryLater | GiveUp):
            context.accept(answer)
        elif error is not None:
            outcome = ConsumeOutcome.EXCEPTION
        elif not isinstance(answer, ConsumeResult):
            _log.warning(
                "the listener of %s returned %r for %s: expected a ConsumeResult, will retry",
                context.group,
                answer,
                call.messages[0].message_id,
            )
            outcome, is_none = ConsumeOutcome.NONE_RETURNED, True
        call.verdict = Verdict(result, spent_ms, error, is_none)
        self._end(call, result, outcome)

    def _failed(self, call: Call, error: BaseException) -> int:
        """Set the verdict of a call that raised; return the time."""
        now_ms = self.clock.monotonic_ms()
        group, queue, first = call.context.group, call.context.queue, call.messages[0].message_id
        if isinstance(error, RetryLater | GiveUp):
            _log.info("the listener of %s: %s: %r", group, first, error)
            self._answered(call, error, now_ms)
        else:
            text = "the listener of %s failed for %s from %s"
            _log.warning(text, group, first, queue, exc_info=error)
            self._answered(call, None, now_ms, error)
        return now_ms

    def _end(self, call: Call, result: ConsumeResult, outcome: ConsumeOutcome) -> None:
        call.context.outcome = outcome
        for hook in self._hooks:
            try:
                hook.after_consume(tuple(call.messages), call.context, result)
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
