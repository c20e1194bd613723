"""What a consumer wants of a topic, as brokers understand it and as the client checks it."""

from __future__ import annotations

from collections.abc import Iterable

from turbopump.filters.tags import EVERYTHING, SQL92, TAG, wanted_tags
from turbopump.wire.bodies import Subscription
from turbopump.wire.record import MessageView

__all__ = ["EVERYTHING", "SQL92", "TAG", "matching", "subscription"]


def subscription(topic: str, expression: str, version_ms: int, kind: str = TAG) -> Subscription:
    """Make a subscription; ``version_ms`` must grow when the expression changes.

    Raises InvalidArgument if the expression has no tag.

    ::

        subscription("orders", "created || paid", clock.now_ms())
    """
    if kind != TAG:
        return Subscription(
            topic=topic, sub_string=expression, sub_version=version_ms, expression_type=kind
        )
    wanted = wanted_tags(expression, f"the tag expression of topic {topic!r}")
    return Subscription(
        topic=topic,
        sub_string=EVERYTHING if wanted.everything else expression,
        sub_version=version_ms,
        tags_set=list(wanted.tags),
        code_set=list(wanted.codes),
    )


def matching(messages: Iterable[MessageView], wanted: Subscription) -> list[MessageView]:
    """Return those that are wanted: the broker compares hashes of tags, which several may share."""
    if not wanted.tags_set or wanted.class_filter_mode:
        return list(messages)
    tags = frozenset(wanted.tags_set)
    return [message for message in messages if message.tags in tags]
