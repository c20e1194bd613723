"""What the driver's process of a stream has: a connection, a group, and what it has seen."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from turbopump.client.session import Session
from turbopump.spark.cluster import Cluster
from turbopump.spark.following import Following
from turbopump.spark.link import link_to
from turbopump.spark.membership import QueryMember, join_group
from turbopump.spark.offsets import Offsets
from turbopump.spark.options import SourceOptions, Topics

T = TypeVar("T")


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

    def run(self, work: Callable[[Following], Coroutine[Any, Any, T]]) -> T:
        """Do something as a member of the group; raises GroupInUse if it cannot be one."""

        async def joined(session: Session) -> T:
            if not self._has_joined:
                queues = await self._cluster.queues()
                chosen = self._options.chosen
                # A retry topic has queues when something was sent back; its lag counts from then.
                topics: Iterable[str] = (
                    chosen.names
                    if isinstance(chosen, Topics)
                    else dict.fromkeys(queue.topic for queue in queues)
                )
                self._member = await join_group(session, self._options, topics)
                self._has_joined = True
            result = await work(self._following)
            if self._member is not None:
                self._member.reached(self._following.committed)
            return result

        return self._link.run(joined)

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
