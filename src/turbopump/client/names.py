"""Names of topics and groups: which are valid, and how a namespace prefixes them."""

from __future__ import annotations

from functools import lru_cache

from turbopump.errors import InvalidArgument
from turbopump.wire.names import (
    DEAD_LETTER_PREFIX,
    HALF_OPERATIONS_TOPIC,
    HALF_TOPIC,
    RETRY_PREFIX,
    SYSTEM_PREFIX,
    SYSTEM_TOPICS,
    TOPIC_CHARS_MAX,
    has_only_allowed_characters,
    is_forbidden_to_send,
)

INNER_PRODUCER_GROUP = "CLIENT_INNER_PRODUCER"
"""Every client announces it; it sends failed messages when the broker cannot take them back."""
GROUP_CHARS_MAX = 255
_SEPARATOR = "%"
_DEFAULT_GROUPS = frozenset({"DEFAULT_PRODUCER", "DEFAULT_CONSUMER"})
_UNCOMMITTED = frozenset({HALF_TOPIC, HALF_OPERATIONS_TOPIC})
_SYSTEM_GROUP_PREFIX = "CID_RMQ_SYS_"


def check_topic(topic: str) -> None:
    _check("topic", topic, TOPIC_CHARS_MAX)


@lru_cache(maxsize=4096)
def check_topic_for_sending(topic: str) -> None:
    """Refuse an invalid topic name, and topics that only brokers write to."""
    check_topic(topic)
    if is_forbidden_to_send(topic):
        raise InvalidArgument(f"topic must not be {topic!r}: only brokers send to it")


def check_topic_to_subscribe(topic: str) -> None:
    """Refuse an invalid topic name, and topics of uncommitted messages."""
    check_topic(topic)
    if topic in _UNCOMMITTED:
        raise InvalidArgument(
            f"topic must not be {topic!r}: it holds messages of open transactions;"
            " `turbopump transaction list` shows them"
        )


def check_group(group: str) -> None:
    _check("group", group, GROUP_CHARS_MAX)
    if group in _DEFAULT_GROUPS:
        raise InvalidArgument(f"group must be a name of your own, got {group!r}")


def _check(kind: str, name: str, chars_max: int) -> None:
    is_text = isinstance(name, str)
    if not is_text or not has_only_allowed_characters(name) or len(name) > chars_max:
        raise InvalidArgument(
            f"{kind} must be 1–{chars_max} of the characters a-z A-Z 0-9 _-%|, got {name!r}"
        )


def with_namespace(namespace: str, name: str) -> str:
    """Return the name as brokers know it; system names have no namespace.

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
    """Whether brokers and clients use a topic or group internally."""
    return name in SYSTEM_TOPICS or name.startswith((SYSTEM_PREFIX, _SYSTEM_GROUP_PREFIX))


def _split(name: str) -> tuple[str, str]:
    for prefix in (RETRY_PREFIX, DEAD_LETTER_PREFIX):
        if name.startswith(prefix):
            return prefix, name.removeprefix(prefix)
    return "", name
