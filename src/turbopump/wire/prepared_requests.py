"""The most frequent requests, which the core writes: sends and pulls."""

from __future__ import annotations

from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from turbopump import core
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import Buffer, Command, request
from turbopump.wire.framing import too_long
from turbopump.wire.headers import PullMessage, SendMessage, SendMessageV2
from turbopump.wire.names import TEMPLATE_TOPIC

_LENGTH_BYTES = 4


class SendKind:
    """What the sends of one producer group, topic and broker have in common."""

    def __init__(self, header: SendMessage) -> None:
        self.code = RequestCode.SEND_BATCH_MESSAGE if header.batch else RequestCode.SEND_MESSAGE_V2
        self.header = header
        self.frame = core.SendTemplate(
            header.producer_group,
            header.topic,
            header.broker_name,
            default_topic_queue_nums=header.default_topic_queue_nums,
            is_batch=bool(header.batch),
            unit_mode=bool(header.unit_mode),
            default_topic=header.default_topic,
        ).frame


@lru_cache(maxsize=16_384)
def send_kind(
    group: str,
    topic: str,
    broker: str,
    new_topic_queues: int,
    is_batch: bool,
    unit_mode: bool = False,
) -> SendKind:
    """Return the kind of messages or batches for a topic on a broker."""
    return SendKind(
        SendMessageV2(
            producer_group=group,
            topic=topic,
            default_topic=TEMPLATE_TOPIC,
            default_topic_queue_nums=new_topic_queues,
            queue_id=0,
            sys_flag=0,
            born_timestamp=0,
            flag=0,
            properties="",
            reconsume_times=0,
            unit_mode=unit_mode,
            batch=is_batch,
            broker_name=broker,
        )
    )


class SendRequest(Struct, frozen=True, gc=False):
    """One message for a queue, complete except for the number of its request."""

    kind: SendKind
    queue_id: int
    sys_flag: int
    born_ms: int
    flag: int
    properties: str
    body: Buffer

    @property
    def code(self) -> int:
        return self.kind.code

    @property
    def header(self) -> SendMessage:
        return replace(
            self.kind.header,
            queue_id=self.queue_id,
            sys_flag=self.sys_flag,
            born_timestamp=self.born_ms,
            flag=self.flag,
            properties=self.properties,
        )

    def command(self) -> Command:
        """Return the same request for hooks that see or change it."""
        return request(self.code, self.header, self.body)

    def frame_parts(self, opaque: int, frame_flag: int, frame_bytes_max: int) -> list[Buffer]:
        """Return the frame, in one piece unless the body is long; see `encode_parts`."""
        return self.kind.frame(
            opaque,
            self.queue_id,
            self.sys_flag,
            self.born_ms,
            self.flag,
            self.properties,
            frame_flag,
            self.body,
            frame_bytes_max,
        )


def pull_requests(header: PullMessage) -> core.PullRequests:
    """Return what writes pulls that differ from a header in queue, offset and count only."""
    return core.PullRequests(
        header.consumer_group,
        header.topic,
        sys_flag=header.sys_flag,
        commit_offset=header.commit_offset,
        suspend_timeout_ms=header.suspend_timeout_millis,
        subscription=header.subscription,
        sub_version=header.sub_version,
        expression_type=header.expression_type,
        bulk_pull=header.bulk_pull,
        broker=header.broker_name,
    )


class PullRequest(Struct, frozen=True):
    """A pull, complete except for the number of its request."""

    header: PullMessage

    @property
    def code(self) -> int:
        return RequestCode.PULL_MESSAGE

    def command(self) -> Command:
        """Return the same request for hooks that see or change it."""
        return request(self.code, self.header)

    def frame_parts(self, opaque: int, frame_flag: int, frame_bytes_max: int) -> list[Buffer]:
        """Return the frame; pulls expect an answer, so ``frame_flag`` must be 0."""
        assert not frame_flag, "pulls are not one-way"
        header = self.header
        queue = header.queue_id, header.queue_offset, header.max_msg_nums
        frame = pull_requests(header).frame(opaque, *queue)
        if len(frame) - _LENGTH_BYTES > frame_bytes_max:
            raise too_long(len(frame) - _LENGTH_BYTES, frame_bytes_max)
        return [frame]
