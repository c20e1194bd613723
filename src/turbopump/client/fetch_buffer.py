"""What a lite pull consumer has fetched and not given out yet. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from turbopump.client.pull_config import FetchLimits
from turbopump.errors import DamagedMessage, InvalidArgument
from turbopump.message import MessageQueue, QueueOffset
from turbopump.wire.record import MessageView


class QueueBuffer:
    """One assigned queue: messages that wait, and the three offsets that matter."""

    def __init__(self) -> None:
        self.messages: deque[MessageView | DamagedMessage] = deque()
        self.bytes = 0
        self.is_paused = False
        self.fetch_offset: QueueOffset | None = None
        """Where to fetch next; None before that is known."""
        self.taken: QueueOffset | None = None
        """Behind the last message that was given out; not all of them may be finished."""
        self.finished: QueueOffset | None = None
        """Behind the last message that was given out before the latest: what can be committed."""

    def restart(self, offset: QueueOffset) -> None:
        """Go somewhere else, and forget what was fetched."""
        self.messages.clear()
        self.bytes = 0
        self.fetch_offset = offset
        self.taken = self.finished = offset

    def put(
        self, messages: Iterable[MessageView | DamagedMessage], next_offset: QueueOffset
    ) -> None:
        """Take in what was fetched."""
        for message in messages:
            self.messages.append(message)
            self.bytes += _body_bytes(message)
        self.fetch_offset = next_offset
        if not self.messages:
            # Nothing here is wanted: the group has come so far without any message.
            self.taken = next_offset

    def take(self) -> MessageView:
        """Give the next message out, or raise that it is damaged: it is passed over then."""
        message = self.messages.popleft()
        self.bytes -= _body_bytes(message)
        if isinstance(message, DamagedMessage):
            self.taken = QueueOffset(message.next_offset)
            raise message
        self.taken = QueueOffset(message.queue_offset + 1)
        return message

    @property
    def is_damaged(self) -> bool:
        """Whether the next message is damaged."""
        return bool(self.messages) and isinstance(self.messages[0], DamagedMessage)


def _body_bytes(message: MessageView | DamagedMessage) -> int:
    return 0 if isinstance(message, DamagedMessage) else len(message.stored_body)


class FetchBuffer:
    """All assigned queues; messages are taken from them in turn."""

    def __init__(self, limits: FetchLimits) -> None:
        self._limits = limits
        self._queues: dict[MessageQueue, QueueBuffer] = {}
        self._turn: deque[MessageQueue] = deque()
        self._count = 0

    @property
    def queues(self) -> tuple[MessageQueue, ...]:
        """Those that are assigned."""
        return tuple(self._queues)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, queue: MessageQueue) -> bool:
        return queue in self._queues

    def __getitem__(self, queue: MessageQueue) -> QueueBuffer:
        found = self._queues.get(queue)
        if found is None:
            raise InvalidArgument(f"queue {queue} is not assigned to this consumer")
        return found

    def add(self, queue: MessageQueue) -> None:
        """Assign a queue."""
        if queue not in self._queues:
            self._queues[queue] = QueueBuffer()
            self._turn.append(queue)

    def remove(self, queue: MessageQueue) -> None:
        """Take a queue away, and forget what was fetched of it."""
        self._count -= len(self._queues.pop(queue).messages)
        self._turn.remove(queue)

    def restart(self, queue: MessageQueue, offset: QueueOffset) -> None:
        """Go to another offset of a queue."""
        buffer = self[queue]
        self._count -= len(buffer.messages)
        buffer.restart(offset)

    def go_back(self, queue: MessageQueue, offset: QueueOffset) -> None:
        """Go to an earlier offset, but skip no message that is not finished."""
        finished = self[queue].finished
        self.restart(queue, offset if finished is None else min(offset, finished))

    def put(
        self,
        queue: MessageQueue,
        messages: Iterable[MessageView | DamagedMessage],
        next_offset: QueueOffset,
    ) -> None:
        """Take in what was fetched."""
        buffer = self._queues[queue]
        before = len(buffer.messages)
        buffer.put(messages, next_offset)
        self._count += len(buffer.messages) - before

    def has_room(self, queue: MessageQueue) -> bool:
        """Whether more of a queue may be fetched."""
        buffer = self._queues[queue]
        return (
            len(buffer.messages) < self._limits.messages_per_queue
            and buffer.bytes < self._limits.bytes_per_queue
            and self._count < self._limits.messages_of_all
        )

    def take(self, count_max: int) -> list[MessageView]:
        """Give messages out, a queue at a time in their order, the queues taking turns.

        Raises DamagedMessage where one is the first; before one that comes later, it stops.
        """
        taken: list[MessageView] = []
        for _ in range(len(self._turn)):
            queue = self._turn[0]
            self._turn.rotate(-1)
            buffer = self._queues[queue]
            while buffer.messages and not buffer.is_paused and len(taken) < count_max:
                if buffer.is_damaged:
                    if taken:
                        break
                    self._count -= 1
                taken.append(buffer.take())
            if len(taken) >= count_max:
                break
        self._count -= len(taken)
        return taken

    def finish(self) -> None:
        """Note that all messages given out so far are done with."""
        for buffer in self._queues.values():
            buffer.finished = buffer.taken

    def positions(self) -> dict[MessageQueue, QueueOffset]:
        """Return what can be committed."""
        return {
            queue: buffer.finished
            for queue, buffer in self._queues.items()
            if buffer.finished is not None
        }
