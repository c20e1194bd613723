"""Asking again: a broker that is restarted must not end a query."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

from turbopump.errors import TurbopumpError

T = TypeVar("T")
K = TypeVar("K")

_log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
_LONGEST_FROM = 6


def pause_s(attempt: int) -> float:
    """Return how long to wait after a failed attempt, the first being 0."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * float(1 << min(attempt, _LONGEST_FROM)))


async def patiently(
    call: Callable[[], Awaitable[T]],
    retries: int,
    what: object,
    between: Callable[[], Awaitable[object]] | None = None,
    hopeless: type[TurbopumpError] | tuple[type[TurbopumpError], ...] = (),
) -> T:
    """Call until it succeeds; raises what failed last, or at once what no repetition mends.

    ``between`` is done before each repetition; what it raises does not count.
    """
    for attempt in range(retries):
        try:
            return await call()
        except TurbopumpError as error:
            if not error.retriable or isinstance(error, hopeless):
                raise
            _log.warning("%s: %s; again in %g s", what, error, pause_s(attempt))
        await asyncio.sleep(pause_s(attempt))
        if between is not None:
            await _forgiven(between)
    return await call()


async def _forgiven(call: Callable[[], Awaitable[object]]) -> None:
    try:
        await call()
    except TurbopumpError as error:
        _log.info("not found out: %s", error)


async def of_each(keys: Iterable[K], ask: Callable[[K], Awaitable[T]]) -> dict[K, T]:
    """Ask the same about many things at once; raises the first failure."""
    wanted = list(keys)
    tasks = [asyncio.ensure_future(ask(key)) for key in wanted]
    try:
        return dict(zip(wanted, await asyncio.gather(*tasks), strict=True))
    finally:
        for task in tasks:
            task.cancel()


async def of_those_who_answer(
    keys: Iterable[K], ask: Callable[[K], Awaitable[T]]
) -> tuple[Mapping[K, T], Mapping[K, TurbopumpError]]:
    """Ask the same about many things at once; return answers and, apart, what may be mended."""
    wanted = list(keys)
    answers = await asyncio.gather(*map(ask, wanted), return_exceptions=True)
    found: dict[K, T] = {}
    failed: dict[K, TurbopumpError] = {}
    for key, answer in zip(wanted, answers, strict=True):
        if isinstance(answer, TurbopumpError) and answer.retriable:
            failed[key] = answer
        elif isinstance(answer, BaseException):
            raise answer
        else:
            found[key] = answer
    return found, failed
