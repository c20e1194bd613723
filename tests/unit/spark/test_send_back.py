"""What tasks send back reaches its broker with the delay that the function requested."""

from __future__ import annotations

from pathlib import Path

from clusters import Recorder, cluster
from consumers import send
from turbopump.client.calls import Found
from turbopump.client.pull_consumer import PullConsumer
from turbopump.message import MessageQueue
from turbopump.spark.consuming.handler_runner import DEAD, Returned, SendBack
from turbopump.spark.consuming.message_rows import Delivered
from turbopump.testing import virtual_time
from turbopump.wire.codes import RequestCode
from turbopump.wire.names import SCHEDULE_TOPIC

QUEUE = MessageQueue("T", "a", 0)


@virtual_time()
async def test_the_requested_delay_reaches_the_broker(tmp_path: Path) -> None:
    levels = {b"grows": 0, b"first": 1, b"seventh": 7, b"hopeless": DEAD}
    async with cluster(tmp_path) as world:
        await send(world, list(levels), to=QUEUE)
        hook = Recorder()
        session = world.session(hooks=[hook])
        async with PullConsumer("g", session=session) as consumer:
            found = await consumer.pull(QUEUE, 0)
            assert isinstance(found, Found)
            returned = [
                Returned(Delivered(message, "a"), levels[message.body])
                for message in found.messages
            ]
            assert await SendBack(session.config, "g", 16)._all(session, returned) == []
            asked = [
                (command.ext_fields or {})["delayLevel"]
                for command in hook.of(RequestCode.CONSUMER_SEND_MSG_BACK)
            ]
            assert sorted(asked) == sorted(map(str, levels.values()))
            # An increasing delay starts with the third; each level waits in its own queue.
            for body, level in ((b"grows", 3), (b"first", 1), (b"seventh", 7)):
                waiting = await consumer.pull(MessageQueue(SCHEDULE_TOPIC, "a", level - 1), 0)
                assert isinstance(waiting, Found)
                assert [message.body for message in waiting.messages] == [body]
            dead = await consumer.pull(MessageQueue("%DLQ%g", "a", 0), 0)
            assert isinstance(dead, Found)
            assert [message.body for message in dead.messages] == [b"hopeless"]
