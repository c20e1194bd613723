"""Clusters and their brokers: who is there, and how they are doing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from turbopump.admin.servers import BrokerNode, Servers, gathered
from turbopump.errors import TurbopumpError
from turbopump.wire import headers
from turbopump.wire.bodies import KeyValues
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import whole_body


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
    runtime_info: Mapping[str, str] | None = None
    """Everything that the broker tells of itself, in its own words."""

    error: str | None = None
    """Why it did not answer."""


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
        nodes = await self._servers.nodes()
        return tuple(
            Cluster(name, tuple(own)) for name, own in groupby(nodes, lambda node: node.cluster)
        )

    async def status(self, cluster: str | None = None) -> tuple[ClusterStatus, ...]:
        """Ask all brokers, of one cluster if given; one that does not answer is shown with why."""
        nodes = await self._servers.nodes(cluster)
        found = await gathered(self._status(node) for node in nodes)
        return tuple(
            ClusterStatus(name, tuple(own))
            for name, own in groupby(found, lambda status: status.node.cluster)
        )

    async def runtime_info(self, broker: str) -> dict[str, str]:
        """Return what the master of a broker name tells of itself."""
        (node,) = await self._servers.masters(broker=broker)
        return await self._runtime_info(node)

    async def wipe_write_permission(self, broker: str) -> int:
        """Let no producer find a broker any more; return how many topics that concerns.

        Consumers go on, so it runs empty and can be stopped without losing anybody's message.
        """
        await self._servers.nodes(broker=broker)
        answers = await self._servers.ask_every_nameserver(
            RequestCode.WIPE_WRITE_PERM_OF_BROKER, headers.BrokerName(broker_name=broker)
        )
        return max(
            headers.WipeWritePermAnswer.from_ext_fields(answer.ext_fields).wipe_topic_count
            for answer in answers.values()
        )

    async def add_write_permission(self, broker: str) -> int:
        """Let producers find a broker again; return how many topics that concerns."""
        await self._servers.nodes(broker=broker)
        answers = await self._servers.ask_every_nameserver(
            RequestCode.ADD_WRITE_PERM_OF_BROKER, headers.BrokerName(broker_name=broker)
        )
        return max(
            headers.AddWritePermAnswer.from_ext_fields(answer.ext_fields).add_topic_count
            for answer in answers.values()
        )

    async def _status(self, node: BrokerNode) -> BrokerStatus:
        try:
            return broker_status(node, await self._runtime_info(node))
        except TurbopumpError as error:
            return BrokerStatus(node, error=str(error))

    async def _runtime_info(self, node: BrokerNode) -> dict[str, str]:
        answer = await self._servers.ask(node, RequestCode.GET_BROKER_RUNTIME_INFO)
        return KeyValues.decode(whole_body(answer)).table


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
        runtime_info=dict(info),
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
