"""Valid topic names, and reserved ones."""

from __future__ import annotations

import re

TEMPLATE_TOPIC = "TBW102"
"""Template of topics that are created when a message is sent to them."""
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
"""Delayed messages wait here; one queue for each level."""
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
HALF_OPERATIONS_TOPIC = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
CHECKED_TOO_OFTEN_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
OFFSET_MOVED_TOPIC = "OFFSET_MOVED_EVENT"
"""Gets an event when a group asks for messages that do not exist (any more)."""
SELF_TEST_TOPIC = "SELF_TEST_TOPIC"
BENCHMARK_TOPIC = "BenchmarkTest"
TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"

RETRY_PREFIX = "%RETRY%"
DEAD_LETTER_PREFIX = "%DLQ%"
SYSTEM_PREFIX = "rmq_sys_"

TOPIC_CHARS_MAX = 127
_NAME = re.compile(r"[%|a-zA-Z0-9_-]+")

SYSTEM_TOPICS = frozenset(
    {
        SELF_TEST_TOPIC,
        TEMPLATE_TOPIC,
        SCHEDULE_TOPIC,
        BENCHMARK_TOPIC,
        HALF_TOPIC,
        TRACE_TOPIC,
        HALF_OPERATIONS_TOPIC,
        CHECKED_TOO_OFTEN_TOPIC,
        OFFSET_MOVED_TOPIC,
    }
)
TRANSACTION_TOPICS = frozenset({HALF_TOPIC, HALF_OPERATIONS_TOPIC, CHECKED_TOO_OFTEN_TOPIC})
"""Topics that a broker creates for its first transaction, with one queue each."""
_FORBIDDEN = SYSTEM_TOPICS - {TEMPLATE_TOPIC, BENCHMARK_TOPIC, TRACE_TOPIC}


def check_name(name: str) -> str | None:
    """Return what is wrong with a topic's name, in Apache RocketMQ's words, or None.

    A topic becomes a directory, so valid names must be safe as one: no slash, no dot.
    """
    if not name.strip():
        return "The specified topic is blank."
    if not has_only_allowed_characters(name):
        return "The specified topic contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"
    if len(name) > TOPIC_CHARS_MAX:
        return "The specified topic is longer than topic max length."
    return None


def has_only_allowed_characters(name: str) -> bool:
    """Whether all characters of a topic or group name are valid."""
    return _NAME.fullmatch(name) is not None


def is_forbidden_to_send(name: str) -> bool:
    """Whether only the broker may write to a topic."""
    return name in _FORBIDDEN


def retry_topic(group: str) -> str:
    return RETRY_PREFIX + group


def dead_letter_topic(group: str) -> str:
    return DEAD_LETTER_PREFIX + group
