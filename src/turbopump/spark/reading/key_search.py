"""Finding messages by key in a broker's index, if it is sure to know them all."""

from __future__ import annotations

from turbopump.client import calls
from turbopump.client.calls import Caller, require_success
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import request, whole_body
from turbopump.wire.headers import QueryMessage
from turbopump.wire.record import MessageView

FOUND_MAX = 32
"""Brokers return at most 64 messages of a key; fewer than this were surely not cut off."""

FOUND_BYTES_MAX = 1024 * 1024
"""Far less than an answer may hold, which would otherwise leave out the rest."""

_END_OF_TIME_MS = 1 << 62
_INDEX_ON = b"messageIndexEnable=true"


async def messages_of(
    caller: Caller, address: str, topic: str, keys: str, timeout_ms: int
) -> list[MessageView] | None:
    """Return messages whose text of keys is ``keys``, None if the index may not know all."""
    if not keys.strip() or not await _has_index(caller, address, timeout_ms):
        return None
    # A message is found under each of its keys: one is enough.
    key = keys.split()[0]
    header = QueryMessage(
        topic=topic,
        key=key,
        max_num=FOUND_MAX,
        begin_timestamp=0,
        end_timestamp=_END_OF_TIME_MS,
    )
    found = await calls.query_messages(caller, address, header, timeout_ms)
    is_whole = len(found) < FOUND_MAX and sum(each.size for each in found) < FOUND_BYTES_MAX
    return found if is_whole else None


async def _has_index(caller: Caller, address: str, timeout_ms: int) -> bool:
    answer = await caller.request(address, request(RequestCode.GET_BROKER_CONFIG), timeout_ms)
    return _INDEX_ON in whole_body(require_success(answer)).splitlines()
