"""Where a group's offsets are committed, and which commits a broker may have lost since.

A broker writes offsets to disk every few seconds, so a crash loses the latest. And only a master
keeps them: a slave of Apache RocketMQ accepts them too, and replaces them by those of its master.
"""

from __future__ import annotations

from turbopump.client.continuity import Source
from turbopump.client.routes import MASTER_ID
from turbopump.client.session import Session
from turbopump.errors import NoRoute
from turbopump.message import MessageQueue
from turbopump.spark.reading.offsets import Place

_LOOKUP_MS = 1000
"""How often name servers are asked whether a master is back."""


class CommitRoutes:
    """The masters that offsets are committed to, and over which connections they were."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lookup_due_ms: dict[str, int] = {}
        self._used: dict[Place, Source] = {}

    async def master(self, queue: MessageQueue) -> Source | None:
        """Return the connection to a queue's master, None if no replica is known.

        Raises NoRoute while only slaves are: the next call finds a master that has returned.
        """
        session, broker = self._session, queue.broker
        now_ms = session.clock.monotonic_ms()
        if not session.has_master(broker) and now_ms >= self._lookup_due_ms.get(broker, 0):
            self._lookup_due_ms[broker] = now_ms + _LOOKUP_MS
            await session.refresh_route(queue.topic)
        address = session.replicas(broker).get(MASTER_ID)
        if address is not None:
            return session.source(address)
        if session.has_broker(broker):
            raise NoRoute(f"broker {broker!r} has no master now; commits wait for it")
        return None

    def note(self, place: Place, source: Source) -> None:
        """Note the connection before a commit, which succeeded."""
        self._used[place] = source

    def take_lost(self) -> frozenset[Place]:
        """Return, once, the places whose master has changed or lost the connection since."""
        lost = frozenset(place for place, used in self._used.items() if self._is_lost(place, used))
        for place in lost:
            del self._used[place]
        return lost

    def _is_lost(self, place: Place, used: Source) -> bool:
        address = self._session.replicas(place[1]).get(MASTER_ID, used.address)
        # Without a number, the commit itself had to connect: perhaps more than once.
        return not used.connection or self._session.source(address) != used
