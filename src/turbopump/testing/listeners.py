"""Listeners that fail on demand."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, cast

from turbopump.client.delivery.listener import Listen, is_async
from turbopump.client.delivery.results import ConsumeContext, ConsumeResult
from turbopump.errors import InvalidArgument
from turbopump.wire.record import MessageView

Messages = list[MessageView]


class InjectedFailure(Exception):
    """Raised in place of a listener, on a test's demand."""


def failing(
    listener: Listen, times: int, answer: ConsumeResult | BaseException | None = None
) -> Listen:
    """Return a listener that fails ``times`` times before it calls the given one.

    It raises `InjectedFailure`, or raises or returns what is given, without calling the listener.
    It runs where the given one would: in threads, or on the loop.

    ::

        consumer = PushConsumer("billing", failing(handle, times=3), ...)
    """
    if times < 0:
        raise InvalidArgument(f"times must be at least 0, got {times}")
    failure = InjectedFailure("a failure for the test") if answer is None else answer
    # Several threads may fail at the same time: an iterator counts down safely.
    failures = iter([failure] * times)
    call: Callable[[Messages, ConsumeContext], Any] = listener

    def fail() -> ConsumeResult | None:
        failure = next(failures, None)
        if isinstance(failure, BaseException):
            raise failure
        return failure

    def listen(messages: Messages, context: ConsumeContext) -> ConsumeResult | None:
        answer = fail()
        return cast("ConsumeResult | None", call(messages, context)) if answer is None else answer

    async def alisten(messages: Messages, context: ConsumeContext) -> ConsumeResult | None:
        answer = fail()
        if answer is not None:
            return answer
        return await cast("Awaitable[ConsumeResult | None]", call(messages, context))

    wrapper = alisten if is_async(listener) else listen
    return cast("Listen", functools.wraps(listener)(wrapper))
