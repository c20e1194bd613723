"""Requests of brokers: register (103), say good-bye (104), ask whether to register (322)."""

from __future__ import annotations

import logging
from functools import lru_cache, partial

from turbopump.clock import Clock
from turbopump.errors import InvalidArgument, RemoteError
from turbopump.nameserver.kv import ORDER_NAMESPACE, KvConfig
from turbopump.nameserver.routes import MASTER_ID, Master, Registration, RouteTable, TableFull
from turbopump.net.connection import Connection
from turbopump.net.router import Handler
from turbopump.wire import headers
from turbopump.wire.bodies import BrokerRegistration, DataVersion, KeyValues, TopicConfigTable
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, whole_body
from turbopump.wire.hashing import body_crc
from turbopump.wire.hosts import split_address
from turbopump.wire.registration import decode_compressed

_log = logging.getLogger(__name__)

COMBINED_BODY_VERSION = 37
"""3.0.11: older brokers send their topics and nothing else."""


_REMEMBERED_BYTES_MAX = 64 * 1024
"""Bodies above this are read each time they come."""


class BrokerConnections:
    """Over which connection each broker registered last."""

    def __init__(self) -> None:
        self._by_address: dict[str, Connection] = {}

    def put(self, address: str, connection: Connection) -> None:
        self._by_address[address] = connection

    def pop(self, address: str) -> Connection | None:
        """Forget a broker; return its connection."""
        return self._by_address.pop(address, None)

    def pop_all(self, connection: Connection) -> list[str]:
        """Forget the brokers of a connection; return their addresses."""
        gone = [address for address, each in self._by_address.items() if each is connection]
        for address in gone:
            del self._by_address[address]
        return gone


def broker_handlers(
    routes: RouteTable, connections: BrokerConnections, kv: KvConfig, clock: Clock
) -> dict[int, Handler]:
    """Return what serves brokers, by request code."""
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
    is_new = registration.address not in routes
    outcome = routes.register(registration, clock.monotonic_ms())
    if isinstance(outcome, TableFull):
        _log.error("%s cannot register: %s", registration.address, outcome.reason)
        return request.answer(ResponseCode.SYSTEM_BUSY, remark=outcome.reason)
    connections.put(registration.address, peer)
    if outcome.displaced is not None:
        connections.pop(outcome.displaced)
        _log.warning("broker at %s replaced by %s", outcome.displaced, registration.address)
    if is_new:
        name = f"{registration.cluster}/{registration.name}/{registration.broker_id}"
        _log.info("broker %s registered at %s", name, registration.address)
    order = kv.namespace(ORDER_NAMESPACE)
    return request.answer(
        ResponseCode.SUCCESS,
        _answer_header(outcome.master),
        body=b"" if order is None else KeyValues(table=dict(order)).encode(),
    )


def _answer_header(master: Master | None) -> headers.RegisterBrokerAnswer:
    if master is None:
        return headers.RegisterBrokerAnswer()
    return headers.RegisterBrokerAnswer(
        ha_server_addr=master.ha_address, master_addr=master.address
    )


def _unregister(
    routes: RouteTable, connections: BrokerConnections, request: Command, peer: Connection
) -> Command:
    broker = headers.BrokerIdentity.from_ext_fields(request.ext_fields)
    if routes.unregister(broker.broker_name, broker.broker_id, broker.broker_addr):
        connections.pop(broker.broker_addr)
        _log.info("%s at %s unregistered", broker.broker_name, broker.broker_addr)
    else:
        text = "%s said good-bye for %s at %s, which is not known"
        _log.info(text, peer.peer_address, broker.broker_name, broker.broker_addr)
    return request.answer(ResponseCode.SUCCESS)


def _query_data_version(
    routes: RouteTable, clock: Clock, request: Command, _: Connection
) -> Command:
    broker = headers.BrokerIdentity.from_ext_fields(request.ext_fields)
    version = DataVersion.decode(whole_body(request))
    known = routes.compare_version(broker.broker_addr, version, clock.monotonic_ms())
    return request.answer(
        ResponseCode.SUCCESS,
        headers.DataVersionAnswer(changed=known.changed),
        body=b"" if known.version is None else known.version.encode(),
    )


# --- reading a registration -----------------------------------------------------------------------


def read_registration(request: Command) -> Registration:
    """Make a registration of a request; raises WireError or RemoteError that says what is wrong."""
    header = headers.RegisterBroker.from_ext_fields(request.ext_fields)
    _require_plausible(header)
    body = whole_body(request)
    if header.body_crc32 and header.body_crc32 != body_crc(body):
        remark = f"crc32 not match: the body's is {body_crc(body)}, not {header.body_crc32}"
        raise RemoteError(ResponseCode.SYSTEM_ERROR, remark)
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
    )


def _contents(
    version: int, header: headers.RegisterBroker, body: bytes
) -> tuple[TopicConfigTable, tuple[str, ...] | None]:
    """Return the topics and filter servers; None when the form has no place for the latter."""
    if version < COMBINED_BODY_VERSION:
        return TopicConfigTable.decode(body) if body else _NO_TOPICS, None
    if not body:
        return _NO_TOPICS, ()
    if len(body) > _REMEMBERED_BYTES_MAX:
        registration = _decoded(body, compressed=bool(header.compressed))
    else:
        registration = _remembered(body, compressed=bool(header.compressed))
    servers = tuple(registration.filter_server_list)
    return registration.topic_config_serialize_wrapper, servers


def _decoded(body: bytes, *, compressed: bool) -> BrokerRegistration:
    return decode_compressed(body) if compressed else BrokerRegistration.decode(body)


_remembered = lru_cache(maxsize=64)(_decoded)
"""Brokers say the same every 30 s."""

_NO_TOPICS = TopicConfigTable(data_version=DataVersion())


def _require_plausible(header: headers.RegisterBroker) -> None:
    problem = None
    names = (header.broker_name, header.cluster_name)
    if not all(name.strip() and name.isprintable() for name in names):
        problem = f"brokerName and clusterName are {names}: printable texts are allowed"
    elif header.broker_id < MASTER_ID:
        problem = f"brokerId is {header.broker_id}: 0 is a master, a slave has more"
    if problem is None:
        try:
            split_address(header.broker_addr)
        except InvalidArgument as error:
            problem = f"brokerAddr: {error}"
    if problem is not None:
        raise RemoteError(ResponseCode.SYSTEM_ERROR, problem)
