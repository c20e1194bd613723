"""Which rows form one send, and which follow one another. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from turbopump.client.selectors import by_hash
from turbopump.errors import InvalidArgument
from turbopump.message import MessageQueue
from turbopump.spark.records.arrow_arrays import Column, Int64s
from turbopump.spark.writing.row_encoder import EncodedRows
from turbopump.wire.names import RETRY_PREFIX

Destination = MessageQueue | str
"""A queue, whose messages keep their order, or a topic, whose messages may go to any queue."""


@dataclass(frozen=True, slots=True)
class Send:
    """Encoded messages that are sent together, or one that is sent alone."""

    destination: Destination
    message_id: str
    """The id of the first message."""

    body: memoryview
    """The encoded form of all rows together; not copied."""

    body_bytes: int
    """What the rows contributed to it."""

    rows: Sequence[int]
    is_alone: bool = False
    """Whether the only message must not be sent as a batch."""

    delay_level: int = 0


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


def sends(rows: EncodedRows, queues: Queues, cuts: BatchLimits, partition: int) -> Iterator[Send]:
    """Split rows into sends; those of one destination keep the order of their rows."""
    destinations = _unsent(rows, _by_destination(rows, queues, partition))
    is_alone = _are_alone(rows, cuts)
    for destination, places in destinations.items():
        is_all = len(places) == len(rows.topics)
        sizes = rows.body_sizes if is_all else rows.body_sizes[places]
        alone = np.flatnonzero(is_alone if is_all else is_alone[places])
        entries = rows.entries if is_all else rows.entries.take(pa.array(places, pa.int32()))
        ends, data = _contents(entries)
        numbers = _numbers(rows.first_row, places)
        start = 0
        while start < len(places):
            following = int(np.searchsorted(alone, start))
            next_alone = int(alone[following]) if following < len(alone) else len(places)
            # As many as end within the limit, but at least one.
            within = int(np.searchsorted(ends, ends[start] + cuts.bytes_max, side="right")) - 1
            end = max(start + 1, min(within, start + cuts.messages_max, next_alone))
            place = places[start]
            yield Send(
                destination,
                rows.message_id(place),
                data[ends[start] : ends[end]],
                int(sizes[start:end].sum()),
                numbers[start:end],
                start == next_alone,
                0 if rows.delay_levels is None else rows.delay_levels[place],
            )
            start = end


def _are_alone(rows: EncodedRows, cuts: BatchLimits) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which rows are sent alone: batches are not compressed or delayed."""
    found = rows.body_sizes >= cuts.alone_from_bytes
    if rows.delay_levels is not None:
        found |= np.array(rows.delay_levels) != 0
    if any(topic.startswith(RETRY_PREFIX) for topic in set(rows.topics)):
        found |= np.array([topic.startswith(RETRY_PREFIX) for topic in rows.topics])
    return found


def _contents(entries: Column) -> tuple[Int64s, memoryview]:
    """Return where each entry starts, and the end, and the bytes of all."""
    _, offsets, data = entries.buffers()
    assert offsets is not None
    ends = np.frombuffer(memoryview(offsets), np.int64, len(entries) + 1, 8 * entries.offset)
    return ends, memoryview(b"" if data is None else data)


def _numbers(first_row: int, places: Sequence[int]) -> Sequence[int]:
    if isinstance(places, range):
        return range(first_row + places.start, first_row + places.stop)
    return [first_row + place for place in places]


def _unsent(rows: EncodedRows, found: Places) -> Places:
    """Leave out rows that are already stored."""
    if not rows.sent:
        return found
    left = {
        destination: [place for place in places if rows.first_row + place not in rows.sent]
        for destination, places in found.items()
    }
    return {destination: places for destination, places in left.items() if places}


def _by_destination(rows: EncodedRows, queues: Queues, partition: int) -> Places:
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
