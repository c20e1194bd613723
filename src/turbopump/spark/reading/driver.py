"""What the driver's process of a stream has: a connection, a group, and what it has seen."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from turbopump.client.session import Session
from turbopump.errors import TurbopumpError
from turbopump.spark.link import link_to
from turbopump.spark.reading.cluster import Cluster
from turbopump.spark.reading.following import Following
from turbopump.spark.reading.membership import QueryMember, join_group
from turbopump.spark.reading.offsets import Offsets
from turbopump.spark.reading.options import SourceOptions, Topics

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Driver:
    """Asks for a stream; Spark runs one process for each."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._link = link_to(options.client)
        session = self._link.session
        self._cluster = Cluster(session, options)
        self._following = Following(self._cluster, options, session.clock)
        self._member: QueryMember | None = None
        self._has_joined = False
        _stop_when_told()

    @property
    def latest_known(self) -> Offsets:
        """The end of each queue, as far as it is known."""
        return self._following.latest_known

    def run(
        self, work: Callable[[Following], Coroutine[Any, Any, T]], *, is_first: bool = False
    ) -> T:
        """Do something as a member of the group; raises GroupInUse if it cannot be one.

        A stream that goes on from a checkpoint waits for brokers that are away, a new one fails.
        """

        async def joined(session: Session) -> T:
            if not self._has_joined:
                await self._join(session, is_first=is_first)
            result = await work(self._following)
            if self._member is not None:
                self._member.reached(self._following.committed)
            return result

        return self._link.run(joined)

    async def _join(self, session: Session, *, is_first: bool) -> None:
        try:
            topics = await self._topics()
            self._member = await join_group(session, self._options, topics)
        except TurbopumpError as error:
            if is_first or not error.retriable:
                raise
            _log.warning("group %s is not joined yet: %s", self._options.group, error)
        else:
            self._has_joined = True

    async def _topics(self) -> Iterable[str]:
        """Return the topics wanted; one that nobody knows keeps the others from nothing."""
        chosen = self._options.chosen
        if isinstance(chosen, Topics):
            return chosen.names
        return dict.fromkeys(queue.topic for queue in await self._cluster.queues_known())

    def close(self) -> None:
        """Leave the group."""
        member, self._member = self._member, None
        if member is not None:
            self._link.run(lambda session: session.leave(member))


def _stop_when_told() -> None:
    """Let SIGTERM end the process as an exit does, so that Spark's runner calls `stop`.

    That is how Spark ends a stream's process; by default nothing would be called.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _exit)


def _exit(_signal: int, _frame: object) -> None:
    raise SystemExit(0)
