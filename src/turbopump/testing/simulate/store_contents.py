"""What a store holds, as the checks compare it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from turbopump.broker.transactions.transactions import PROGRESS_GROUP
from turbopump.core import Records
from turbopump.message import MessageQueue, PhysicalOffset, QueueOffset
from turbopump.store.log_scan import scan
from turbopump.store.store import Store
from turbopump.testing.cluster_state import queue_messages
from turbopump.testing.simulate.bodies import DamagedBodies, key_of
from turbopump.testing.simulate.events import Stored
from turbopump.wire.bodies import ConsumerOffsets
from turbopump.wire.names import HALF_OPERATIONS_TOPIC, HALF_TOPIC, OFFSET_MOVED_TOPIC
from turbopump.wire.record import decode_record

_WITHOUT_MESSAGES = (OFFSET_MOVED_TOPIC, HALF_OPERATIONS_TOPIC)

Contents = dict[MessageQueue, tuple[int, tuple[Stored, ...]]]
Offsets = dict[tuple[str, MessageQueue], int]


def contents_of(store: Store, broker: str, damaged: DamagedBodies) -> Contents:
    """Return all messages of a store by queue."""
    found: Contents = {}
    for topic, queue_id in queues_of(store):
        begin, _ = store.queue_range(topic, queue_id)
        found_now = messages_of(store, topic, queue_id, begin, damaged)
        messages = tuple(message for _, message in found_now)
        found[MessageQueue(topic, broker, queue_id)] = (begin, messages)
    return found


def ends_of(contents: Contents) -> dict[MessageQueue, int]:
    """Return where each queue ends."""
    return {queue: begin + len(found) for queue, (begin, found) in contents.items()}


def new_messages(
    store: Store, broker: str, ends: dict[MessageQueue, int], damaged: DamagedBodies
) -> Iterator[tuple[MessageQueue, int, Stored]]:
    """Return the messages beyond the known ends of queues, which are advanced."""
    for topic, queue_id in queues_of(store):
        queue = MessageQueue(topic, broker, queue_id)
        known = ends.get(queue, 0)
        if store.queue_range(topic, queue_id)[1] > known:
            for offset, message in messages_of(store, topic, queue_id, known, damaged):
                yield queue, offset, message
                ends[queue] = offset + 1


def queues_of(store: Store) -> list[tuple[str, int]]:
    """Return the queues that hold messages of the run, excluding the broker's own events."""
    return sorted(queue for queue in store.queue_ids() if queue[0] not in _WITHOUT_MESSAGES)


def differences(
    one: Mapping[MessageQueue, object], other: Mapping[MessageQueue, object]
) -> list[str]:
    """Describe the queues in which two openings of a store differ."""
    return [
        f"{queue} held {one.get(queue)}, then {other.get(queue)}"
        for queue in sorted({*one, *other})
        if one.get(queue) != other.get(queue)
    ]


def messages_of(
    store: Store, topic: str, queue_id: int, start: int, damaged: DamagedBodies
) -> Iterator[tuple[int, Stored]]:
    """Return the messages of a queue with their offsets, which each of them also contains."""
    views = queue_messages(store, topic, queue_id, QueueOffset(start))
    for offset, view in enumerate(views, start):
        key = key_of(view.body)
        damaged_key = damaged.get(view.body) if key is None else None
        record = (view.physical_offset, view.store_timestamp_ms)
        known = (key or damaged_key) if view.queue_offset == offset else None
        yield offset, Stored(known, view.reconsume_times, record, damaged_key is not None)


def offsets_in(table: ConsumerOffsets, broker: str) -> Offsets:
    """Return the committed offsets in a broker's table by group and queue."""
    found: Offsets = {}
    for key, queues in table.offset_table.items():
        topic, _, group = key.partition("@")
        if group == PROGRESS_GROUP:
            # The broker's own, about its half messages.
            continue
        for queue_id, offset in queues.items():
            found[group, MessageQueue(topic, broker, queue_id)] = offset
    return found


def keys_written(store: Store, begin: PhysicalOffset, end: PhysicalOffset) -> tuple[str, ...]:
    """Return the keys of messages in a part of the log, whether they can be read yet or not."""
    log = store._log  # noqa: SLF001 - the store itself shows only what can be read
    records = [
        log.view(entry.physical_offset, entry.size)
        for found in scan(log, begin, check_crc=False, end=end)
        if isinstance(found, Records)
        for entry in found
    ]
    return tuple(key_of(decode_record(record).body) or "" for record in records if record)


def open_transactions(store: Store) -> list[tuple[QueueOffset, str]]:
    """Return offset and key of half messages that no operation names, read from the store only."""
    halves = queue_messages(store, HALF_TOPIC, 0)
    operations = queue_messages(store, HALF_OPERATIONS_TOPIC, 0)
    ended = {int(operation.body) for operation in operations}
    return [
        (half.queue_offset, key_of(half.body) or "")
        for half in halves
        if half.queue_offset not in ended
    ]
