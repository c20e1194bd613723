"""Requests of brokers: register (103), unregister (104), ask whether to register (322)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache, partial

from turbopump.clock import Clock
from turbopump.errors import InvalidArgument, RemoteError
from turbopump.nameserver.kv import ORDER_NAMESPACE, KvConfig
from turbopump.nameserver.routes import MASTER_ID, Registration, RouteTable, TableFull
from turbopump.net.connection import Connection
from turbopump.net.router import Handler
from turbopump.wire import headers
from turbopump.wire.bodies import (
    QUEUES_MAX,
    BrokerRegistration,
    DataVersion,
    KeyValues,
    TopicConfig,
    TopicConfigTable,
)
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, whole_body
from turbopump.wire.hashing import body_crc
from turbopump.wire.hosts import split_address
from turbopump.wire.mastership import CLAIMS_NAMESPACE, parse_claim
from turbopump.wire.registration import TOPICS_MAX, decode_inflated, inflate_registration

_log = logging.getLogger(__name__)

COMBINED_BODY_VERSION = 37
"""3.0.11: older brokers send their topics and nothing else."""

_REMEMBERED_BYTES_MAX = 64 * 1024
"""Larger bodies, once inflated, are decoded each time."""

_NAME_CHARS_MAX = 512
"""Of brokers, clusters, topics and addresses: twice what any peer creates."""

_FILTER_SERVERS_MAX = 1000
_PERM_MAX = 15
_SHOWN_CHARS_MAX = 200

BrokerConnections = dict[str, Connection]
"""Over which connection each broker registered last, by the broker's address."""


def broker_handlers(
    routes: RouteTable, connections: BrokerConnections, kv: KvConfig, clock: Clock
) -> dict[int, Handler]:
    """Return the handlers of brokers' requests, by request code."""
    return {
        RequestCode.REGISTER_BROKER: partial(_register, routes, connections, kv, clock),
        RequestCode.UNREGISTER_BROKER: partial(_unregister, routes, connections),
        RequestCode.QUERY_DATA_VERSION: partial(_query_data_version, routes, clock),
    }


def _register(
    routes: RouteTable,
    connections: BrokerConnections,
    kv: KvConfig,
    clock: Clock,
    request: Command,
    peer: Connection,
) -> Command:
    registration = read_registration(request)
    _require_newest_epoch(registration, kv)
    is_new = registration.address not in routes
    outcome = routes.register(registration, clock.monotonic_ms())
    if isinstance(outcome, TableFull):
        _log.error("registration of %s refused: %s", registration.address, outcome.reason)
        return request.answer(ResponseCode.SYSTEM_BUSY, remark=outcome.reason)
    connections[registration.address] = peer
    if outcome.displaced is not None:
        displaced = connections.pop(outcome.displaced, None)
        if displaced is not None and displaced is not peer:
            # Over a new connection it registers all of its topics again, and not only changes.
            displaced.close()
        _log.warning("broker at %s replaced by %s", outcome.displaced, registration.address)
    if is_new:
        name = f"{registration.cluster}/{registration.name}/{registration.broker_id}"
        _log.info("broker %s registered at %s", name, registration.address)
    order = kv.namespace(ORDER_NAMESPACE)
    return request.answer(
        ResponseCode.SUCCESS,
        outcome.answer,
        body=b"" if order is None else KeyValues(table=dict(order)).encode(),
    )


def _require_newest_epoch(registration: Registration, kv: KvConfig) -> None:
    """Refuse a master that was replaced: its name belongs to the broker that was promoted."""
    if registration.broker_id != MASTER_ID:
        return
    claim = parse_claim(kv.value(CLAIMS_NAMESPACE, registration.name))
    if claim is not None and not claim.pending and claim.epoch > registration.epoch:
        remark = (
            f"master {registration.address} of {registration.name} has epoch {registration.epoch}:"
            f" it was replaced by {claim.master_address} with epoch {claim.epoch}"
        )
        _log.warning("%s", remark)
        raise RemoteError.system(remark)


def _unregister(
    routes: RouteTable, connections: BrokerConnections, request: Command, peer: Connection
) -> Command:
    broker = headers.BrokerIdentity.from_ext_fields(request.ext_fields)
    if routes.unregister(broker.broker_name, broker.broker_id, broker.broker_addr):
        connections.pop(broker.broker_addr, None)
        _log.info("%s at %s unregistered", broker.broker_name, broker.broker_addr)
    else:
        text = "%s unregistered %s at %s, which is not known"
        _log.info(text, peer.peer_address, broker.broker_name, broker.broker_addr)
    return request.answer(ResponseCode.SUCCESS)


def _query_data_version(
    routes: RouteTable, clock: Clock, request: Command, _: Connection
) -> Command:
    broker = headers.BrokerIdentity.from_ext_fields(request.ext_fields)
    version = DataVersion.decode(whole_body(request))
    known = routes.known_version(broker.broker_addr, version, clock.monotonic_ms())
    return request.answer(
        ResponseCode.SUCCESS,
        headers.DataVersionAnswer(changed=known != version),
        body=b"" if known is None else known.encode(),
    )


# --- reading a registration -----------------------------------------------------------------------


def read_registration(request: Command) -> Registration:
    """Read a registration from a request; raises WireError or RemoteError."""
    header = headers.RegisterBroker.from_ext_fields(request.ext_fields)
    _require_plausible(header)
    body = whole_body(request)
    if header.body_crc32 and header.body_crc32 != body_crc(body):
        remark = f"crc32 not match: the body's is {body_crc(body)}, not {header.body_crc32}"
        raise RemoteError.system(remark)
    table, filter_servers = _contents(request.version, header, body)
    return Registration(
        name=header.broker_name,
        address=header.broker_addr,
        cluster=header.cluster_name,
        broker_id=header.broker_id,
        ha_address=header.ha_server_addr,
        version=table.data_version,
        topics=table.topic_config_table,
        filter_servers=filter_servers,
        epoch=header.broker_epoch or 0,
    )


def _contents(
    version: int, header: headers.RegisterBroker, body: bytes
) -> tuple[TopicConfigTable, tuple[str, ...] | None]:
    """Return the topics and filter servers; None for the latter if the layout lacks them."""
    if version < COMBINED_BODY_VERSION:
        table = TopicConfigTable.decode(body) if body else _NO_TOPICS
        _require_plausible_topics(table.topic_config_table)
        return table, None
    if not body:
        return _NO_TOPICS, ()
    is_inflated = bool(header.compressed)
    if is_inflated:
        body = inflate_registration(body)
    decode = _remembered if len(body) <= _REMEMBERED_BYTES_MAX else _decoded
    registration = decode(body, is_inflated=is_inflated)
    servers = tuple(registration.filter_server_list)
    return registration.topic_config_serialize_wrapper, servers


def _decoded(body: bytes, *, is_inflated: bool) -> BrokerRegistration:
    registration = decode_inflated(body) if is_inflated else BrokerRegistration.decode(body)
    _require_plausible_topics(registration.topic_config_serialize_wrapper.topic_config_table)
    servers = registration.filter_server_list
    if len(servers) > _FILTER_SERVERS_MAX or any(len(each) > _NAME_CHARS_MAX for each in servers):
        raise RemoteError.system(
            f"filterServerList must have at most {_FILTER_SERVERS_MAX} addresses"
            f" of at most {_NAME_CHARS_MAX} characters"
        )
    return registration


_remembered = lru_cache(maxsize=64)(_decoded)
"""Brokers send the same every 30 s."""

_NO_TOPICS = TopicConfigTable(data_version=DataVersion())


# --- validation -----------------------------------------------------------------------------------


def _require_plausible(header: headers.RegisterBroker) -> None:
    problem = _problem_with_names(header) or _problem_with_address(header.broker_addr)
    if header.broker_id < MASTER_ID:
        problem = f"brokerId must be 0 for a master or more for a slave, got {header.broker_id}"
    if problem is not None:
        raise RemoteError.system(problem)


def _problem_with_names(header: headers.RegisterBroker) -> str | None:
    for key, name in (("brokerName", header.broker_name), ("clusterName", header.cluster_name)):
        if not name.strip() or not name.isprintable() or len(name) > _NAME_CHARS_MAX:
            shown = name[:_SHOWN_CHARS_MAX]
            return f"{key} must be 1 to {_NAME_CHARS_MAX} printable characters, got {shown!r}"
    if len(header.ha_server_addr) > _NAME_CHARS_MAX:
        return f"haServerAddr must be at most {_NAME_CHARS_MAX} characters"
    return None


def _problem_with_address(address: str) -> str | None:
    try:
        host, port = split_address(address)
    except InvalidArgument as error:
        return f"brokerAddr: {error}"
    if port == 0 or len(address) > _NAME_CHARS_MAX or not host.isprintable() or " " in host:
        shown = address[:_SHOWN_CHARS_MAX]
        return f"brokerAddr must be a host and a port of 1 to 65535, got {shown!r}"
    return None


def _require_plausible_topics(topics: Mapping[str, TopicConfig]) -> None:
    """Refuse numbers that would make each client of a topic run out of memory."""
    problem = None
    if len(topics) > TOPICS_MAX:
        problem = f"a broker must have at most {TOPICS_MAX} topics, got {len(topics)}"
    for topic in topics.values():
        name, read, write = topic.topic_name, topic.read_queue_nums, topic.write_queue_nums
        if not name or len(name) > _NAME_CHARS_MAX or not name.isprintable():
            problem = f"topicName must be 1 to {_NAME_CHARS_MAX} printable characters"
        elif not 0 <= read <= QUEUES_MAX or not 0 <= write <= QUEUES_MAX:
            counts = f"readQueueNums {read}, writeQueueNums {write}"
            problem = f"{counts} of topic {name}: expected 0 to {QUEUES_MAX}"
        elif not 0 <= topic.perm <= _PERM_MAX:
            problem = f"perm of topic {name} must be 0 to {_PERM_MAX}, got {topic.perm}"
        if problem is not None:
            raise RemoteError.system(problem)
