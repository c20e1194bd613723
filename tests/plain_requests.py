"""Requests to a broker process: send to one queue and pull from it."""

from __future__ import annotations

from turbopump.net.loop import run
from turbopump.net.pool import ConnectionPool
from turbopump.net.sockets import SocketNetwork
from turbopump.wire import headers
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request, whole_body
from turbopump.wire.record import decode_records
from turbopump.wire.schema import Header
from turbopump.wire.sysflag import PULL_SUBSCRIPTION

TOPIC, GROUP = "T", "g"
TIMEOUT_MS = 5000


async def _asked(address: str, code: int, header: Header, body: bytes) -> Command:
    async with ConnectionPool(SocketNetwork()) as pool:
        return await pool.request(address, request(code, header, body), TIMEOUT_MS)


def ask(address: str, code: int, header: Header, body: bytes = b"") -> Command:
    """Send one request and return the answer, whatever it is."""
    return run(_asked(address, code, header, body))


def field(answer: Command, name: str) -> int:
    """Return an integer header field of an answer, which must be a success."""
    assert answer.code == ResponseCode.SUCCESS, answer
    return int((answer.ext_fields or {})[name])


def send(broker: str, body: bytes) -> Command:
    header = headers.SendMessage(
        producer_group=GROUP,
        topic=TOPIC,
        default_topic="TBW102",
        default_topic_queue_nums=1,
        queue_id=0,
        sys_flag=0,
        born_timestamp=0,
        flag=0,
    )
    return ask(broker, RequestCode.SEND_MESSAGE, header, body)


def pull(broker: str, offset: int, count_max: int = 32) -> list[bytes]:
    """Return the bodies of the messages from an offset on."""
    header = headers.PullMessage(
        consumer_group=GROUP,
        topic=TOPIC,
        queue_id=0,
        queue_offset=offset,
        max_msg_nums=count_max,
        sys_flag=PULL_SUBSCRIPTION,
        commit_offset=0,
        suspend_timeout_millis=0,
        subscription="*",
        sub_version=0,
    )
    answer = ask(broker, RequestCode.PULL_MESSAGE, header)
    assert answer.code == ResponseCode.SUCCESS, answer
    return [message.body for message in decode_records(whole_body(answer))]
