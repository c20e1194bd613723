"""The driver process of a stream: its session, group membership and planner state."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from turbopump.client.session import Session
from turbopump.spark.reading.cluster import Cluster
from turbopump.spark.reading.group_membership import GroupJoin
from turbopump.spark.reading.micro_batch_planner import MicroBatchPlanner
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.reading.queue_selection import Topics
from turbopump.spark.shared_session import shared_session

T = TypeVar("T")


class StreamDriver:
    """Runs the queries of a stream; Spark runs one process for each."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._shared = shared_session(options.client)
        session = self._shared.session
        self._cluster = Cluster(session, options)
        self._joining = GroupJoin(session, options, self._topics)
        # Before it is a member, other consumers of the group may have advanced.
        self.planner = MicroBatchPlanner(
            self._cluster, options, session.clock, lambda: self._joining.has_joined
        )
        _exit_on_sigterm()

    def run(
        self, work: Callable[[MicroBatchPlanner], Coroutine[Any, Any, T]], *, is_first: bool = False
    ) -> T:
        """Run a query as a member of the group; raises GroupInUse if it cannot be one.

        A stream resumed from a checkpoint works while brokers are unavailable; a new one fails.
        """

        async def joined(_: Session) -> T:
            await self._joining.join(is_patient=is_first)
            result = await work(self.planner)
            if self._joining.member is not None:
                self._joining.member.reached(self.planner.committed)
            return result

        return self._shared.run(joined)

    async def _topics(self) -> Iterable[str]:
        """Return the selected topics; unknown ones do not affect the others."""
        chosen = self._options.chosen
        if isinstance(chosen, Topics):
            return chosen.names
        return dict.fromkeys(queue.topic for queue in await self._cluster.known_queues())

    def close(self) -> None:
        """Leave the group."""
        self._shared.run(lambda _: self._joining.leave())


def _exit_on_sigterm() -> None:
    """Make SIGTERM exit the process normally, so that Spark's runner calls `stop`.

    Spark ends a stream's process this way; by default, nothing would be called.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
