"""Searches of the store, one slice at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future

from turbopump.broker.searches import Searches
from turbopump.store.outcomes import Cold
from turbopump.testing import virtual_time


def fetch(_: Cold) -> Future[None]:
    raise AssertionError("nothing is cold")


def search(slices: int, *found: str) -> Iterator[str | None]:
    for _ in range(slices):
        yield None
    yield from found


@virtual_time()
async def test_what_is_found_without_a_search_waits_for_none() -> None:
    searches = Searches(fetch)
    long = [asyncio.ensure_future(searches.result(search(100, "late"))) for _ in range(3)]
    await asyncio.sleep(0)
    assert await searches.result(search(0, "immediately")) == "immediately"
    assert not any(each.done() for each in long)
    assert [await searches.result(search(slices)) for slices in (0, 2)] == [None, None]
    assert await asyncio.gather(*long) == ["late"] * 3
