"""Stores with known content, written and read by a real broker."""

from __future__ import annotations

import time
from pathlib import Path

from brokers import Client, pulled, views
from torture.cluster import Broker
from torture.damages import Stored
from torture.messages import body_of, message_id
from torture.processes import Processes
from torture.reading import ask
from turbopump.wire import properties
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command
from turbopump.wire.headers import (
    OffsetAnswer,
    QueryConsumerOffset,
    QueueOfTopic,
    SendMessageV2,
    UpdateConsumerOffset,
)
from turbopump.wire.record import MessageView

TOPIC, QUEUES, COUNT, GROUP, COMMITTED = "work", 4, 1000, "readers", 50
SEGMENT_BYTES = 262_144
SETTINGS = {
    "mappedFileSizeCommitLog": str(SEGMENT_BYTES),
    "mappedFileSizeConsumeQueue": "2000",
    "maxIndexNum": "800",
    "defaultTopicQueueNums": str(QUEUES),
    # The machine's load must not matter here.
    "brokerFastFailureEnable": "false",
}
_STALLS_MAX = 3
_SAVED_S = 1.0
"""Longer than the interval at which offsets are written to their file."""


class Stuck(Exception):
    """A queue cannot be read to its end."""


async def send(client: Client, identity: str, queue_id: int) -> Command:
    """Send one message to a queue of the topic."""
    header = SendMessageV2(
        producer_group="base",
        topic=TOPIC,
        default_topic="TBW102",
        default_topic_queue_nums=QUEUES,
        queue_id=queue_id,
        sys_flag=0,
        born_timestamp=time.time_ns() // 1_000_000,
        flag=0,
        properties=properties.encode({"KEYS": identity}),
    )
    return await client.ask(RequestCode.SEND_MESSAGE_V2, header, body_of(identity))


async def end_of(client: Client, queue_id: int) -> int:
    """Return the offset after a queue's last message."""
    header = QueueOfTopic(topic=TOPIC, queue_id=queue_id)
    return await client.offset(RequestCode.GET_MAX_OFFSET, header)


async def committed(client: Client, queue_id: int) -> int | None:
    """Return the group's committed offset in a queue, or None if there is none."""
    header = QueryConsumerOffset(topic=TOPIC, queue_id=queue_id, consumer_group=GROUP)
    answer = await client.ask(RequestCode.QUERY_CONSUMER_OFFSET, header)
    if answer.code != ResponseCode.SUCCESS:
        return None
    return OffsetAnswer.from_ext_fields(answer.ext_fields).offset


async def queue_messages(client: Client, queue_id: int) -> list[MessageView]:
    """Return a queue's readable messages, following the broker's next offsets; raises `Stuck`."""
    found: list[MessageView] = []
    offset, end, stalls = 0, await end_of(client, queue_id), 0
    while offset < end:
        answer = await client.pull(offset, TOPIC, queue_id)
        if answer.code == ResponseCode.SUCCESS:
            found += views(answer)
        next_offset = pulled(answer).next_begin_offset
        stalls = 0 if next_offset > offset else stalls + 1
        if stalls > _STALLS_MAX:
            raise Stuck(f"queue {queue_id} at {offset} of {end}: {answer.code} {answer.remark}")
        offset = max(offset, next_offset)
    return found


async def _fill(client: Client) -> list[Stored]:
    for number in range(COUNT):
        answer = await send(client, message_id(TOPIC, "base", number), number % QUEUES)
        assert answer.code == ResponseCode.SUCCESS, answer
    for queue_id in range(QUEUES):
        commit = UpdateConsumerOffset(
            topic=TOPIC, queue_id=queue_id, consumer_group=GROUP, commit_offset=COMMITTED
        )
        await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commit)
    return [
        Stored(TOPIC, queue_id, each.queue_offset, each.physical_offset, each.size, each.body)
        for queue_id in range(QUEUES)
        for each in await queue_messages(client, queue_id)
    ]


def make_store(processes: Processes, directory: Path, *, is_killed: bool) -> list[Stored]:
    """Create a store with several files of each kind; return its messages."""
    broker = Broker(processes, directory, settings=SETTINGS)
    broker.start()
    messages = ask(broker.address, _fill)
    assert len(messages) == COUNT
    time.sleep(_SAVED_S)
    if is_killed:
        broker.kill()
    else:
        broker.stop()
    return messages
