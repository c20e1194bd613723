"""Pulls that wait for a message: held without a task or timer of their own, woken by arrivals."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

from msgspec import Struct

from turbopump.broker.config import LongPollingConfig
from turbopump.clock import Clock
from turbopump.machine.log_limit import LogLimit
from turbopump.net.deadlines import Bucket, Deadlines
from turbopump.store.consume_queue import QueueKey
from turbopump.store.dispatch import ANY_TAG, Watch
from turbopump.store.outcomes import Arrival

_log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)

Wants = Callable[[Arrival], bool]
"""Whether an arriving message is one that the pull waits for."""


class Holder(Struct, frozen=True):
    """The client of a held pull: each part may hold a limited number."""

    connection: object
    group: str
    host: str


class HeldPull(Struct, eq=False):
    """One pull that found nothing yet.

    ``tags_codes`` are the hashes of the tags it wants, None for any; ``wants`` checks further, if
    needed. ``resume`` reads again and answers; it is called exactly once, whatever ends the wait,
    unless the holder disconnects first. ``is_behind`` says that it requests stored messages that
    cannot be found: it is retried without an arrival. ``is_subscribed`` says that its filter is its
    group's subscription, which may change meanwhile. ``weight`` is the number of usual pulls that
    it counts as: large filters take memory.
    """

    queue: QueueKey
    offset: int
    holder: Holder
    resume: Callable[[], None]
    tags_codes: frozenset[int] | None = None
    wants: Wants | None = None
    is_behind: bool = False
    is_subscribed: bool = False
    weight: int = 1
    is_woken: bool = False
    bucket: Bucket | None = None
    """Where its deadline is, while it is held."""


RESUMED_PER_TURN = 64

SWEEP_SLOW_MS = 500
"""A longer sweep is logged: meanwhile, the broker serves no client."""

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
            _remove_from(self._by_tag, code, pull)

    def wanting(self, arrival: Arrival) -> Iterator[HeldPull]:
        """Yield the pulls whose filter matches a message."""
        for code in (ANY_TAG, arrival.tags_code):
            for pull in self._by_tag.get(code, ()):
                if pull.wants is None or pull.wants(arrival):
                    yield pull


def _places(pull: HeldPull) -> Iterable[int | None]:
    return (ANY_TAG,) if pull.tags_codes is None else pull.tags_codes


def _remove_from(tables: dict[K, _Held], key: K, pull: HeldPull) -> None:
    held = tables[key]
    del held[pull]
    if not held:
        del tables[key]


class Arrivals:
    """The held pulls by queue.

    Reading a queue and holding the pull happen in one turn of the event loop, and `notify` runs on
    that loop too: a message arrives either before the read or after the hold, never between.
    """

    def __init__(self, clock: Clock, config: LongPollingConfig) -> None:
        self.config = config
        self.refused = 0
        """Pulls that were not held because of a limit."""
        self._clock = clock
        self._deadlines = Deadlines(clock)
        self._by_topic: dict[str, dict[int, _Queue]] = {}
        self._by_connection: dict[object, _Held] = {}
        self._by_subscription: dict[tuple[str, str], _Held] = {}
        """By group and topic; only pulls whose filter is the group's subscription."""
        self._behind: _Held = {}
        self._weight = 0
        self._per_connection: Counter[object] = Counter()
        self._per_group: Counter[str] = Counter()
        self._per_host: Counter[str] = Counter()
        """The weights of held pulls."""
        self._count = 0
        self._woken: deque[HeldPull] = deque()
        """May include pulls that were dropped since."""
        self._is_resuming = False
        self._log_limit = LogLimit(clock)

    def __len__(self) -> int:
        return self._count

    def refusal(self, holder: Holder) -> str | None:
        """Return why another pull of a client cannot be held, or None; count and log refusals."""
        config = self.config
        in_connection = self._per_connection[holder.connection]
        in_group, in_host = self._per_group[holder.group], self._per_host[holder.host]
        if self._weight >= config.held_max:
            whose, limit = "this broker", f"pullThreadPoolQueueCapacity is {config.held_max}"
        elif in_connection >= config.connection_held_max:
            whose = "this connection"
            limit = f"longPollsPerConnectionMax is {config.connection_held_max}"
        elif in_group >= config.group_held_max:
            whose = f"group {holder.group}"
            limit = f"longPollsPerGroupMax is {config.group_held_max}"
        elif in_host >= config.host_held_max:
            whose = f"host {holder.host}"
            limit = f"longPollsPerHostMax is {config.host_held_max}"
        else:
            return None
        refusal = f"too many long polls of {whose}: {limit}; pull later, or without waiting"
        self._note_refused(refusal)
        return refusal

    def _note_refused(self, refusal: str) -> None:
        self.refused += 1
        if self._log_limit.is_due("refused"):
            _log.warning("%s; %d refused since the start", refusal, self.refused)

    def get(self, key: QueueKey, /) -> Watch | None:
        """Return what is waited for in a queue, or in its topic."""
        queues = self._by_topic.get(key[0])
        if queues is None:
            return None
        whole = queues.get(WHOLE_TOPIC)
        return queues.get(key[1]) if whole is None else whole

    def hold(self, pull: HeldPull, wait_ms: int) -> None:
        """Hold a pull until a matching message arrives or its time is over."""
        topic, queue_id = pull.queue
        queues = self._by_topic.setdefault(topic, {})
        queue = queues.get(queue_id)
        if queue is None:
            queue = queues[queue_id] = _Queue()
        queue.add(pull)
        holder = pull.holder
        self._by_connection.setdefault(holder.connection, {})[pull] = None
        if pull.is_subscribed:
            self._by_subscription.setdefault((holder.group, topic), {})[pull] = None
        if pull.is_behind:
            self._behind[pull] = None
        self._per_connection[holder.connection] += pull.weight
        self._per_group[holder.group] += pull.weight
        self._per_host[holder.host] += pull.weight
        self._weight += pull.weight
        self._count += 1
        pull.bucket = self._deadlines.bucket(self._limited_ms(wait_ms))
        pull.bucket[pull] = self._wake

    def _limited_ms(self, wait_ms: int) -> int:
        """Return how long a pull waits that requests to wait for ``wait_ms``."""
        config = self.config
        if not config.enabled:
            return config.short_hold_ms
        return max(0, min(wait_ms, config.hold_ms_max))

    def notify(self, arrival: Arrival) -> None:
        """Wake the pulls whose filter matches this message."""
        queues = self._by_topic.get(arrival.topic)
        if queues is None:
            return
        for queue_id in (arrival.queue_id, WHOLE_TOPIC):
            queue = queues.get(queue_id)
            if queue is not None:
                for pull in queue.wanting(arrival):
                    self._wake(pull)

    def wake_stale(self) -> None:
        """Retry the pulls that wait for units missing from their queue."""
        for pull in self._behind:
            self._wake(pull)

    def sweep(self, max_offset: Callable[[str, int], int]) -> None:
        """Wake pulls that `notify` should have woken: a safety net."""
        begun_ms = self._clock.monotonic_ms()
        for topic, queues in self._by_topic.items():
            for queue_id, queue in queues.items():
                end = max_offset(topic, queue_id)
                for pull in queue.all:
                    if end > max(pull.offset, queue.seen):
                        self._wake(pull)
        spent_ms = self._clock.monotonic_ms() - begun_ms
        if spent_ms > SWEEP_SLOW_MS:
            _log.warning("checking %d waiting long polls took %d ms", self._count, spent_ms)

    @property
    def topics(self) -> set[str]:
        """The topics whose messages are waited for."""
        return set(self._by_topic)

    def release_topic(self, topic: str) -> None:
        """Answer the pulls of a topic that was deleted or became unreadable."""
        for queue in self._by_topic.get(topic, {}).values():
            for pull in queue.all:
                self._wake(pull)

    def release_subscribers(self, group: str, topic: str) -> None:
        """Answer a group's pulls of a topic for which its subscription has changed."""
        for pull in self._by_subscription.get((group, topic), ()):
            self._wake(pull)

    def forget(self, connection: object) -> None:
        """Drop the pulls of a disconnected peer."""
        for pull in list(self._by_connection.get(connection, ())):
            self._remove(pull)

    def release_all(self) -> None:
        """Answer all held pulls at shutdown."""
        for held in list(self._by_connection.values()):
            for pull in list(held):
                self._release(pull)
        self._deadlines.close()

    def _wake(self, pull: HeldPull) -> None:
        if not pull.is_woken:
            pull.is_woken = True
            self._woken.append(pull)
            self._resume_soon()

    def _resume_soon(self) -> None:
        # Deferred: messages that arrive together go out in one answer.
        if not self._is_resuming:
            self._is_resuming = True
            asyncio.get_running_loop().call_soon(self._resume_woken)

    def _resume_woken(self) -> None:
        """Answer woken pulls, a limited number per loop iteration."""
        self._is_resuming = False
        for _ in range(min(RESUMED_PER_TURN, len(self._woken))):
            self._release(self._woken.popleft())
        if self._woken:
            self._resume_soon()

    def _release(self, pull: HeldPull) -> None:
        if not self._remove(pull):
            return
        try:
            pull.resume()
        except Exception:  # noqa: BLE001 - one broken answer must not keep the others waiting
            _log.exception("answering a waiting long poll of %s failed", pull.queue)

    def _remove(self, pull: HeldPull) -> bool:
        """Take a pull out of all tables; return whether it was held."""
        bucket, pull.bucket = pull.bucket, None
        if bucket is None:
            return False
        bucket.pop(pull, None)
        if not bucket:
            # The bucket stays until it is due: free the memory that thousands of pulls took in it.
            bucket.clear()
        (topic, queue_id), holder = pull.queue, pull.holder
        queues = self._by_topic[topic]
        queues[queue_id].remove(pull)
        if not queues[queue_id].all:
            del queues[queue_id]
            if not queues:
                del self._by_topic[topic]
        _remove_from(self._by_connection, holder.connection, pull)
        if pull.is_subscribed:
            _remove_from(self._by_subscription, (holder.group, topic), pull)
        self._behind.pop(pull, None)
        _subtract(self._per_connection, holder.connection, pull.weight)
        _subtract(self._per_group, holder.group, pull.weight)
        _subtract(self._per_host, holder.host, pull.weight)
        self._weight -= pull.weight
        self._count -= 1
        return True


def _subtract(weights: Counter[K], key: K, weight: int) -> None:
    weights[key] -= weight
    if not weights[key]:
        del weights[key]
