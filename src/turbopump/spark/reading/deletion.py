"""Whether a topic is gone for good, or only its broker for a while."""

from __future__ import annotations

from turbopump.client.calls import require_success
from turbopump.client.route_cache import NameServers
from turbopump.client.session import Session
from turbopump.errors import NoRoute, RemoteError
from turbopump.wire.bodies import ClusterInfo
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import request, whole_body


async def is_topic_deleted(session: Session, broker: str, error: NoRoute | RemoteError) -> bool:
    """Tell from what a pull failed with whether a broker no longer has the topic.

    Without a route it has not if it is there: a broker tells name servers of all its topics.
    """
    if isinstance(error, RemoteError):
        return error.code == ResponseCode.TOPIC_NOT_EXIST
    servers = NameServers(session.config.nameserver_addresses, session.random)
    command = request(RequestCode.GET_BROKER_CLUSTER_INFO)
    timeout_ms = session.config.request_timeout_ms
    answer = await servers.ask(lambda address: session.request(address, command, timeout_ms))
    return broker in ClusterInfo.decode(whole_body(require_success(answer))).broker_addr_table
