"""Retries and concurrent requests: a broker restart must not end a query."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import chain
from typing import TypeVar

from turbopump.client.concurrent_calls import IN_FLIGHT_MAX, gather_by_key, limited
from turbopump.errors import TurbopumpError

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

_log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
BACKOFF_MAX_S = 5.0
_LONGEST_FROM = 6


def backoff_s(attempt: int) -> float:
    """Return the backoff after a failed attempt, counted from 0."""
    return min(BACKOFF_MAX_S, FIRST_BACKOFF_S * float(1 << min(attempt, _LONGEST_FROM)))


async def with_retries(
    call: Callable[[], Awaitable[T]],
    retries: int,
    what: object,
    between: Callable[[], Awaitable[object]] | None = None,
    fatal: type[TurbopumpError] | tuple[type[TurbopumpError], ...] = (),
) -> T:
    """Call until it succeeds; raises the last error, or immediately one that retries cannot fix.

    ``between`` is called before each retry; its errors are ignored.
    """
    for attempt in range(retries):
        try:
            return await call()
        except TurbopumpError as error:
            if not error.retriable or isinstance(error, fatal):
                raise
            _log.warning("%s: %s; retrying in %g s", what, error, backoff_s(attempt))
        await asyncio.sleep(backoff_s(attempt))
        if between is not None:
            try:
                await between()
            except TurbopumpError as error:
                _log.info("%s; ignored before a retry", error)
    return await call()


async def gather_all(
    groups: Iterable[V], ask: Callable[[V], Awaitable[Mapping[K, T]]]
) -> dict[K, T]:
    """Call ``ask`` for all groups, many concurrently; merge the results. Raises the first error."""
    each = list(groups)
    found = await gather_by_key(range(len(each)), lambda number: ask(each[number]))
    return dict(chain.from_iterable(part.items() for part in found.values()))


async def gather_available(
    keys: Iterable[K], ask: Callable[[K], Awaitable[T]]
) -> tuple[Mapping[K, T], Mapping[K, TurbopumpError]]:
    """Call ``ask`` for all keys, many concurrently; return results and retriable errors apart."""
    wanted = list(keys)
    ask_limited = limited(ask, IN_FLIGHT_MAX)
    answers = await asyncio.gather(*map(ask_limited, wanted), return_exceptions=True)
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
