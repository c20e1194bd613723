"""How administration reaches name servers and brokers, one or all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

from turbopump.client import calls
from turbopump.client.calls import require_success
from turbopump.client.route_cache import NameServers, not_a_name_server
from turbopump.client.routes import MASTER_ID
from turbopump.client.session import Session
from turbopump.errors import (
    ConnectFailed,
    NetworkError,
    NoBroker,
    NoNameServer,
    NotThere,
    RemoteError,
)
from turbopump.supervisor import Supervisor
from turbopump.wire import headers
from turbopump.wire.bodies import ClusterInfo, TopicList, TopicRoute
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request, whole_body
from turbopump.wire.schema import Body, Header

B = TypeVar("B", bound=Body)
T = TypeVar("T")

_log = logging.getLogger(__name__)

ANSWER_MS = 15_000
"""For a broker's answer: it may have to ask a client, or wait for name servers."""

TOOLS_GROUP = "TOOLS_CONSUMER"
"""The group that tools read as; every broker has it from the start."""


@dataclass(frozen=True, slots=True, order=True)
class BrokerNode:
    """One broker process; those of one ``broker`` name hold the same queues, id 0 is the master."""

    cluster: str
    broker: str
    broker_id: int
    address: str

    @property
    def is_master(self) -> bool:
        return self.broker_id == MASTER_ID


class Servers:
    """Asks name servers and brokers; errors name the address asked."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._nameservers = NameServers(session.name_servers, session.random)
        self._unbroken = Supervisor()

    # --- name servers -----------------------------------------------------------------------------

    @property
    def nameservers(self) -> Sequence[str]:
        """The current addresses of the name servers."""
        return self.session.name_servers.current

    async def ask_nameserver(
        self, code: RequestCode, header: Header | None = None, body: bytes = b""
    ) -> Command:
        """Ask any name server; raises NoNameServer when none answers, RemoteError when it refuses.

        All of them know the same, so the first that answers will do.
        """
        return await self._any_nameserver(
            lambda address: self.ask_at(address, request(code, header, body))
        )

    async def ask_every_nameserver(
        self, code: RequestCode, header: Header | None = None, body: bytes = b""
    ) -> dict[str, Command]:
        """Ask every name server, since they do not share state; raises the first failure."""
        addresses = await self.session.name_servers.addresses()
        answers = await gathered(
            self._from_nameserver(address, request(code, header, body)) for address in addresses
        )
        return dict(zip(addresses, answers, strict=True))

    async def route(self, topic: str) -> TopicRoute:
        """Return where a topic is now, not what was cached; raises NotThere."""
        timeout_ms = self.session.config.request_timeout_ms
        try:
            return await self._any_nameserver(
                lambda address: calls.route(self.session, address, topic, timeout_ms)
            )
        except RemoteError as error:
            if error.code != ResponseCode.TOPIC_NOT_EXIST:
                raise
            raise await self.missing_topic(topic) from error

    async def key_value(self, namespace: str, key: str) -> str | None:
        """Return a key-value that name servers keep, or None."""
        header = headers.KvKey(namespace=namespace, key=key)
        asking = self.ask_nameserver(RequestCode.GET_KV_CONFIG, header)
        answer = await none_on(ResponseCode.QUERY_NOT_FOUND, asking)
        if answer is None:
            return None
        return headers.KvValue.from_ext_fields(answer.ext_fields).value or ""

    async def has_topic(self, topic: str) -> bool:
        """Whether any name server knows a topic."""
        return topic in await self.topic_names()

    async def topic_names(self) -> list[str]:
        """Return the topics that name servers know; raises NoBroker if they know no broker."""
        answer = await self.ask_nameserver(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        found = TopicList.decode(whole_body(answer)).topic_list
        if not found:
            await self.nodes()
        return sorted(found)

    async def missing_topic(self, topic: str) -> NotThere:
        """Return the error that says so, with names that may have been meant; raises NoBroker."""
        return not_found("topic", topic, await self.topic_names())

    # --- brokers ----------------------------------------------------------------------------------

    async def nodes(
        self, cluster: str | None = None, broker: str | None = None
    ) -> tuple[BrokerNode, ...]:
        """Return all brokers, of one cluster or of one name if given; raises NotThere, NoBroker."""
        every = await self.registered()
        if not every:
            where = ";".join(self.nameservers)
            raise NoBroker(
                f"no broker answers: none is registered with the name servers at {where}"
            )
        if cluster is not None and all(node.cluster != cluster for node in every):
            raise not_found("cluster", cluster, {node.cluster for node in every})
        if broker is not None and all(node.broker != broker for node in every):
            raise not_found("broker", broker, {node.broker for node in every})
        return tuple(
            node
            for node in every
            if cluster in (None, node.cluster) and broker in (None, node.broker)
        )

    async def registered(self) -> list[BrokerNode]:
        """Return all brokers that name servers know, which may be none."""
        answer = await self.ask_nameserver(RequestCode.GET_BROKER_CLUSTER_INFO)
        info = ClusterInfo.decode(whole_body(answer))
        return sorted(
            BrokerNode(data.cluster, data.broker_name, broker_id, address)
            for data in info.broker_addr_table.values()
            for broker_id, address in data.broker_addrs.items()
        )

    async def masters(
        self, cluster: str | None = None, broker: str | None = None
    ) -> tuple[BrokerNode, ...]:
        """Return the brokers that can be changed."""
        found = tuple(node for node in await self.nodes(cluster, broker) if node.is_master)
        if not found:
            raise not_found("master broker", broker or cluster or "of any name", ())
        return found

    async def readable(self, cluster: str | None = None) -> tuple[BrokerNode, ...]:
        """Return one node of each broker name: its master, or a slave while it has none."""
        chosen: dict[str, BrokerNode] = {}
        for node in sorted(await self.nodes(cluster), key=lambda node: node.broker_id):
            chosen.setdefault(node.broker, node)
        return tuple(sorted(chosen.values()))

    async def ask(
        self,
        node: BrokerNode,
        code: RequestCode,
        header: Header | None = None,
        body: bytes = b"",
        timeout_ms: int = ANSWER_MS,
    ) -> Command:
        """Ask a broker; a refusal is raised as RemoteError that names the broker."""
        try:
            return await self.ask_at(node.address, request(code, header, body), timeout_ms)
        except RemoteError as error:
            remark = f"broker {node.broker} at {node.address}: {error.remark}"
            raise RemoteError(error.code, remark) from error

    async def read(
        self, body: type[B], node: BrokerNode, code: RequestCode, header: Header | None = None
    ) -> B:
        """Ask a broker, as `ask` does, and decode the body of its answer."""
        return body.decode(whole_body(await self.ask(node, code, header)))

    async def ask_at(self, address: str, command: Command, timeout_ms: int = ANSWER_MS) -> Command:
        return require_success(await self.session.request(address, command, timeout_ms))

    async def run_to_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Run what must not stop halfway: it continues if the caller is cancelled."""
        task = self._unbroken.start(work)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.add_done_callback(_log_failure)
            raise
        return task.result()

    async def finish(self) -> None:
        """Wait for what must not stop halfway."""
        await self._unbroken.wait()

    async def _any_nameserver(self, call: Callable[[str], Awaitable[T]]) -> T:
        try:
            return await self._nameservers.ask(call)
        except NetworkError as error:
            if not self.nameservers:
                raise
            raise _no_name_server(self.nameservers, error) from error

    async def _from_nameserver(self, address: str, command: Command) -> Command:
        try:
            return await self.ask_at(address, command)
        except NetworkError as error:
            raise _no_name_server([address], error) from error
        except RemoteError as error:
            refused = RemoteError(error.code, f"name server {address}: {error.remark}")
            raise not_a_name_server(address, error) or refused from error


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("%s", error)


def _no_name_server(addresses: Sequence[str], error: NetworkError) -> NoNameServer:
    """Return the error that none answers, with the reason; no caller waits for the next attempt."""
    failure = error.last_failure if isinstance(error, ConnectFailed) else ""
    reason = failure or str(error)
    if len(addresses) == 1:
        reason = reason.removeprefix(f"{addresses[0]}: ")
    return NoNameServer(f"no name server answers at {';'.join(addresses)}: {reason}")


async def none_on(code: ResponseCode, asking: Awaitable[T]) -> T | None:
    """Return what is awaited, or None if it is refused with this code."""
    try:
        return await asking
    except RemoteError as error:
        if error.code != code:
            raise
        return None


def not_found(kind: str, name: str, names: Iterable[str]) -> NotThere:
    """Return the error that something is missing, with the names that come closest."""
    similar = get_close_matches(name, sorted(names))
    return NotThere(kind, name, tuple(similar))


def no_slave(broker: str | None, broker_id: int | None) -> NotThere:
    """Return the error that a broker, or every one, has no slave, or none with an id."""
    if broker_id is None:
        return NotThere("slave of broker", str(broker))
    whose = "any broker" if broker is None else f"broker {broker!r}"
    return NotThere(f"slave of {whose} with id", str(broker_id))


async def gathered(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Do all at the same time and return the results in order; the first failure ends the rest."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as failed:
        raise _first(failed) from None
    return [task.result() for task in tasks]


def _first(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = failed
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
