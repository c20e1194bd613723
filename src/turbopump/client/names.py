"""Names of topics and groups: which are allowed, and how a namespace precedes them."""

from __future__ import annotations

import re
from functools import lru_cache

from turbopump.errors import InvalidArgument

TEMPLATE_TOPIC = "TBW102"
"""A topic that does not exist yet is made like this one."""
INNER_PRODUCER_GROUP = "CLIENT_INNER_PRODUCER"
"""Every client announces it; it sends what consumers send back by themselves."""
RETRY_PREFIX = "%RETRY%"
DEAD_LETTER_PREFIX = "%DLQ%"

TOPIC_CHARS_MAX = 127
GROUP_CHARS_MAX = 255
_SEPARATOR = "%"
_NAME = re.compile(r"[%|a-zA-Z0-9_-]+")
_DEFAULT_GROUPS = frozenset({"DEFAULT_PRODUCER", "DEFAULT_CONSUMER"})
_SYSTEM_GROUP_PREFIX = "CID_RMQ_SYS_"
_SYSTEM_TOPIC_PREFIX = "rmq_sys_"
_SENDING_FORBIDDEN = frozenset(
    {
        "SCHEDULE_TOPIC_XXXX",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
    }
)
_SYSTEM_TOPICS = _SENDING_FORBIDDEN | {TEMPLATE_TOPIC, "BenchmarkTest", "RMQ_SYS_TRACE_TOPIC"}


def check_topic(topic: str) -> None:
    """Refuse a name that no topic can have."""
    _check("topic", topic, TOPIC_CHARS_MAX)


@lru_cache(maxsize=4096)
def check_topic_for_sending(topic: str) -> None:
    """Refuse a name that no topic can have, and topics that only brokers write to."""
    check_topic(topic)
    if topic in _SENDING_FORBIDDEN:
        raise InvalidArgument(f"topic is {topic!r}: only brokers send to it, choose another one")


def check_group(group: str) -> None:
    """Refuse a name that no group can have."""
    _check("group", group, GROUP_CHARS_MAX)
    if group in _DEFAULT_GROUPS:
        raise InvalidArgument(f"group is {group!r}: a name of your own is allowed")


def _check(kind: str, name: str, chars_max: int) -> None:
    if _NAME.fullmatch(name) is None or len(name) > chars_max:
        raise InvalidArgument(
            f"{kind} is {name!r}: 1 to {chars_max} of the characters a-z A-Z 0-9 _-%| are allowed"
        )


def retry_topic(group: str) -> str:
    """Return the topic of a group's messages that are to be tried again."""
    return RETRY_PREFIX + group


def dead_letter_topic(group: str) -> str:
    """Return the topic of a group's messages that were tried too often."""
    return DEAD_LETTER_PREFIX + group


def with_namespace(namespace: str, name: str) -> str:
    """Return the name as brokers know it; names of the system have no namespace.

    ::

        with_namespace("staging", "%RETRY%billing") == "%RETRY%staging%billing"
    """
    if not namespace or not name or is_system(name):
        return name
    prefix, rest = _split(name)
    own = namespace + _SEPARATOR
    return name if rest.startswith(own) else f"{prefix}{own}{rest}"


def without_namespace(namespace: str, name: str) -> str:
    """Return the name as the application knows it."""
    if not namespace:
        return name
    prefix, rest = _split(name)
    return prefix + rest.removeprefix(namespace + _SEPARATOR)


def is_system(name: str) -> bool:
    """Whether a topic or group is one that brokers and clients make for themselves."""
    return name in _SYSTEM_TOPICS or name.startswith((_SYSTEM_TOPIC_PREFIX, _SYSTEM_GROUP_PREFIX))


def _split(name: str) -> tuple[str, str]:
    for prefix in (RETRY_PREFIX, DEAD_LETTER_PREFIX):
        if name.startswith(prefix):
            return prefix, name.removeprefix(prefix)
    return "", name
