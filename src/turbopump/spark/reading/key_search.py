"""Finding messages by key in a broker's index, if it is sure to know them all."""

from __future__ import annotations

from turbopump.client.calls import Caller, require_success
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import request, whole_body
from turbopump.wire.headers import QueryMessage
from turbopump.wire.record import MessageView, decode_records

FOUND_MAX = 32
"""Brokers return at most 64 messages of a key; fewer than this were surely not cut off."""

FOUND_BYTES_MAX = 1024 * 1024
"""Far less than an answer may hold, which would otherwise leave out the rest."""

_END_OF_TIME_MS = 1 << 62


async def messages_of(
    caller: Caller, address: str, topic: str, keys: str, timeout_ms: int
) -> list[MessageView] | None:
    """Return messages whose text of keys is ``keys``, None if the index may not know all.

    An index lacks what was stored while it was off or whose index files are gone. Brokers of
    Turbopump know; those that do not say so are taken at their log, not at their index.
    """
    if not keys.strip():
        return None
    # A message is found under each of its keys: one is enough.
    header = QueryMessage(
        topic=topic,
        key=keys.split()[0],
        max_num=FOUND_MAX,
        begin_timestamp=0,
        end_timestamp=_END_OF_TIME_MS,
        wants_index_complete=True,
    )
    command = request(RequestCode.QUERY_MESSAGE, header)
    answer = await caller.request(address, command, timeout_ms)
    found: list[MessageView] = []
    if answer.code != ResponseCode.QUERY_NOT_FOUND:
        found += decode_records(whole_body(require_success(answer)))
    if (answer.ext_fields or {}).get("indexComplete") != "true":
        return None
    is_whole = len(found) < FOUND_MAX and sum(each.size for each in found) < FOUND_BYTES_MAX
    return found if is_whole else None
