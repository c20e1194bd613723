"""The ends of all queues of a topic in one answer, which may wait until a message arrives."""

from __future__ import annotations

from turbopump.broker.arrivals import WHOLE_TOPIC, Arrivals, HeldPull
from turbopump.broker.handlers.common import answer_fast, topic_missing
from turbopump.broker.live_config import LiveConfig
from turbopump.broker.pull import Pulls
from turbopump.broker.topics import Topics, queues_of
from turbopump.net.connection import Connection
from turbopump.net.router import Handler, failure
from turbopump.store.store import Store
from turbopump.wire.bodies import QueueEnds
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import Command
from turbopump.wire.headers import QueueEndsAnswer, QueueEndsOf


class QueueEndsRequests:
    """Serves requests for the ends of a topic's queues."""

    def __init__(
        self, config: LiveConfig, topics: Topics, store: Store, pulls: Pulls, arrivals: Arrivals
    ) -> None:
        self._config = config
        self._topics = topics
        self._store = store
        self._pulls = pulls
        self._arrivals = arrivals

    def handlers(self) -> dict[int, Handler]:
        return {RequestCode.GET_QUEUE_ENDS: self.ends}

    def ends(self, request: Command, peer: Connection) -> Command | None:
        """Answer with the ends; hold the request while there is nothing after its position."""
        header = QueueEndsOf.from_ext_fields(request.ext_fields)
        if header.wait_ms > 0:
            self._pulls.require_readable(header.consumer_group, header.topic, peer)
        answer, position = self._ends(request, header.topic)
        if header.wait_ms <= 0 or position > header.since or self._arrivals.is_full:
            return answer
        polling = self._config.current.long_polling
        self._arrivals.hold(
            HeldPull(
                queue=(header.topic, WHOLE_TOPIC),
                offset=0,
                owner=peer,
                resume=lambda: self._resume(request, peer, header),
            ),
            header.wait_ms if polling.enabled else polling.short_hold_ms,
        )
        return None

    def _resume(self, request: Command, peer: Connection, header: QueueEndsOf) -> None:
        """Answer a request that was held, if its group may still read the topic."""
        try:
            self._pulls.require_readable(header.consumer_group, header.topic, peer)
            answer, _ = self._ends(request, header.topic)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client waits for it
            answer = failure(request, peer, error)
        peer.answer(request, answer)

    def _ends(self, request: Command, name: str) -> tuple[Command, int]:
        topic = self._topics.find(name)
        if topic is None:
            raise topic_missing(name)
        lows, highs, position = self._store.topic_ranges(name, queues_of(topic))
        header = QueueEndsAnswer(position=position, read_queue_nums=topic.read_queue_nums)
        body = QueueEnds(min_offsets=lows, max_offsets=highs)
        return answer_fast(request, body, header), position
