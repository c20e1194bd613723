"""Which rows form one send, and which follow one another. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from turbopump.client.outgoing import BATCH_ENTRY_OVERHEAD_BYTES
from turbopump.client.selectors import by_hash
from turbopump.errors import InvalidArgument
from turbopump.message import Message, MessageQueue
from turbopump.spark.records.arrow_arrays import contents
from turbopump.spark.writing.row_converter import ConvertedRows
from turbopump.spark.writing.row_encoder import EncodedRows, Rows
from turbopump.wire.names import RETRY_PREFIX

_OVERHEAD_BYTES = BATCH_ENTRY_OVERHEAD_BYTES + 100
"""Besides body, keys and properties: the producer adds a unique id and property names."""

Destination = MessageQueue | str
"""A queue, whose messages keep their order, or a topic, whose messages may go to any queue."""


@dataclass(frozen=True, slots=True)
class Send:
    """Messages sent together, or one sent alone."""

    destination: Destination
    messages: Sequence[Message]
    rows: Sequence[int]

    @property
    def body_bytes(self) -> int:
        return sum(len(message.body) for message in self.messages)


@dataclass(frozen=True, slots=True)
class EncodedSend:
    """Encoded messages that are sent together."""

    destination: Destination
    message_id: str
    """The id of the first message."""

    body: memoryview
    """The encoded form of all rows encoded together; not copied."""

    body_bytes: int
    """What the rows contributed to it."""

    rows: Sequence[int]


AnySend: TypeAlias = Send | EncodedSend
Queues: TypeAlias = Mapping[str, Sequence[MessageQueue]]
"""By topic."""
Places: TypeAlias = Mapping[Destination, Sequence[int]]
"""The positions of rows, by destination."""


def topic_of(destination: Destination) -> str:
    return destination if isinstance(destination, str) else destination.topic


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of a send, and what is sent alone."""

    messages_max: int
    bytes_max: int
    alone_from_bytes: int
    """Bodies of at least this size are sent alone, since batches are not compressed."""


def sends(rows: Rows, queues: Queues, cuts: BatchLimits, partition: int) -> Iterator[AnySend]:
    """Split rows into sends; those of one destination keep the order of their rows."""
    destinations = _by_destination(rows, queues, partition)
    if isinstance(rows, EncodedRows):
        return _sends_of_encoded(rows, destinations, cuts)
    return _sends_of_messages(rows, _unsent(rows, destinations), cuts)


def _sends_of_messages(
    rows: ConvertedRows, destinations: Places, cuts: BatchLimits
) -> Iterator[Send]:
    for destination, places in destinations.items():
        messages = [rows.messages[place] for place in places]
        done = 0
        for together in _together(messages, cuts):
            numbers = [rows.first_row + place for place in places[done : done + len(together)]]
            done += len(together)
            yield Send(destination, together, numbers)


def _sends_of_encoded(
    rows: EncodedRows, destinations: Places, cuts: BatchLimits
) -> Iterator[EncodedSend]:
    for destination, places in destinations.items():
        is_all = len(places) == len(rows.topics)
        sizes = rows.body_sizes if is_all else rows.body_sizes[places]
        entries = rows.entries if is_all else rows.entries.take(pa.array(places, pa.int32()))
        ends, data = contents(entries)
        numbers = _numbers(rows.first_row, places)
        start = 0
        while start < len(places):
            # As many as end within the limit, but at least one.
            within = int(np.searchsorted(ends, ends[start] + cuts.bytes_max, side="right")) - 1
            end = max(start + 1, min(within, start + cuts.messages_max, len(places)))
            yield EncodedSend(
                destination,
                rows.message_id(places[start]),
                data[ends[start] : ends[end]].data,
                int(sizes[start:end].sum()),
                numbers[start:end],
            )
            start = end


def _numbers(first_row: int, places: Sequence[int]) -> Sequence[int]:
    if isinstance(places, range):
        return range(first_row + places.start, first_row + places.stop)
    return [first_row + place for place in places]


def _unsent(rows: ConvertedRows, found: Places) -> Places:
    """Leave out rows that are already stored."""
    if not rows.sent:
        return found
    left = {
        destination: [place for place in places if rows.first_row + place not in rows.sent]
        for destination, places in found.items()
    }
    return {destination: places for destination, places in left.items() if places}


def _by_destination(rows: Rows, queues: Queues, partition: int) -> Places:
    topics = rows.topics
    if rows.sharding_keys is None and rows.queue_ids is None and len(set(topics)) == 1:
        return {topics[0]: range(len(topics))}
    found: dict[Destination, list[int]] = {}
    for place, topic in enumerate(topics):
        destination: Destination = topic
        if rows.sharding_keys is not None:
            key = rows.sharding_keys[place]
            if key is not None:
                destination = by_hash(key)(queues[topic])
        elif rows.queue_ids is not None:
            queue_id = rows.queue_ids[place]
            broker = rows.brokers[place] if rows.brokers is not None else None
            if queue_id is not None or broker is not None:
                row = f"row {rows.first_row + place} of partition {partition}"
                destination = chosen_queue(queues[topic], queue_id, broker, row)
        found.setdefault(destination, []).append(place)
    return found


def chosen_queue(
    queues: Sequence[MessageQueue], queue_id: int | None, broker: str | None, row: str
) -> MessageQueue:
    """Return the queue that a row chooses; raises InvalidArgument that lists the existing ones."""
    if queue_id is None:
        raise InvalidArgument(
            f"{row}, column broker: {broker!r} needs a queueId beside it; set both, or neither"
        )
    matching = [
        queue
        for queue in queues
        if queue.queue_id == queue_id and (broker is None or queue.broker == broker)
    ]
    if len(matching) == 1:
        return matching[0]
    wanted = f"{row}, column queueId: queue {queue_id}" + (
        f" of broker {broker!r}" if broker else ""
    )
    if matching:
        brokers = ", ".join(queue.broker for queue in matching)
        raise InvalidArgument(
            f"{wanted} is on several brokers, set one in column broker: {brokers}"
        )
    there = ", ".join(f"{queue.broker}:{queue.queue_id}" for queue in queues)
    raise InvalidArgument(
        f"{wanted} does not exist in topic {queues[0].topic!r}, which has {there}"
    )


def _together(messages: Sequence[Message], cuts: BatchLimits) -> Iterator[list[Message]]:
    """Split messages of one destination into sends, in the same order."""
    batch: list[Message] = []
    batch_bytes = 0
    for message in messages:
        # A message that is sent alone fills a batch.
        size = cuts.bytes_max + 1 if _goes_alone(message, cuts) else _size_bytes(message)
        if batch and (batch_bytes + size > cuts.bytes_max or len(batch) >= cuts.messages_max):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(message)
        batch_bytes += size
    if batch:
        yield batch


def _size_bytes(message: Message) -> int:
    """Return the size of a message in a batch, rounded up rather than down.

    Unlike `split_batch`, this checks nothing: errors are found on sending.
    """
    size = _OVERHEAD_BYTES + len(message.body) + _text_bytes(message.tags or "")
    for key in message.keys:
        size += _text_bytes(key) + 1
    for name, value in message.properties.items():
        size += _text_bytes(name) + _text_bytes(value) + 2
    return size


def _text_bytes(text: str | None) -> int:
    # Whether a text is ASCII is known without reading it; a null in a map is found later.
    if not text:
        return 0
    return len(text) if text.isascii() else len(text.encode())


def _goes_alone(message: Message, cuts: BatchLimits) -> bool:
    return (
        len(message.body) >= cuts.alone_from_bytes
        or message.delay_level != 0
        or message.topic.startswith(RETRY_PREFIX)
    )
