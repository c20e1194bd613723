"""Clusters and their brokers: addresses, roles and state."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from turbopump.admin.servers import BrokerNode, Servers, gathered, no_slave
from turbopump.client.routes import MASTER_ID
from turbopump.errors import AdministrationError, RemoteError, TurbopumpError
from turbopump.wire import headers
from turbopump.wire.bodies import KeyValues
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.mastership import PromoteBroker, PromoteBrokerAnswer
from turbopump.wire.schema import ExtFields

_PROMOTION_MS = 30_000
"""A promotion waits for name servers, the old master and its log, one after the other."""

_ROLE = "ASYNC_MASTER"
"""The role of a promoted slave whose master's role is unknown."""

_REGISTERED_POLL_S = 0.25
_REGISTERED_POLLS = 80
"""A promoted broker starts again, which takes a second or two."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster and its broker processes."""

    name: str
    nodes: tuple[BrokerNode, ...]

    @property
    def brokers(self) -> tuple[str, ...]:
        """The broker names, each once."""
        return tuple(dict.fromkeys(node.broker for node in self.nodes))


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """How one broker process is doing; all but ``node`` and ``error`` is None when it is silent."""

    node: BrokerNode
    version: str | None = None
    in_per_s: float | None = None
    """Messages stored a second, over the last ten seconds."""

    out_per_s: float | None = None
    """Messages read a second, over the last ten seconds."""

    in_today: int | None = None
    out_today: int | None = None
    disk_used: float | None = None
    """Part of the disk that is used, 0 to 1."""

    boot_ms: int | None = None
    role: str | None = None
    """ASYNC_MASTER, SYNC_MASTER or SLAVE; None if the broker does not report it, as Apache's."""

    epoch: int | None = None
    """How many promotions of its broker name it knows of."""

    link: str | None = None
    """Of a slave, the state of the connection to its master; of a master, how many slaves it has
    and how many of them are in sync."""

    log_end: int | None = None
    lag_bytes: int | None = None
    """Of a slave, how many bytes it is behind its master's log."""

    lag_ms: int | None = None
    """Of a slave, for how long it has been behind its master's log."""

    runtime_info: Mapping[str, str] | None = None
    """The broker's runtime info, under its own names."""

    error: str | None = None
    """Why it did not answer."""


@dataclass(frozen=True, slots=True)
class Promoted:
    """A slave that has become master."""

    node: BrokerNode
    """As it was: with its id as a slave."""

    role: str
    """SYNC_MASTER or ASYNC_MASTER."""

    old_role: str | None
    """That of the master it followed; None if it does not know it."""

    epoch: int
    log_end: int
    missing_bytes: int | None
    """Bytes that only the old master has; None if it did not answer."""

    old_master: str | None


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """How the brokers of a cluster are doing."""

    name: str
    brokers: tuple[BrokerStatus, ...]


class Clusters:
    """What there is to know of clusters.

    ::

        for cluster in await admin.clusters.status():
            for broker in cluster.brokers:
                print(cluster.name, broker.node.broker, broker.in_per_s)
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers

    async def list(self) -> tuple[Cluster, ...]:
        """Return all clusters that the name servers know."""
        nodes = await self._servers.registered()
        return tuple(
            Cluster(name, tuple(own)) for name, own in groupby(nodes, lambda node: node.cluster)
        )

    async def status(self, cluster: str | None = None) -> tuple[ClusterStatus, ...]:
        """Ask all brokers, of one cluster if given; raises NoBroker.

        One that does not answer is shown with why. So is the master of slaves without one: its
        address is not known, and empty.
        """
        nodes = await self._servers.nodes(cluster)
        answers = await gathered(self._status(node) for node in nodes)
        found = sorted(
            (*with_lags(answers), *_missing_masters(nodes)), key=lambda status: status.node
        )
        return tuple(
            ClusterStatus(name, tuple(own))
            for name, own in groupby(found, lambda status: status.node.cluster)
        )

    async def runtime_info(self, broker: str) -> dict[str, str]:
        """Return the runtime info of a broker's master."""
        (node,) = await self._servers.masters(broker=broker)
        return await self._runtime_info(node)

    async def wipe_write_permission(self, broker: str) -> int:
        """Stop routing producers to a broker; return how many topics that affects.

        Consumers continue, so it drains and can be stopped without losing a message.
        """
        answers = await self._ask_about(broker, RequestCode.WIPE_WRITE_PERM_OF_BROKER)
        found = map(headers.WipeWritePermAnswer.from_ext_fields, answers)
        return max(each.wipe_topic_count for each in found)

    async def add_write_permission(self, broker: str) -> int:
        """Route producers to a broker again; return how many topics that affects."""
        answers = await self._ask_about(broker, RequestCode.ADD_WRITE_PERM_OF_BROKER)
        found = map(headers.AddWritePermAnswer.from_ext_fields, answers)
        return max(each.add_topic_count for each in found)

    async def _ask_about(self, broker: str, code: RequestCode) -> Sequence[ExtFields | None]:
        """Ask all name servers about a broker; raises NotThere."""
        await self._servers.nodes(broker=broker)
        header = headers.BrokerName(broker_name=broker)
        answers = await self._servers.ask_every_nameserver(code, header)
        return [answer.ext_fields for answer in answers.values()]

    async def promotable(self, broker: str, broker_id: int | None = None) -> BrokerNode:
        """Return the slave with an id, or the one that has most of the log; raises NotThere.

        Without an id, raises AdministrationError while name servers know only some of the slaves,
        as after their own restart: a slave that is missing may have more.
        """
        nodes = await self._servers.nodes(broker=broker)
        slaves = [node for node in nodes if not node.is_master]
        if broker_id is not None:
            slaves = [node for node in slaves if node.broker_id == broker_id]
        if not slaves:
            raise no_slave(broker, broker_id)
        found = await gathered(self._status(node) for node in slaves)
        if broker_id is None:
            _refuse_incomplete(broker, found)
        best = max(found, key=lambda status: -1 if status.log_end is None else status.log_end)
        if best.error is not None:
            raise RemoteError(ResponseCode.SYSTEM_ERROR, best.error)
        return best.node

    async def promote(
        self, node: BrokerNode, role: str | None = None, *, is_forced: bool = False
    ) -> Promoted:
        """Make a slave the master of its name; returns when name servers know it.

        Its role is that of its master, SYNC_MASTER or ASYNC_MASTER, unless one is given;
        ASYNC_MASTER if it does not know that.

        The old master is fenced, if it answers, and what it still has is copied. Raises RemoteError
        when the broker or too many name servers refuse, which leaves the old master as it was, or
        when name servers do not know the new one after a while. Unless it is forced, a slave
        refuses whose log begins later than its master's, which would lose the messages before, or
        ends before its master's begins, which would lose all that the master has.
        """
        old_role = await self.role_of_master(node)
        role = role or old_role or _ROLE
        header = PromoteBroker(broker_role=role, forced=is_forced or None)
        answer = await self._servers.ask(
            node, RequestCode.PROMOTE_BROKER, header, timeout_ms=_PROMOTION_MS
        )
        found = PromoteBrokerAnswer.from_ext_fields(answer.ext_fields)
        await self._wait_registered(node)
        return Promoted(
            node,
            role,
            old_role,
            found.epoch,
            found.log_end,
            found.missing_bytes,
            found.old_master or None,
        )

    async def role_of_master(self, node: BrokerNode) -> str | None:
        """Return the role of the master that a slave follows or followed, as far as it knows."""
        return (await self._runtime_info(node)).get("replicationMasterRole") or None

    async def _wait_registered(self, node: BrokerNode) -> None:
        for _ in range(_REGISTERED_POLLS):
            known = await self._servers.registered()
            if any(each.is_master and each.address == node.address for each in known):
                return
            await asyncio.sleep(_REGISTERED_POLL_S)
        raise RemoteError(
            ResponseCode.SYSTEM_ERROR,
            f"broker {node.broker} at {node.address} was promoted, but name servers do not know it"
            " as master yet: are more than half of them running?",
        )

    async def _status(self, node: BrokerNode) -> BrokerStatus:
        try:
            return broker_status(node, await self._runtime_info(node))
        except TurbopumpError as error:
            return BrokerStatus(node, error=str(error))

    async def _runtime_info(self, node: BrokerNode) -> dict[str, str]:
        found = await self._servers.read(KeyValues, node, RequestCode.GET_BROKER_RUNTIME_INFO)
        return found.table


def broker_status(node: BrokerNode, info: Mapping[str, str]) -> BrokerStatus:
    """Read a broker's account of itself; what it leaves out is None."""
    return BrokerStatus(
        node,
        version=info.get("brokerVersionDesc"),
        in_per_s=_rate(info.get("putTps")),
        out_per_s=_rate(info.get("getTransferedTps")),
        in_today=_difference(info, "msgPutTotalTodayNow", "msgPutTotalTodayMorning"),
        out_today=_difference(info, "msgGetTotalTodayNow", "msgGetTotalTodayMorning"),
        disk_used=_number(info.get("commitLogDiskRatio")),
        boot_ms=_whole(info.get("bootTimestamp")),
        role=info.get("brokerRole"),
        epoch=_whole(info.get("brokerEpoch")),
        link=info.get("replicationLink"),
        log_end=_whole(info.get("commitLogMaxOffset")),
        lag_ms=_whole(info.get("replicationLagMillis")),
        runtime_info=dict(info),
    )


def with_lags(found: Sequence[BrokerStatus]) -> list[BrokerStatus]:
    """Add the lag of each slave in bytes, if its master reports the end of its log."""
    ends = {status.node.broker: status.log_end for status in found if status.node.is_master}
    return [_with_lag(status, ends.get(status.node.broker)) for status in found]


def _with_lag(status: BrokerStatus, master_end: int | None) -> BrokerStatus:
    if status.node.is_master or status.log_end is None or master_end is None:
        return status
    # Both were asked at about the same time, so the slave may seem to be ahead.
    return replace(status, lag_bytes=max(0, master_end - status.log_end))


def _missing_masters(nodes: Sequence[BrokerNode]) -> list[BrokerStatus]:
    names = {(node.cluster, node.broker) for node in nodes}
    names -= {(node.cluster, node.broker) for node in nodes if node.is_master}
    error = "no master is registered: it is down, or name servers cannot be reached from it"
    return [BrokerStatus(BrokerNode(*name, MASTER_ID, ""), error=error) for name in names]


def _refuse_incomplete(broker: str, slaves: Sequence[BrokerStatus]) -> None:
    """Raise if slaves know of others of the same master that name servers do not know."""
    reported = ",".join((each.runtime_info or {}).get("replicationSlaveIds", "") for each in slaves)
    known = {str(each.node.broker_id) for each in slaves}
    missing = sorted(set(filter(None, reported.split(","))) - known)
    if missing:
        raise AdministrationError(
            f"not registered with the name server: slave {', '.join(missing)} of broker {broker},"
            " which may have more of the log; brokers register every 30 s, so retry then, or choose"
            f" one by its id ({', '.join(sorted(known))})"
        )


def _rate(text: str | None) -> float | None:
    """Return the first of three rates; it is empty until there is something to measure."""
    return _number((text or "").split(" ")[0]) or 0.0


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _difference(info: Mapping[str, str], now: str, morning: str) -> int | None:
    last, first = _whole(info.get(now)), _whole(info.get(morning))
    return None if last is None or first is None else last - first
