"""Pulls that wait for a message: held without a task or a timer of their own, woken by arrivals."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from turbopump.clock import Clock
from turbopump.net.deadlines import Deadline, Deadlines
from turbopump.store.outcomes import Arrival

_log = logging.getLogger(__name__)

Wants = Callable[[Arrival], bool]
"""Whether a message that has just arrived is one that the pull is waiting for."""

QueueKey = tuple[str, int]


class HeldPull:
    """One pull that found nothing yet.

    ``resume`` reads again and answers; it is called exactly once, whatever ends the wait, unless
    the owner goes away first.
    """

    __slots__ = ("deadline", "offset", "owner", "queue", "resume", "wants")

    def __init__(
        self,
        queue: QueueKey,
        offset: int,
        owner: object,
        wants: Wants,
        resume: Callable[[], None],
    ) -> None:
        self.queue = queue
        self.offset = offset
        self.owner = owner
        self.wants = wants
        self.resume = resume
        self.deadline: Deadline | None = None


class Arrivals:
    """The held pulls by queue.

    Reading a queue and holding the pull happen in one turn of the event loop, and `notify` runs on
    that loop too: a message arrives either before the read or after the hold, never between.
    """

    def __init__(self, clock: Clock, held_max: int) -> None:
        self._deadlines = Deadlines(clock)
        self._held_max = held_max
        # Dicts as ordered sets: who waits longest is answered first.
        self._by_queue: dict[QueueKey, dict[HeldPull, None]] = {}
        self._by_owner: dict[object, dict[HeldPull, None]] = {}
        self._woken: dict[HeldPull, None] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def is_full(self) -> bool:
        """Whether no more pulls may be held."""
        return self._count >= self._held_max

    def hold(self, pull: HeldPull, timeout_ms: int) -> None:
        """Keep a pull until a wanted message arrives or its time is over."""
        self._by_queue.setdefault(pull.queue, {})[pull] = None
        self._by_owner.setdefault(pull.owner, {})[pull] = None
        self._count += 1
        pull.deadline = self._deadlines.add(timeout_ms, lambda: self._release(pull))

    def notify(self, arrival: Arrival) -> None:
        """Wake the pulls that want this message; a pull with another filter sleeps on."""
        held = self._by_queue.get((arrival.topic, arrival.queue_id))
        if held is None:
            return
        for pull in held:
            if pull not in self._woken and pull.wants(arrival):
                self._wake(pull)

    def sweep(self, max_offset: Callable[[str, int], int]) -> None:
        """Wake whatever should have been woken already: the safety net under `notify`."""
        for (topic, queue_id), held in self._by_queue.items():
            end = max_offset(topic, queue_id)
            for pull in held:
                if end > pull.offset and pull not in self._woken:
                    self._wake(pull)

    def forget(self, owner: object) -> None:
        """Drop the pulls of a peer that is gone."""
        for pull in list(self._by_owner.get(owner, ())):
            self._remove(pull)

    def release_all(self) -> None:
        """Answer everything that is held, because nothing more will arrive."""
        for held in list(self._by_queue.values()):
            for pull in list(held):
                self._release(pull)
        self._deadlines.close()

    def _wake(self, pull: HeldPull) -> None:
        # Not at once: several messages that arrive together go out in one answer.
        if not self._woken:
            asyncio.get_running_loop().call_soon(self._resume_woken)
        self._woken[pull] = None

    def _resume_woken(self) -> None:
        woken, self._woken = self._woken, {}
        for pull in woken:
            self._release(pull)

    def _release(self, pull: HeldPull) -> None:
        if not self._remove(pull):
            return
        try:
            pull.resume()
        except Exception:  # noqa: BLE001 - one broken answer must not keep the others waiting
            _log.exception("answering a held pull of %s failed", pull.queue)

    def _remove(self, pull: HeldPull) -> bool:
        held = self._by_queue.get(pull.queue)
        if held is None or pull not in held:
            return False
        del held[pull]
        if not held:
            del self._by_queue[pull.queue]
        owned = self._by_owner[pull.owner]
        del owned[pull]
        if not owned:
            del self._by_owner[pull.owner]
        self._woken.pop(pull, None)
        self._count -= 1
        if pull.deadline is not None:
            pull.deadline.cancel()
        return True
