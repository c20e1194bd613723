"""What concurrent and orderly delivery share: the listener, its workers, and what follows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterator, Sequence
from typing import ClassVar, Generic, TypeVar

from turbopump.client.delivery.listener import Call, Listener
from turbopump.client.delivery.workers import TaskWorkers, ThreadWorkers, Workers
from turbopump.client.offsets import Positions
from turbopump.client.owned_queue import OwnedQueue
from turbopump.client.push_config import PushSettings
from turbopump.client.retry_sender import RetrySender
from turbopump.client.stats import ConsumerStats
from turbopump.clock import Clock
from turbopump.supervisor import Supervisor, Watch
from turbopump.wire.record import MessageView

J = TypeVar("J")


class Delivery(ABC, Generic[J]):
    """Calls the listener, in jobs ``J`` that workers run."""

    is_orderly: ClassVar[bool]

    def __init__(
        self,
        group: str,
        listener: Listener,
        settings: PushSettings,
        positions: Positions,
        retry_sender: RetrySender | None,
        stats: ConsumerStats,
        clock: Clock,
    ) -> None:
        self._group = group
        self._listener = listener
        self._settings = settings
        self._positions = positions
        self._retry_sender = retry_sender
        """None when broadcasting: failed messages are logged and dropped."""
        self._stats = stats
        self._clock = clock
        self._tasks = Supervisor()
        watch, limits = self._tasks.watch("calls of the listener"), settings.concurrency_limits
        self._workers: Workers[J] = (
            TaskWorkers(self._acall_all, self._settle, limits, watch)
            if listener.is_async
            else ThreadWorkers(self._call_all, self._settle, limits, watch)
        )

    @property
    def watches(self) -> tuple[Watch, ...]:
        """The background tasks, and their failures."""
        return self._tasks.watches

    @property
    def threads(self) -> int:
        return self._workers.size

    def resize(self, limits: tuple[int, int]) -> None:
        """Change how many calls run concurrently, at least and at most."""
        self._workers.resize(limits)

    @abstractmethod
    def deliver(self, owned: OwnedQueue, messages: list[MessageView], *, begins: bool) -> None:
        """Deliver new messages of a queue; ``begins`` if its cache was empty before."""

    @abstractmethod
    async def close(self, timeout_ms: int) -> None:
        """Wait for running calls."""

    def _call_all(self, jobs: Iterator[J]) -> None:
        """Call the listener in a thread."""
        self._listener.call_all(self._calls(jobs))

    def _acall_all(self, jobs: Iterator[J]) -> Awaitable[None]:
        """Call the listener on the loop."""
        return self._listener.acall_all(self._calls(jobs))

    @abstractmethod
    def _calls(self, jobs: Iterator[J]) -> Iterator[Call]:
        """Return the calls of some jobs, each to be made before the next is taken."""

    @abstractmethod
    def _settle(self, jobs: Sequence[J]) -> None:
        """Act on the listener's results, on the loop."""
