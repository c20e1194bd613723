"""Largest body of a request to a server, by request code.

Bodies are parsed in one call on the event loop, so their length bounds how long all others wait.
Answers, and requests of brokers to clients, are bounded by the frame length alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from turbopump.core import FRAME_BYTES_MAX
from turbopump.wire.codes import RequestCode as Code

_MIB = 1024 * 1024

DEFAULT_BODY_BYTES_MAX = 64 * 1024
"""For requests that have no body, or a small one: settings, one group, one subscription."""

BODY_BYTES_MAX: Mapping[int, int] = MappingProxyType(
    {
        # Messages: the broker checks its maxMessageSize.
        int(Code.SEND_MESSAGE): FRAME_BYTES_MAX,
        int(Code.SEND_MESSAGE_V2): FRAME_BYTES_MAX,
        int(Code.SEND_BATCH_MESSAGE): FRAME_BYTES_MAX,
        int(Code.SEND_REPLY_MESSAGE): FRAME_BYTES_MAX,
        int(Code.SEND_REPLY_MESSAGE_V2): FRAME_BYTES_MAX,
        # 100,000 topics.
        int(Code.REGISTER_BROKER): FRAME_BYTES_MAX,
        # 1,000 groups with eight subscriptions each.
        int(Code.HEART_BEAT): 2 * _MIB,
        # 10,000 queues with the longest names.
        int(Code.LOCK_BATCH_MQ): 4 * _MIB,
        int(Code.UNLOCK_BATCH_MQ): 4 * _MIB,
        # The new offset of each queue of a topic.
        int(Code.INVOKE_BROKER_TO_RESET_OFFSET): 4 * _MIB,
    }
)
