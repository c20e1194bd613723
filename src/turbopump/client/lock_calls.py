"""Requests for queue locks, like those in `calls`."""

from __future__ import annotations

from collections.abc import Iterable

from turbopump.client.calls import Caller, require_success
from turbopump.message import MessageQueue
from turbopump.wire.bodies import LockedQueues, LockQueues
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import Command, request, whole_body


async def lock_queues(
    caller: Caller,
    broker: str,
    client_id: str,
    group: str,
    queues: Iterable[MessageQueue],
    timeout_ms: int,
) -> frozenset[MessageQueue]:
    """Lock queues of one broker for a client; return those that it now holds (41)."""
    command = _command(RequestCode.LOCK_BATCH_MQ, client_id, group, queues)
    answer = require_success(await caller.request(broker, command, timeout_ms))
    return frozenset(LockedQueues.decode(whole_body(answer)).queues)


async def unlock_queues(
    caller: Caller,
    broker: str,
    client_id: str,
    group: str,
    queues: Iterable[MessageQueue],
    timeout_ms: int,
    *,
    is_oneway: bool = True,
) -> None:
    """Release locks (42)."""
    command = _command(RequestCode.UNLOCK_BATCH_MQ, client_id, group, queues)
    if is_oneway:
        await caller.oneway(broker, command, timeout_ms)
    else:
        require_success(await caller.request(broker, command, timeout_ms))


def _command(
    code: RequestCode, client_id: str, group: str, queues: Iterable[MessageQueue]
) -> Command:
    body = LockQueues(client_id=client_id, consumer_group=group, queues=list(queues))
    return request(code, body=body.encode())
