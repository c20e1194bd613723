"""Messages that no broker takes back are resent, with the same effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusters import Recorder, cluster
from consumers import send
from turbopump.client.calls import Found
from turbopump.client.pull_config import PullConfig
from turbopump.client.pull_consumer import PullConsumer
from turbopump.errors import ConnectFailed
from turbopump.message import MessageQueue
from turbopump.testing import virtual_time
from turbopump.wire import properties
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import Command

QUEUE = MessageQueue("T", "a", 0)


class NotTakenBack(Recorder):
    """Rejects every request that sends a message back."""

    def before_request(self, address: str, command: Command) -> Command:
        super().before_request(address, command)
        if command.code == RequestCode.CONSUMER_SEND_MSG_BACK:
            raise ConnectFailed("as the test wants it")
        return command


@pytest.mark.parametrize(
    ("level", "delay", "own", "named_limit"), [(0, "3", None, "17"), (5, "5", 2, "3")]
)
@virtual_time()
async def test_a_resent_message_names_the_requested_delay_and_a_limit(
    tmp_path: Path, level: int, delay: str, own: int | None, named_limit: str
) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"x"], to=QUEUE)
        hook = NotTakenBack()
        session, config = world.session(hooks=[hook]), PullConfig(max_attempts=own)
        async with PullConsumer("g", session=session, config=config) as consumer:
            found = await consumer.pull(QUEUE, 0)
            assert isinstance(found, Found)
            await consumer.send_back(found.messages[0], QUEUE, delay_level=level)
        (sent,) = hook.of(RequestCode.SEND_MESSAGE_V2)
        fields = sent.ext_fields or {}
        named = properties.decode(fields["i"])
        assert (named["DELAY"], named["RECONSUME_TIME"]) == (delay, "1")
        assert named["MAX_RECONSUME_TIMES"] == fields["l"] == named_limit


@virtual_time()
async def test_an_abandoned_message_is_dead_lettered_immediately(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"x"], to=QUEUE)
        hook = NotTakenBack()
        async with PullConsumer("g", session=world.session(hooks=[hook])) as consumer:
            found = await consumer.pull(QUEUE, 0)
            assert isinstance(found, Found)
            await consumer.send_back(found.messages[0], QUEUE, delay_level=-1)
            dead = await consumer.pull(MessageQueue("%DLQ%g", "a", 0), 0)
            assert isinstance(dead, Found)
            (letter,) = dead.messages
            assert (letter.body, letter.reconsume_times) == (b"x", 0)
            assert letter.properties["RETRY_TOPIC"] == "T"


@virtual_time()
async def test_a_resent_message_is_retried_as_often_as_one_sent_back(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"x"], to=QUEUE)
        retry = MessageQueue("%RETRY%g", "a", 0)
        session, once = world.session(hooks=[NotTakenBack()]), PullConfig(max_attempts=1)
        async with PullConsumer("g", session=session, config=once) as consumer:
            found = await consumer.pull(QUEUE, 0)
            assert isinstance(found, Found)
            await consumer.send_back(found.messages[0], QUEUE)
            again = await consumer.pull_when_found(retry, 0)
            assert isinstance(again, Found)
            (message,) = again.messages
            assert message.reconsume_times == 1
            await consumer.send_back(message, retry)
            assert isinstance(await consumer.pull(MessageQueue("%DLQ%g", "a", 0), 0), Found)
