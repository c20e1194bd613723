"""What a lite pull consumer buffers, compared with a simple model, step by step."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from example_counts import at_most
from turbopump.client.fetch_buffer import FetchBuffer
from turbopump.client.pull_config import FetchLimits
from turbopump.message import MessageQueue, PhysicalOffset, QueueOffset
from turbopump.wire.hosts import host
from turbopump.wire.record import MessageView, Record, decode_record

QUEUES = [MessageQueue("T", "a", number) for number in range(3)]
LIMITS = FetchLimits(messages_per_queue=5, bytes_per_queue=40, messages_of_all=9)
HERE = host("127.0.0.1", 1)


def message(queue: MessageQueue, offset: int) -> MessageView:
    record = Record(
        topic=b"T",
        queue_id=queue.queue_id,
        body=b"x" * 10,
        born_timestamp_ms=0,
        born_host=HERE,
        store_host=HERE,
    )
    return decode_record(record.encode(QueueOffset(offset), PhysicalOffset(0), 0))


class PendingMachine(RuleBasedStateMachine):
    """Assigns, fetches, takes, seeks and pauses in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = FetchBuffer(LIMITS)
        self.waiting: dict[MessageQueue, list[int]] = {}
        self.taken: dict[MessageQueue, int] = {}
        self.finished: dict[MessageQueue, int] = {}

    @rule(queue=st.sampled_from(QUEUES), offset=st.integers(0, 100))
    def assign(self, queue: MessageQueue, offset: int) -> None:
        if queue not in self.waiting:
            self.buffer.add(queue)
            self.seek(queue, offset)

    @rule(queue=st.sampled_from(QUEUES), offset=st.integers(0, 100))
    def seek(self, queue: MessageQueue, offset: int) -> None:
        if queue in self.buffer:
            self.buffer.restart(queue, QueueOffset(offset))
            self.waiting[queue] = []
            self.taken[queue] = self.finished[queue] = offset

    @rule(queue=st.sampled_from(QUEUES))
    def take_away(self, queue: MessageQueue) -> None:
        if queue in self.waiting:
            self.buffer.remove(queue)
            for table in (self.waiting, self.taken, self.finished):
                del table[queue]

    @rule(queue=st.sampled_from(QUEUES), count=st.integers(0, 4), skipped=st.integers(0, 2))
    def fetch(self, queue: MessageQueue, count: int, skipped: int) -> None:
        if queue not in self.waiting or not self.buffer.has_room(queue):
            return
        start = self.buffer[queue].fetch_offset
        assert start is not None
        offsets = range(start, start + count)
        end = QueueOffset(start + count + skipped)
        self.buffer.put(queue, [message(queue, offset) for offset in offsets], end)
        self.waiting[queue] += offsets
        if not self.waiting[queue]:
            self.taken[queue] = end

    @rule(queue=st.sampled_from(QUEUES), paused=st.booleans())
    def pause(self, queue: MessageQueue, paused: bool) -> None:
        if queue in self.waiting:
            self.buffer[queue].is_paused = paused

    @precondition(lambda self: self.waiting)
    @rule(count_max=st.integers(1, 8))
    def take(self, count_max: int) -> None:
        open_queues = [queue for queue in self.waiting if not self.buffer[queue].is_paused]
        available = sum(len(self.waiting[queue]) for queue in open_queues)
        taken = self.buffer.take(count_max)
        assert len(taken) == min(count_max, available)
        for each in taken:
            queue = MessageQueue(each.topic, "a", each.queue_id)
            assert queue in open_queues
            assert each.queue_offset == self.waiting[queue].pop(0)
            self.taken[queue] = each.queue_offset + 1

    @rule()
    def finish(self) -> None:
        self.buffer.finish()
        self.finished = dict(self.taken)

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.buffer) == sum(map(len, self.waiting.values()))
        assert set(self.buffer.queues) == set(self.waiting)

    @invariant()
    def bounds_hold(self) -> None:
        for queue, offsets in self.waiting.items():
            assert self.buffer[queue].bytes == 10 * len(offsets)
            assert len(offsets) < LIMITS.messages_per_queue + 4
        assert len(self.buffer) < LIMITS.messages_of_all + 4

    @invariant()
    def only_what_is_finished_is_committed(self) -> None:
        assert self.buffer.positions() == self.finished


PendingMachine.TestCase.settings = settings(
    max_examples=at_most(60), stateful_step_count=40, deadline=None
)
TestPending = PendingMachine.TestCase
