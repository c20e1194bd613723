"""Subscriptions as filters for the store: by tags, or by SQL92."""

from __future__ import annotations

from turbopump.broker.clients import Consumers
from turbopump.broker.consumer_filters import ConsumerFilters, parsed, sql_filter
from turbopump.broker.live_config import LiveConfig
from turbopump.errors import InvalidArgument, InvalidExpression, RemoteError
from turbopump.filters import tags
from turbopump.filters.sql92.parser import LENGTH_MAX
from turbopump.store.outcomes import EVERYTHING, Filter
from turbopump.wire import properties as names
from turbopump.wire.bodies import Subscription
from turbopump.wire.codes import ResponseCode
from turbopump.wire.names import RETRY_PREFIX

_SHOWN_CHARS_MAX = 200
"""How much of an expression an error quotes: remarks are cut, and the cause comes last."""


class SubscriptionFilters:
    """Turns subscriptions into filters, and checks them for clients."""

    def __init__(
        self, config: LiveConfig, consumers: Consumers, registered: ConsumerFilters
    ) -> None:
        self._config = config
        self._consumers = consumers
        self._registered = registered

    def of_request(self, expression: str | None, kind: str | None) -> Filter:
        """Return the filter of the expression in a pull."""
        length = len(expression or "") + len(kind or "")
        if length > LENGTH_MAX:
            remark = f"subscription must be at most {LENGTH_MAX} characters, got {length}"
            raise RemoteError(ResponseCode.SUBSCRIPTION_PARSE_FAILED, remark)
        if kind and kind != tags.TAG:
            self._require_sql(kind)
            return _sql_filter(expression, ResponseCode.SUBSCRIPTION_PARSE_FAILED)
        if expression == tags.EVERYTHING:
            return EVERYTHING
        try:
            parsed = tags.parse_tags(expression)
        except InvalidArgument as error:
            raise RemoteError(ResponseCode.SUBSCRIPTION_PARSE_FAILED, str(error)) from error
        return EVERYTHING if parsed.everything else Filter(tags_codes=frozenset(parsed.codes))

    def of_subscription(self, group: str, subscription: Subscription) -> Filter:
        """Return the filter of a group's subscription to a topic."""
        kind = subscription.expression_type
        if kind and kind != tags.TAG:
            self._require_sql(kind)
            return self._newest(group, subscription)
        is_retry = subscription.topic.startswith(RETRY_PREFIX)
        if is_retry and self._config.current.filters.retried:
            return Filter(properties=lambda data: self._wants_again(group, data))
        if subscription.sub_string == tags.EVERYTHING or subscription.class_filter_mode:
            # Filter servers evaluate code filters.
            return EVERYTHING
        # The hashes are those that the consumer sent: the broker does not compute them.
        return Filter(tags_codes=frozenset(subscription.code_set))

    def check(self, subscription: Subscription) -> None:
        """Raise RemoteError if a subscription could not be served."""
        kind = subscription.expression_type
        if not kind or kind == tags.TAG:
            return
        self._require_sql(kind)
        _sql_filter(subscription.sub_string, ResponseCode.SUBSCRIPTION_PARSE_FAILED)

    def _require_sql(self, kind: str) -> None:
        if kind != tags.SQL92 or not self._config.current.filters.sql_enabled:
            raise RemoteError.system(
                "The broker does not support consumer to filter message by"
                f" {kind[:_SHOWN_CHARS_MAX]}"
            )

    def _newest(self, group: str, subscription: Subscription) -> Filter:
        """Return the filter of an SQL92 subscription, or of its newer stored version."""
        kept = self._registered.find(group, subscription.topic)
        if kept is not None and kept.data.client_version >= subscription.sub_version:
            return kept.wanted
        return _sql_filter(subscription.sub_string, ResponseCode.FILTER_DATA_NOT_EXIST)

    def _wants_again(self, group: str, data: bytes) -> bool:
        """Whether a retried message matches the group's subscription to its original topic."""
        topic = parsed(data).get(names.RETRY_TOPIC, "")
        wanted = self._consumers.subscription(group, topic)
        if wanted is None or wanted.expression_type != tags.SQL92:
            return True
        try:
            matches = self._newest(group, wanted).properties
        except RemoteError:
            # Pulls of that topic get the error; a failed message must not be lost by it.
            return True
        return matches is None or matches(data)


def _sql_filter(expression: str | None, refusal: ResponseCode) -> Filter:
    try:
        return sql_filter(expression or "")
    except InvalidExpression as error:
        shown = repr((expression or "")[:_SHOWN_CHARS_MAX])
        if len(expression or "") > _SHOWN_CHARS_MAX:
            shown += "..."
        raise RemoteError(refusal, f"SQL92 expression {shown}: {error}") from error
