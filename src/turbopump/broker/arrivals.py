"""Pulls that wait for a message: held without a task or timer of their own, woken by arrivals."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from msgspec import Struct

from turbopump.clock import Clock
from turbopump.net.deadlines import Deadline, Deadlines
from turbopump.store.consume_queue import QueueKey
from turbopump.store.dispatch import ANY_TAG, Watch
from turbopump.store.outcomes import Arrival

_log = logging.getLogger(__name__)

Wants = Callable[[Arrival], bool]
"""Whether an arriving message is one that the pull waits for."""


class HeldPull(Struct, eq=False):
    """One pull that found nothing yet.

    ``tags_codes`` are the hashes of the tags it wants, None for any; ``wants`` checks further, if
    needed. ``resume`` reads again and answers; it is called exactly once, whatever ends the wait,
    unless the owner disconnects first. ``is_behind`` says that it requests stored messages that
    cannot be found: it is retried without an arrival.
    """

    queue: QueueKey
    offset: int
    owner: object
    resume: Callable[[], None]
    tags_codes: frozenset[int] | None = None
    wants: Wants | None = None
    is_behind: bool = False
    deadline: Deadline | None = None


RESUMED_PER_TURN = 64

WHOLE_TOPIC = -1
"""In place of a queue id: waits for a message in any queue of a topic."""

_Held = dict[HeldPull, None]
"""A dict as an ordered set: the longest-waiting pull is answered first."""


class _Queue(Watch):
    """The held pulls of one queue by wanted tag: an arrival visits only its own tag's.

    The store checks the tags too, and does not report messages that no pull wants.
    """

    __slots__ = ("_by_tag", "all")

    def __init__(self) -> None:
        self.all: _Held = {}
        self._by_tag: dict[int | None, _Held] = {}
        super().__init__(self._by_tag)

    def add(self, pull: HeldPull) -> None:
        self.all[pull] = None
        for code in _places(pull):
            self._by_tag.setdefault(code, {})[pull] = None

    def remove(self, pull: HeldPull) -> None:
        del self.all[pull]
        for code in _places(pull):
            held = self._by_tag[code]
            del held[pull]
            if not held:
                del self._by_tag[code]

    def wanting(self, arrival: Arrival) -> Iterator[HeldPull]:
        """Yield the pulls whose filter matches a message."""
        for code in (ANY_TAG, arrival.tags_code):
            for pull in self._by_tag.get(code, ()):
                if pull.wants is None or pull.wants(arrival):
                    yield pull


def _places(pull: HeldPull) -> Iterable[int | None]:
    return (ANY_TAG,) if pull.tags_codes is None else pull.tags_codes


class Arrivals:
    """The held pulls by queue.

    Reading a queue and holding the pull happen in one turn of the event loop, and `notify` runs on
    that loop too: a message arrives either before the read or after the hold, never between.
    """

    def __init__(self, clock: Clock, held_max: int) -> None:
        self._deadlines = Deadlines(clock)
        self._held_max = held_max
        self._by_queue: dict[QueueKey, _Queue] = {}
        self._by_owner: dict[object, _Held] = {}
        self._woken: _Held = {}
        self._behind: _Held = {}
        self._whole_topics = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def is_full(self) -> bool:
        """Whether the limit of held pulls is reached."""
        return self._count >= self._held_max

    def get(self, key: QueueKey, /) -> Watch | None:
        """Return what is waited for in a queue, or in its topic."""
        if self._whole_topics:
            whole = self._by_queue.get((key[0], WHOLE_TOPIC))
            if whole is not None:
                return whole
        return self._by_queue.get(key)

    def hold(self, pull: HeldPull, timeout_ms: int) -> None:
        """Hold a pull until a matching message arrives or it times out."""
        queue = self._by_queue.get(pull.queue)
        if queue is None:
            queue = self._by_queue[pull.queue] = _Queue()
            self._whole_topics += pull.queue[1] == WHOLE_TOPIC
        queue.add(pull)
        self._by_owner.setdefault(pull.owner, {})[pull] = None
        if pull.is_behind:
            self._behind[pull] = None
        self._count += 1
        pull.deadline = self._deadlines.add(timeout_ms, lambda: self._wake(pull))

    def notify(self, arrival: Arrival) -> None:
        """Wake the pulls whose filter matches this message."""
        for queue_id in (
            (arrival.queue_id, WHOLE_TOPIC) if self._whole_topics else (arrival.queue_id,)
        ):
            queue = self._by_queue.get((arrival.topic, queue_id))
            if queue is not None:
                for pull in queue.wanting(arrival):
                    self._wake(pull)

    def wake_stale(self) -> None:
        """Retry the pulls that wait for units missing from their queue."""
        for pull in self._behind:
            self._wake(pull)

    def sweep(self, max_offset: Callable[[str, int], int]) -> None:
        """Wake pulls that `notify` should have woken: a safety net."""
        for (topic, queue_id), queue in self._by_queue.items():
            end = max_offset(topic, queue_id)
            for pull in queue.all:
                if end > max(pull.offset, queue.seen):
                    self._wake(pull)

    @property
    def topics(self) -> set[str]:
        """The topics whose messages are waited for."""
        return {topic for topic, _ in self._by_queue}

    def release_topic(self, topic: str) -> None:
        """Answer the pulls of a topic that was deleted or became unreadable."""
        for (name, _), queue in list(self._by_queue.items()):
            if name == topic:
                for pull in queue.all:
                    self._wake(pull)

    def forget(self, owner: object) -> None:
        """Drop the pulls of a disconnected peer."""
        for pull in list(self._by_owner.get(owner, ())):
            self._remove(pull)

    def release_all(self) -> None:
        """Answer all held pulls at shutdown."""
        for queue in list(self._by_queue.values()):
            for pull in list(queue.all):
                self._release(pull)
        self._deadlines.close()

    def _wake(self, pull: HeldPull) -> None:
        # Deferred: messages that arrive together go out in one answer.
        if not self._woken:
            asyncio.get_running_loop().call_soon(self._resume_woken)
        self._woken[pull] = None

    def _resume_woken(self) -> None:
        """Answer woken pulls, a limited number per loop iteration."""
        for pull in list(islice(self._woken, RESUMED_PER_TURN)):
            self._release(pull)
        if self._woken:
            asyncio.get_running_loop().call_soon(self._resume_woken)

    def _release(self, pull: HeldPull) -> None:
        if not self._remove(pull):
            return
        try:
            pull.resume()
        except Exception:  # noqa: BLE001 - one broken answer must not keep the others waiting
            _log.exception("answering a waiting long poll of %s failed", pull.queue)

    def _remove(self, pull: HeldPull) -> bool:
        queue = self._by_queue.get(pull.queue)
        if queue is None or pull not in queue.all:
            return False
        queue.remove(pull)
        if not queue.all:
            del self._by_queue[pull.queue]
            self._whole_topics -= pull.queue[1] == WHOLE_TOPIC
        owned = self._by_owner[pull.owner]
        del owned[pull]
        if not owned:
            del self._by_owner[pull.owner]
        self._woken.pop(pull, None)
        self._behind.pop(pull, None)
        self._count -= 1
        if pull.deadline is not None:
            pull.deadline.cancel()
        return True
