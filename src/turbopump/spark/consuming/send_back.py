"""Sending messages from executors back to their brokers, concurrently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turbopump.client.config import ClientConfig
from turbopump.client.retry_sender import RetrySender
from turbopump.client.session import Session
from turbopump.errors import SparkError
from turbopump.message import MessageQueue
from turbopump.spark.consuming.handler_runner import Returned
from turbopump.spark.reading.retry import gather_by_key
from turbopump.spark.shared_session import shared_session

_IN_FLIGHT_MAX = 64


@dataclass(frozen=True, slots=True)
class SendBack:
    """Sends messages back over the process's shared session; a value sent to executors."""

    client: ClientConfig
    group: str
    attempts_max: int

    def __call__(self, returned: Sequence[Returned]) -> None:
        """Return when brokers have stored all of them; raises SparkError if one is not accepted."""
        kept = shared_session(self.client).run(lambda session: self._all(session, returned))
        if kept:
            raise SparkError(
                f"{len(kept)} of {len(returned)} failed messages could not be sent back, the first "
                f"is {kept[0].delivered.message.message_id} of broker "
                f"{kept[0].delivered.broker!r}: the task fails so that none is lost; the "
                "executor's log has the broker's error"
            )

    async def _all(self, session: Session, returned: Sequence[Returned]) -> list[Returned]:
        """Send all back, and return those that no broker accepted."""
        sending = RetrySender(session, self.group, self.attempts_max)

        async def send(number: int) -> bool:
            each = returned[number]
            message, broker = each.delivered.message, each.delivered.broker
            queue = MessageQueue(message.topic, broker, message.queue_id)
            return await sending.send_back(queue, message, each.delay_level)

        sent = await gather_by_key(range(len(returned)), send, _IN_FLIGHT_MAX)
        return [returned[number] for number, is_sent in sent.items() if not is_sent]
