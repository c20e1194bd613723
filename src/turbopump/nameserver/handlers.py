"""Requests of clients and operators: routes, lists, key-values, permissions, settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from turbopump.errors import InvalidArgument, RemoteError
from turbopump.nameserver.kv import ORDER_NAMESPACE, KvConfig
from turbopump.nameserver.live_config import LiveConfig
from turbopump.nameserver.routes import UNIT_FLAG, UNIT_SUBSCRIPTION_FLAG, RouteTable
from turbopump.net.connection import Connection
from turbopump.net.router import Handler
from turbopump.settings import described, parse_properties, render_properties
from turbopump.wire import headers
from turbopump.wire.bodies import KeyValues, TopicList
from turbopump.wire.codes import RequestCode, ResponseCode, release
from turbopump.wire.command import Command, whole_body
from turbopump.wire.schema import Body

STANDARD_JSON_VERSION = release(4, 9, 4)
"""Older clients need bare integers as keys in a route: some parse it by hand."""

_TEXTS_MAX = 10_000
"""Routes cached as encoded bodies; when there are more, the cache is cleared."""

ROUTE_MISSING = "No topic route info in name server for the topic: "


# --- routes and lists -----------------------------------------------------------------------------


def route_handlers(routes: RouteTable, kv: KvConfig, config: LiveConfig) -> dict[int, Handler]:
    """Return the handlers that read and change routes, by request code."""
    both_flags = UNIT_FLAG | UNIT_SUBSCRIPTION_FLAG
    subscription = UNIT_SUBSCRIPTION_FLAG
    return {
        RequestCode.GET_ROUTEINFO_BY_TOPIC: partial(_route, RouteTexts(routes), kv, config),
        RequestCode.GET_BROKER_CLUSTER_INFO: _answering(routes.cluster_info),
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: _listing(routes.topics),
        RequestCode.GET_TOPICS_BY_CLUSTER: partial(_topics_in_cluster, routes),
        RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: _answering(routes.system_topics),
        RequestCode.GET_UNIT_TOPIC_LIST: _listing(
            partial(routes.topics_flagged, UNIT_FLAG, UNIT_FLAG)
        ),
        RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: _listing(
            partial(routes.topics_flagged, subscription, subscription)
        ),
        RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: _listing(
            partial(routes.topics_flagged, subscription, both_flags)
        ),
        RequestCode.WIPE_WRITE_PERM_OF_BROKER: partial(_wipe_write_permission, routes),
        RequestCode.ADD_WRITE_PERM_OF_BROKER: partial(_add_write_permission, routes),
        RequestCode.DELETE_TOPIC_IN_NAMESRV: partial(_delete_topic, routes),
    }


class RouteTexts:
    """Cached route answers, dropped on change: every client asks every 30 s."""

    def __init__(self, routes: RouteTable) -> None:
        self._routes = routes
        self._changes = routes.changes
        self._texts: dict[tuple[str, str | None, bool], bytes] = {}

    def find(self, topic: str, order_conf: str | None, *, is_standard: bool) -> bytes | None:
        """Return a route's JSON, with bare keys unless it must be standard; None if unknown."""
        if self._changes != self._routes.changes or len(self._texts) >= _TEXTS_MAX:
            self._changes = self._routes.changes
            self._texts.clear()
        key = (topic, order_conf, is_standard)
        text = self._texts.get(key)
        if text is None:
            route = self._routes.route(topic)
            if route is None:
                return None
            route = replace(route, order_topic_conf=order_conf)
            text = ascii_json(route.encode()) if is_standard else route.encode(bare_keys=True)
            self._texts[key] = text
        return text


def _route(
    texts: RouteTexts, kv: KvConfig, config: LiveConfig, request: Command, _: Connection
) -> Command:
    asked = headers.RouteOf.from_ext_fields(request.ext_fields)
    is_ordered = config.current.order_message_enable
    order_conf = kv.value(ORDER_NAMESPACE, asked.topic) if is_ordered else None
    is_standard = asked.accept_standard_json_only or request.version >= STANDARD_JSON_VERSION
    body = texts.find(asked.topic, order_conf, is_standard=bool(is_standard))
    if body is None:
        remark = ROUTE_MISSING + asked.topic
        return request.answer(ResponseCode.TOPIC_NOT_EXIST, remark=remark)
    return request.answer(ResponseCode.SUCCESS, body=body)


def _answering(body: Callable[[], Body]) -> Handler:
    return lambda request, _: request.answer(ResponseCode.SUCCESS, body=body().encode())


def _listing(topics: Callable[[], list[str]]) -> Handler:
    return _answering(lambda: TopicList(topic_list=topics()))


def _topics_in_cluster(routes: RouteTable, request: Command, _: Connection) -> Command:
    asked = headers.ClusterName.from_ext_fields(request.ext_fields)
    found = TopicList(topic_list=routes.topics_in(asked.cluster))
    return request.answer(ResponseCode.SUCCESS, body=found.encode())


def _wipe_write_permission(routes: RouteTable, request: Command, _: Connection) -> Command:
    asked = headers.BrokerName.from_ext_fields(request.ext_fields)
    count = routes.wipe_write_permission(asked.broker_name)
    answer = headers.WipeWritePermAnswer(wipe_topic_count=count)
    return request.answer(ResponseCode.SUCCESS, answer)


def _add_write_permission(routes: RouteTable, request: Command, _: Connection) -> Command:
    asked = headers.BrokerName.from_ext_fields(request.ext_fields)
    count = routes.add_write_permission(asked.broker_name)
    answer = headers.AddWritePermAnswer(add_topic_count=count)
    return request.answer(ResponseCode.SUCCESS, answer)


def _delete_topic(routes: RouteTable, request: Command, _: Connection) -> Command:
    asked = headers.DeleteTopicInNameServer.from_ext_fields(request.ext_fields)
    # An empty cluster name is none: in the binary form it could not even be sent.
    routes.delete_topic(asked.topic, asked.cluster_name or None)
    return request.answer(ResponseCode.SUCCESS)


def ascii_json(text: bytes) -> bytes:
    """Escape what is not ASCII."""
    if text.isascii():
        return text
    return json.dumps(json.loads(text), separators=(",", ":")).encode()


# --- key-values -----------------------------------------------------------------------------------


def kv_handlers(kv: KvConfig) -> dict[int, Handler]:
    """Return the handlers of key-values, by request code."""
    return {
        RequestCode.PUT_KV_CONFIG: partial(_put_kv, kv),
        RequestCode.GET_KV_CONFIG: partial(_get_kv, kv),
        RequestCode.DELETE_KV_CONFIG: partial(_delete_kv, kv),
        RequestCode.GET_KVLIST_BY_NAMESPACE: partial(_list_kv, kv),
    }


async def _put_kv(kv: KvConfig, request: Command, _: Connection) -> Command:
    entry = headers.KvEntry.from_ext_fields(request.ext_fields)
    try:
        if not entry.compare:
            await kv.put(entry.namespace, entry.key, entry.value)
        elif not await kv.replace(entry.namespace, entry.key, entry.expected, entry.value):
            remark = f"the value of {entry.key} in {entry.namespace} is not the expected one"
            return request.answer(ResponseCode.KV_VALUE_DIFFERS, remark=remark)
    except InvalidArgument as error:
        raise RemoteError.system(str(error)) from error
    return request.answer(ResponseCode.SUCCESS)


def _get_kv(kv: KvConfig, request: Command, _: Connection) -> Command:
    asked = headers.KvKey.from_ext_fields(request.ext_fields)
    value = kv.value(asked.namespace, asked.key)
    answer = headers.KvValue(value=value, compares=True if asked.compare else None)
    if value is not None:
        return request.answer(ResponseCode.SUCCESS, answer)
    remark = f"No config item, Namespace: {asked.namespace} Key: {asked.key}"
    return request.answer(ResponseCode.QUERY_NOT_FOUND, answer, remark=remark)


async def _delete_kv(kv: KvConfig, request: Command, _: Connection) -> Command:
    asked = headers.KvKey.from_ext_fields(request.ext_fields)
    await kv.delete(asked.namespace, asked.key)
    return request.answer(ResponseCode.SUCCESS)


def _list_kv(kv: KvConfig, request: Command, _: Connection) -> Command:
    asked = headers.KvNamespace.from_ext_fields(request.ext_fields)
    entries = kv.namespace(asked.namespace)
    if entries is None:
        remark = f"No config item, Namespace: {asked.namespace}"
        return request.answer(ResponseCode.QUERY_NOT_FOUND, remark=remark)
    return request.answer(ResponseCode.SUCCESS, body=KeyValues(table=dict(entries)).encode())


# --- settings -------------------------------------------------------------------------------------


def config_handlers(config: LiveConfig) -> dict[int, Handler]:
    """Return the handlers that read and change settings, by request code."""
    return {
        RequestCode.GET_NAMESRV_CONFIG: partial(_read_config, config),
        RequestCode.UPDATE_NAMESRV_CONFIG: partial(_update_config, config),
    }


def _read_config(config: LiveConfig, request: Command, _: Connection) -> Command:
    text = render_properties(described(config.current))
    return request.answer(ResponseCode.SUCCESS, body=text.encode())


async def _update_config(config: LiveConfig, request: Command, _: Connection) -> Command:
    try:
        changes = parse_properties(whole_body(request).decode())
    except (InvalidArgument, UnicodeDecodeError) as error:
        raise RemoteError.system(f"body: {error}") from error
    await config.change(changes)
    return request.answer(ResponseCode.SUCCESS)
