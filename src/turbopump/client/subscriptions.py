"""Subscriptions to topics: as brokers understand them and as the client checks them."""

from __future__ import annotations

from collections.abc import Iterable

from turbopump import core
from turbopump.client import calls
from turbopump.client.session import Session
from turbopump.errors import InvalidArgument, NoRoute
from turbopump.filters.code import CodeFilter
from turbopump.filters.sql92 import Sql
from turbopump.filters.tags import EVERYTHING, SQL92, TAG, wanted_tags
from turbopump.wire import properties
from turbopump.wire.bodies import Subscription
from turbopump.wire.record import MessageView

_TAGS = properties.TAGS.encode()

Expression = str | Sql | CodeFilter
"""A subscription's filter: tags such as ``created || paid``, an SQL92 expression, or code."""


def subscription(topic: str, expression: Expression, version_ms: int) -> Subscription:
    """Return a subscription; ``version_ms`` must grow when the expression changes.

    Raises InvalidArgument if the expression has no tag or is of another type.

    ::

        subscription("orders", "created || paid", clock.now_ms())
    """
    if isinstance(expression, Sql):
        return Subscription(
            topic=topic,
            sub_string=expression.expression,
            sub_version=version_ms,
            expression_type=SQL92,
        )
    if isinstance(expression, CodeFilter):
        return Subscription(
            topic=topic,
            sub_string=expression.name,
            sub_version=version_ms,
            class_filter_mode=True,
        )
    if not isinstance(expression, str):
        # None too: brokers take it for everything, and users may have meant nothing.
        raise InvalidArgument(
            f"the expression of topic {topic!r} must be tags, Sql(...) or a CodeFilter, got "
            f'{expression!r}; pass "*" for all messages'
        )
    wanted = wanted_tags(expression, f"the tag expression of topic {topic!r}")
    return Subscription(
        topic=topic,
        sub_string=EVERYTHING if wanted.everything else expression,
        sub_version=version_ms,
        tags_set=list(wanted.tags),
        code_set=list(wanted.codes),
    )


async def check_subscription(session: Session, group: str, wanted: Subscription) -> None:
    """Have a broker, or its filter servers, compile non-tag expressions; raises RemoteError.

    A topic without a broker is not checked: its pulls report errors.
    """
    if wanted.class_filter_mode:
        await session.code_filters.check(group, wanted)
        return
    if wanted.expression_type == TAG:
        return
    try:
        address = session.any_address(await session.route(wanted.topic))
    except NoRoute:
        return
    timeout_ms = session.config.request_timeout_ms
    await calls.check_subscription(session, address, session.client_id, group, wanted, timeout_ms)


def matching(messages: Iterable[MessageView], wanted: Subscription) -> list[MessageView]:
    """Return the matching messages: brokers compare hashes of tags, which may collide."""
    if not wanted.tags_set or wanted.class_filter_mode:
        return list(messages)
    # As stored: decoding the tag of each message would take longer than comparing it.
    tags, value = frozenset(tag.encode() for tag in wanted.tags_set), core.property_value
    return [each for each in messages if value(each.stored_properties, _TAGS) in tags]
