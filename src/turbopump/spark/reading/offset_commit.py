"""Commits a group's offset in a queue, even of a deleted topic."""

from __future__ import annotations

from turbopump.client import calls
from turbopump.client.queue_reader import QueueReader
from turbopump.client.session import Session
from turbopump.errors import NoRoute, RemoteError
from turbopump.message import MessageQueue, QueueOffset
from turbopump.spark.reading.unreadable_queues import master_address
from turbopump.wire.codes import ResponseCode

_NOTHING_KEPT = (ResponseCode.TOPIC_NOT_EXIST, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST)


async def commit(
    session: Session, reader: QueueReader, group: str, queue: MessageQueue, offset: QueueOffset
) -> None:
    """Commit an offset, even of a deleted topic; ``group`` includes the namespace.

    A broker without the topic or the group has no offset, which is equivalent to 0.
    """
    try:
        await _reported(session, reader, group, queue, offset)
    except RemoteError as error:
        if offset or error.code not in _NOTHING_KEPT:
            raise


async def _reported(
    session: Session, reader: QueueReader, group: str, queue: MessageQueue, offset: QueueOffset
) -> None:
    try:
        await reader.commit(queue, offset)
    except NoRoute:
        if offset:
            raise
        # A deleted topic has no route, but its broker may be available.
        address = await master_address(session, queue.broker)
        timeout_ms = session.config.request_timeout_ms
        inside = reader.wire_queue(queue)
        # With a response, because the queue then leaves the checkpoint.
        await calls.commit_offset(
            session, address, group, inside, offset, timeout_ms, is_oneway=False
        )
