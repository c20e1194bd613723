"""Telling a broker how far a group has come in a queue."""

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
    """Tell how far a group has come, also in a topic that was deleted.

    A broker without the topic, or without the group, has nothing of the group in it, which is as
    good as the beginning.
    ``group`` is its name as brokers know it.
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
        # Of a topic that was deleted there is no route, though its broker may be there.
        address = await master_address(session, queue.broker)
        timeout_ms = session.config.request_timeout_ms
        inside = reader.wire_queue(queue)
        # Answered, since the queue leaves the checkpoint once it is noted.
        await calls.commit_offset(
            session, address, group, inside, offset, timeout_ms, is_oneway=False
        )
