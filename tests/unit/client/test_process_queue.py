"""What is committed is the lowest unfinished offset, whatever finishes first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from turbopump.client.process_queue import NOTHING_REMOVED, ProcessQueue
from turbopump.message import QueueOffset
from vectors import load

SEQUENCES = load("process_queue.json")["sequences"]


@dataclass(frozen=True)
class Item:
    queue_offset: QueueOffset
    body_length: int = 10


def item(offset: int, length: int = 10) -> Item:
    return Item(QueueOffset(offset), length)


def run(queue: ProcessQueue[Item], step: dict[str, Any]) -> object:
    rows = step.get("messages", [])
    messages = [item(row[0], row[1]) for row in rows]
    match step["op"]:
        case "put":
            return queue.put(messages)
        case "remove":
            return queue.remove(messages)
        case "take":
            return [message.queue_offset for message in queue.take(step["n"])]
        case "commit":
            after = queue.commit()
            return "error" if after is None else after
        case "rollback":
            queue.rollback()
        case "again":
            queue.again(messages)
        case _:
            queue.clear()
    return None


@pytest.mark.parametrize("sequence", SEQUENCES, ids=lambda sequence: sequence["name"])
def test_every_step_equals_that_of_apache_rocketmq(sequence: dict[str, Any]) -> None:
    queue: ProcessQueue[Item] = ProcessQueue()
    for step in sequence["steps"]:
        assert run(queue, step) == step["returned"], step
        state = step["state"]
        taken = queue.taken_offsets
        assert queue.cached_offsets == state["messages"], step
        assert (queue.count, queue.bytes) == (state["count"], state["size"]), step
        assert (taken[0] if taken else 0, taken[-1] if taken else 0, len(taken)) == (
            state["takenMin"],
            state["takenMax"],
            state["takenCount"],
        ), step


class AgainstAModel(RuleBasedStateMachine):
    """The same operations on sorted sets."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: ProcessQueue[Item] = ProcessQueue()
        self.cached: set[int] = set()
        self.taken: set[int] = set()
        self.next = 0

    @rule(gaps=st.lists(st.integers(0, 3), max_size=6))
    def put(self, gaps: list[int]) -> None:
        offsets = []
        for gap in gaps:
            offsets.append(self.next + gap)
            self.next += gap + 1
        self.queue.put([item(offset) for offset in offsets])
        self.cached.update(offsets)

    @precondition(lambda self: not self.taken)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        some = data.draw(st.sets(st.sampled_from(sorted(self.cached)))) if self.cached else {0}
        had_some = bool(self.cached)
        committed = self.queue.remove([item(offset) for offset in some])
        self.cached -= some
        if not had_some:
            assert committed == NOTHING_REMOVED
        else:
            assert committed == (min(self.cached) if self.cached else self.next)

    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        expected = sorted(self.cached)[:count]
        assert [message.queue_offset for message in self.queue.peek(count)] == expected
        assert [message.queue_offset for message in self.queue.take(count)] == expected
        self.cached -= set(expected)
        self.taken |= set(expected)

    @rule()
    def commit(self) -> None:
        assert self.queue.commit() == (max(self.taken) + 1 if self.taken else None)
        self.taken.clear()

    @rule()
    def rollback(self) -> None:
        self.queue.rollback()
        self.cached |= self.taken
        self.taken.clear()

    @rule(data=st.data())
    @precondition(lambda self: self.taken)
    def again(self, data: st.DataObject) -> None:
        some = data.draw(st.sets(st.sampled_from(sorted(self.taken))))
        self.queue.again([item(offset) for offset in some])
        self.taken -= some
        self.cached |= some

    @invariant()
    def agree(self) -> None:
        queue, cached = self.queue, sorted(self.cached)
        assert queue.cached_offsets == cached
        assert queue.taken_offsets == sorted(self.taken)
        assert queue.count == len(self.cached) + len(self.taken)
        assert queue.bytes == 10 * queue.count
        assert queue.is_empty == (queue.count == 0)
        first = queue.first
        assert (first and first.queue_offset) == (cached[0] if cached else None)


TestAgainstAModel = pytest.mark.slow(AgainstAModel.TestCase)


def test_a_message_that_was_removed_can_be_put_again() -> None:
    queue: ProcessQueue[Item] = ProcessQueue()
    queue.put([item(0), item(1), item(2)])
    queue.remove([item(2)])
    queue.put([item(2)])
    assert queue.cached_offsets == [0, 1, 2]
    assert queue.remove([item(0), item(1)]) == 2
