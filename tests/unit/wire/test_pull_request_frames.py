from __future__ import annotations

import pytest
from msgspec.structs import replace

from turbopump.wire.codes import RequestCode
from turbopump.wire.command import Command
from turbopump.wire.framing import encode
from turbopump.wire.headers import PullMessage
from turbopump.wire.prepared_frames import PullRequestFrames

HEADER = PullMessage(
    consumer_group='g"queueOffset":"0"',
    topic='%RETRY%"opaque":0',
    queue_id=3,
    queue_offset=5,
    max_msg_nums=7,
    sys_flag=4,
    commit_offset=0,
    suspend_timeout_millis=20_000,
    subscription='"maxMsgNums":"0" || ü{0}',
    sub_version=0,
    expression_type="TAG",
)


@pytest.mark.parametrize(
    ("opaque", "queue", "offset", "count"), [(0, 0, 0, 0), (2**31 - 1, 65535, 2**63 - 1, 32)]
)
def test_the_frames_are_those_that_are_encoded_the_usual_way(
    opaque: int, queue: int, offset: int, count: int
) -> None:
    asked = replace(HEADER, queue_id=queue, queue_offset=offset, max_msg_nums=count)
    fields = asked.to_ext_fields()
    usual = encode(Command(RequestCode.PULL_MESSAGE, opaque=opaque, ext_fields=fields))
    assert PullRequestFrames(HEADER).frame(opaque, queue, offset, count) == usual
