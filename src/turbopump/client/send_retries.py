"""Whether a failed send is retried: which failures, how often, and after which pause."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from turbopump.client.producer_config import ProducerConfig
from turbopump.client.session import Session
from turbopump.errors import (
    ConnectFailed,
    NetworkError,
    NoRoute,
    Overloaded,
    RemoteError,
    TurbopumpError,
)
from turbopump.message import MessageQueue
from turbopump.timeouts import timeout
from turbopump.wire.codes import ResponseCode

RETRIED_CODES = frozenset(
    {
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.NO_PERMISSION,
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.NO_BUYER_ID,
        ResponseCode.NOT_IN_CURRENT_UNIT,
    }
)
"""Answers after which another broker may take the message."""

SendFailure = NetworkError | NoRoute | RemoteError

_FIRST_PAUSE_MS = 20
_LONGEST_PAUSE_MS = 500


def is_refusal(error: SendFailure) -> bool:
    """Return whether nothing was stored and a later attempt may succeed.

    The broker is busy, starting or closing, or could not be reached or found. Retrying such a send
    cannot duplicate the message.
    """
    return isinstance(error, ConnectFailed | NoRoute | Overloaded) or (
        isinstance(error, RemoteError) and error.retriable
    )


class SendRetries:
    """The failed attempts of one send.

    Refusals are retried until the deadline, without a pause while there is a broker that has not
    refused. Failures after which the message may be stored are retried a number of times, but never
    with a chosen queue: the message would end up behind those sent in the meantime. Without
    ``may_repeat``, a message that may be stored is never sent again.
    """

    def __init__(
        self,
        session: Session,
        topic: str,
        config: ProducerConfig,
        end_ms: int,
        *,
        is_chosen: bool,
        may_repeat: bool = True,
    ) -> None:
        self.avoided: frozenset[str] = frozenset()
        """Brokers to use for the next attempt only if there are no others."""
        self._session = session
        self._topic = topic
        self._left = 0 if is_chosen else config.retries_max
        self._end_ms = end_ms
        self._waits = config.wait_for_brokers
        self._is_chosen = is_chosen
        self._may_repeat = may_repeat
        self.pause_ms = 0
        """How long to wait before the next attempt; 0 for not at all."""
        self._pauses = 0

    def after_error(self, error: SendFailure, queue: MessageQueue | None) -> bool:
        """Note a failure, and the queue if one was found; return whether to retry."""
        if not (self._waits and is_refusal(error)):
            if not isinstance(error, RemoteError) or error.code == ResponseCode.SYSTEM_ERROR:
                return self.after_failure(queue)
            return error.code in RETRIED_CODES and self._again(queue)
        if isinstance(error, NoRoute) and self._session.cached_route(self._topic) is None:
            # No name server has ever known the topic: a mistake, not a restart.
            return False
        self.pause_ms = 0
        if queue is None or queue.broker in self.avoided or not self._has_others(queue.broker):
            self.pause_ms = self._next_pause_ms(error)
            self.avoided = frozenset()
        if queue is not None:
            self.avoided |= {queue.broker}
        # An attempt without time for its answer would only hide why the last one failed.
        return self._session.clock.monotonic_ms() + self.pause_ms < self._end_ms

    def after_failure(self, queue: MessageQueue | None) -> bool:
        """Note an attempt after which the message may be stored; return whether to retry."""
        return self._may_repeat and self._again(queue)

    def _again(self, queue: MessageQueue | None) -> bool:
        self.pause_ms = 0
        self._left -= 1
        self.avoided = frozenset() if queue is None else frozenset({queue.broker})
        return self._left >= 0 and self._session.clock.monotonic_ms() < self._end_ms

    async def pause(self) -> None:
        """Wait, looking up the route meanwhile: a broker may come back elsewhere."""
        clock = self._session.clock
        end_ms = clock.monotonic_ms() + self.pause_ms
        with suppress(TimeoutError, TurbopumpError):
            async with timeout(self.pause_ms / 1000):
                await self._session.refresh_route(self._topic)
        await asyncio.sleep(max(end_ms - clock.monotonic_ms(), 0) / 1000)

    def _has_others(self, broker: str) -> bool:
        """Whether there is another broker that has not refused the message."""
        route = self._session.cached_route(self._topic)
        if self._is_chosen or route is None:
            return False
        return any(each.broker not in {broker, *self.avoided} for each in route.writable)

    def _next_pause_ms(self, error: SendFailure) -> int:
        longest_ms = min(_FIRST_PAUSE_MS << self._pauses, _LONGEST_PAUSE_MS)
        self._pauses += 1
        # Randomized, or all sends that were refused together would retry together.
        pause_ms = longest_ms - self._session.random.randrange(longest_ms // 2 + 1)
        # Any sooner, the pool would not even try to connect.
        wait_s = error.retry_after if isinstance(error, ConnectFailed) else 0
        return max(pause_ms, round(wait_s * 1000))
