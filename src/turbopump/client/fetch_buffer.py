"""The prefetch buffer of a lite pull consumer. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from turbopump.client.pull_config import FetchLimits
from turbopump.errors import DamagedMessage, InvalidArgument
from turbopump.message import MessageQueue, QueueOffset
from turbopump.wire.record import MessageView


class QueueBuffer:
    """One assigned queue: its buffered messages, and the three offsets that matter."""

    def __init__(self) -> None:
        self.messages: deque[MessageView | DamagedMessage] = deque()
        self.bytes = 0
        self.is_paused = False
        self.fetch_offset: QueueOffset | None = None
        """Where to fetch next; None while unknown."""
        self.taken: QueueOffset | None = None
        """Behind the last delivered message; some before it may be unfinished."""
        self.finished: QueueOffset | None = None
        """Behind the last message delivered before the latest ones: what can be committed."""

    def restart(self, offset: QueueOffset) -> None:
        """Continue at another offset, and discard buffered messages."""
        self.messages.clear()
        self.bytes = 0
        self.fetch_offset = offset
        self.taken = self.finished = offset

    def put(
        self, messages: Iterable[MessageView | DamagedMessage], next_offset: QueueOffset
    ) -> None:
        for message in messages:
            self.messages.append(message)
            self.bytes += _body_bytes(message)
        self.fetch_offset = next_offset
        if not self.messages:
            # No message here matches: the group has advanced without any.
            self.taken = next_offset

    def take(self) -> MessageView:
        """Return the next message, or skip it and raise if it is damaged."""
        message = self.messages.popleft()
        self.bytes -= _body_bytes(message)
        if isinstance(message, DamagedMessage):
            self.taken = QueueOffset(message.next_offset)
            raise message
        self.taken = QueueOffset(message.queue_offset + 1)
        return message


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
        if queue not in self._queues:
            self._queues[queue] = QueueBuffer()
            self._turn.append(queue)

    def remove(self, queue: MessageQueue) -> None:
        """Remove a queue, and discard its buffered messages."""
        self._count -= len(self._queues.pop(queue).messages)
        self._turn.remove(queue)

    def restart(self, queue: MessageQueue, offset: QueueOffset) -> None:
        """Continue a queue at another offset."""
        buffer = self[queue]
        self._count -= len(buffer.messages)
        buffer.restart(offset)

    def go_back(self, queue: MessageQueue, offset: QueueOffset) -> None:
        """Go back to an earlier offset, without skipping unfinished messages."""
        finished = self[queue].finished
        self.restart(queue, offset if finished is None else min(offset, finished))

    def put(
        self,
        queue: MessageQueue,
        messages: Iterable[MessageView | DamagedMessage],
        next_offset: QueueOffset,
    ) -> None:
        buffer = self._queues[queue]
        before = len(buffer.messages)
        buffer.put(messages, next_offset)
        self._count += len(buffer.messages) - before

    def has_room(self, queue: MessageQueue) -> bool:
        """Whether more messages of a queue may be fetched."""
        buffer = self._queues[queue]
        return (
            len(buffer.messages) < self._limits.messages_per_queue
            and buffer.bytes < self._limits.bytes_per_queue
            and self._count < self._limits.messages_of_all
        )

    def take(self, count_max: int) -> list[MessageView]:
        """Return buffered messages, in order within each queue; the queues take turns.

        Raises DamagedMessage if the first one is damaged; stops before a later damaged one.
        """
        taken: list[MessageView] = []
        for _ in range(len(self._turn)):
            queue = self._turn[0]
            self._turn.rotate(-1)
            buffer = self._queues[queue]
            while buffer.messages and not buffer.is_paused and len(taken) < count_max:
                if isinstance(buffer.messages[0], DamagedMessage):
                    if taken:
                        break
                    self._count -= 1
                taken.append(buffer.take())
            if len(taken) >= count_max:
                break
        self._count -= len(taken)
        return taken

    def finish(self) -> None:
        """Mark all messages delivered so far as processed."""
        for buffer in self._queues.values():
            buffer.finished = buffer.taken

    def positions(self) -> dict[MessageQueue, QueueOffset]:
        """Return the offsets to commit."""
        return {
            queue: buffer.finished
            for queue, buffer in self._queues.items()
            if buffer.finished is not None
        }
