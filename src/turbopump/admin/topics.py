"""Topics: creating, changing and deleting them, their routes and the contents of their queues."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from msgspec import structs

from turbopump.admin.servers import ANSWER_MS, TOOLS_GROUP, BrokerNode, Servers, gathered, none_on
from turbopump.client import calls
from turbopump.client.names import check_topic
from turbopump.client.pull_config import PullTimes
from turbopump.client.queue_reader import QueueReader
from turbopump.client.routes import PERM_READ, PERM_WRITE
from turbopump.client.subscriptions import subscription
from turbopump.errors import (
    AdministrationError,
    AlreadyThere,
    ConnectFailed,
    DamagedMessage,
    InvalidArgument,
    NetworkError,
    RemoteError,
    TurbopumpError,
)
from turbopump.filters.tags import EVERYTHING
from turbopump.message import MessageQueue, QueueOffset
from turbopump.wire import headers
from turbopump.wire.bodies import (
    QUEUES_MAX,
    GroupList,
    TopicConfig,
    TopicConfigTable,
    TopicList,
    TopicRoute,
    TopicStats,
)
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.names import DEAD_LETTER_PREFIX, RETRY_PREFIX, TEMPLATE_TOPIC

ORDER_NAMESPACE = "ORDER_TOPIC_CONFIG"
"""Where name servers keep the fixed queues of ordered topics."""

_RESTORE_MS = 30_000
"""How long a purge tries to restore the settings of a topic: brokers may restart meanwhile."""
_RESTORE_PAUSE_S = 1.0

_PERMISSIONS = {"r": PERM_READ, "w": PERM_WRITE, "rw": PERM_READ | PERM_WRITE}
_PERMISSION_NAMES = {number: name for name, number in _PERMISSIONS.items()}


class TopicKind(StrEnum):
    """What a topic is for."""

    NORMAL = "normal"
    RETRY = "retry"
    DEAD_LETTERS = "dead letters"
    SYSTEM = "system"


@dataclass(frozen=True, slots=True)
class TopicOnBroker:
    """What one broker knows of a topic."""

    topic: str
    cluster: str
    broker: str
    read_queues: int
    write_queues: int
    permission: str
    """``r``, ``w``, ``rw`` or ``-``."""

    is_ordered: bool = False


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic, and what each of its brokers knows of it."""

    name: str
    kind: TopicKind
    on_brokers: tuple[TopicOnBroker, ...]

    @property
    def write_queues(self) -> int:
        """Of all brokers."""
        return sum(each.write_queues for each in self.on_brokers)


@dataclass(frozen=True, slots=True)
class RouteOnBroker:
    """The queues of a topic on one broker, and its addresses by broker id."""

    cluster: str
    broker: str
    addresses: dict[int, str]
    read_queues: int
    write_queues: int
    permission: str

    @property
    def node(self) -> BrokerNode:
        """The one to ask: the master, or a slave where there is none."""
        number = min(self.addresses)
        return BrokerNode(self.cluster, self.broker, number, self.addresses[number])


@dataclass(frozen=True, slots=True)
class TopicRouting:
    """Where clients find a topic."""

    topic: str
    on_brokers: tuple[RouteOnBroker, ...]
    order: str | None = None
    """The fixed queues of an ordered topic, ``broker:queues;broker:queues``."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What a queue holds: from ``min_offset`` to before ``max_offset``."""

    queue: MessageQueue
    min_offset: QueueOffset
    max_offset: QueueOffset
    last_stored_ms: int | None

    @property
    def messages(self) -> int:
        return self.max_offset - self.min_offset


@dataclass(frozen=True, slots=True)
class TopicStatus:
    """What the queues of a topic hold."""

    topic: str
    queues: tuple[QueueLimits, ...]

    @property
    def messages(self) -> int:
        return sum(queue.messages for queue in self.queues)


class Topics:
    """What can be done with topics.

    ::

        await admin.topics.create("orders", queues=8)
        print((await admin.topics.status("orders")).messages)
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._reader = QueueReader(servers.session, TOOLS_GROUP, PullTimes())

    async def names(self) -> list[str]:
        """Return the names of all topics, those of the system included."""
        return await self._servers.topic_names()

    async def list(self, cluster: str | None = None) -> tuple[TopicInfo, ...]:
        """Return all topics as the brokers know them, of one cluster if given."""
        nodes = await self._servers.readable(cluster)
        tables = await gathered(self._table(node) for node in nodes)
        code = RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER
        lists = await gathered(self._servers.read(TopicList, node, code) for node in nodes)
        system = {name for each in lists for name in each.topic_list}
        found: dict[str, list[TopicOnBroker]] = {}
        for node, table in zip(nodes, tables, strict=True):
            for config in table.values():
                found.setdefault(config.topic_name, []).append(_on_broker(node, config))
        return tuple(
            TopicInfo(name, kind_of(name, system), tuple(found[name])) for name in sorted(found)
        )

    async def create(
        self,
        topic: str,
        *,
        queues: int = 8,
        read_queues: int | None = None,
        permission: str = "rw",
        is_ordered: bool = False,
        cluster: str | None = None,
        brokers: Sequence[str] = (),
    ) -> TopicInfo:
        """Create a topic with ``queues`` queues on each broker; raise `AlreadyThere` if it exists.

        Without ``cluster`` and ``brokers`` it is created on all brokers. ``read_queues``
        differs from ``queues`` while a topic shrinks: producers stop using queues first.
        """
        check_topic(topic)
        nodes = await self._chosen(cluster, brokers)
        wanted = _config(
            topic,
            queues,
            queues if read_queues is None else read_queues,
            permission,
            is_ordered=is_ordered,
        )
        there = [node.broker for node in nodes if topic in await self._table(node)]
        if there:
            raise AlreadyThere(f"topic {topic!r} already exists on {', '.join(there)}")
        await self._put([(node, wanted) for node in nodes])
        return TopicInfo(topic, kind_of(topic), tuple(_on_broker(n, wanted) for n in nodes))

    async def update(
        self,
        topic: str,
        *,
        queues: int | None = None,
        read_queues: int | None = None,
        permission: str | None = None,
        is_ordered: bool | None = None,
        cluster: str | None = None,
        brokers: Sequence[str] = (),
        dry_run: bool = False,
    ) -> tuple[TopicInfo, TopicInfo]:
        """Change a topic where it is, only in what is given; return it as before and after."""
        if queues is None and read_queues is None and permission is None and is_ordered is None:
            raise InvalidArgument(
                "nothing to change; specify queues, read_queues, permission or is_ordered"
            )
        nodes = await self._chosen(cluster, brokers)
        tables = await gathered(self._table(node) for node in nodes)
        known = [(n, t[topic]) for n, t in zip(nodes, tables, strict=True) if topic in t]
        if not known:
            raise await self._servers.missing_topic(topic)
        # Name servers are asked, as brokers hear of it late.
        ordered = bool(await self._order(topic)) if is_ordered is None else is_ordered
        changed = [
            (
                node,
                _config(
                    topic,
                    old.write_queue_nums if queues is None else queues,
                    _read_queues(old, queues, read_queues),
                    permission or _permission_name(old.perm),
                    is_ordered=ordered,
                ),
            )
            for node, old in known
        ]
        if not dry_run:
            await self._put(changed)
            if is_ordered is False:
                await self._forget_order(topic)
        kind = kind_of(topic)
        before = TopicInfo(topic, kind, tuple(_on_broker(n, c) for n, c in known))
        return before, TopicInfo(topic, kind, tuple(_on_broker(n, c) for n, c in changed))

    async def delete(self, topic: str, cluster: str | None = None) -> tuple[str, ...]:
        """Delete a topic with all its messages; return the names of the brokers that had it."""
        masters = await self._servers.masters(cluster)
        tables = await gathered(self._table(node) for node in masters)
        having = [n for n, table in zip(masters, tables, strict=True) if topic in table]
        if not having and not await self._servers.has_topic(topic):
            raise await self._servers.missing_topic(topic)
        # Name servers last: producers would find the topic gone and have brokers make it again.
        header = headers.TopicName(topic=topic)
        await gathered(
            self._servers.ask(node, RequestCode.DELETE_TOPIC_IN_BROKER, header) for node in having
        )
        await self._servers.ask_every_nameserver(
            RequestCode.DELETE_TOPIC_IN_NAMESRV,
            headers.DeleteTopicInNameServer(topic=topic, cluster_name=cluster),
        )
        if cluster is None:
            await self._forget_order(topic)
        return tuple(node.broker for node in having)

    async def purge(self, topic: str, cluster: str | None = None) -> tuple[str, ...]:
        """Delete all messages of a topic, but not its settings; return the brokers that had it.

        Its queues begin again at 0. Turbopump's brokers delete the offsets of groups with them;
        with brokers of Apache RocketMQ, reset the offsets of each group afterwards.

        A purge that has begun continues if its caller is cancelled. Raises AdministrationError with
        the settings if a broker does not take them back within half a minute; and before anything
        is deleted if a broker that has the topic has only slaves now.
        """
        # Slaves too, of brokers without a master: their messages would return with the next one.
        nodes = await self._servers.readable(cluster)
        tables = await gathered(self._table(node) for node in nodes)
        having = [(n, t[topic]) for n, t in zip(nodes, tables, strict=True) if topic in t]
        if not having:
            raise await self._servers.missing_topic(topic)
        alone = [node.broker for node, _ in having if not node.is_master]
        if alone:
            raise AdministrationError(
                f"topic {topic!r} is also on broker {', '.join(alone)}, which has no master now:"
                " nothing is deleted, purge it again when it has one"
            )
        await self._servers.run_to_end(self._purge_all(having))
        return tuple(node.broker for node, _ in having)

    async def _purge_all(self, having: Sequence[tuple[BrokerNode, TopicConfig]]) -> None:
        # Not `gathered`: a broker that fails must not stop another between its two requests.
        purges = (self._purge(node, config) for node, config in having)
        results = await asyncio.gather(*purges, return_exceptions=True)
        errors = [each for each in results if isinstance(each, BaseException)]
        if len(errors) > 1 and all(isinstance(each, TurbopumpError) for each in errors):
            raise AdministrationError("; ".join(map(str, errors))) from errors[0]
        for error in errors:
            raise error

    async def _purge(self, node: BrokerNode, config: TopicConfig) -> None:
        # Name servers keep the topic: clients are to find it meanwhile.
        header = headers.TopicName(topic=config.topic_name)
        try:
            await self._servers.ask(node, RequestCode.DELETE_TOPIC_IN_BROKER, header)
        except NetworkError as error:
            if not isinstance(error, ConnectFailed):
                # The broker may have deleted it.
                await self._restore(node, config)
            raise
        except RemoteError:
            # It may have failed halfway, or a producer has re-created the topic meanwhile.
            if (await self._table(node)).get(config.topic_name) != config:
                await self._restore(node, config)
            raise
        await self._restore(node, config)

    async def _restore(self, node: BrokerNode, config: TopicConfig) -> None:
        clock = self._servers.session.clock
        end_ms = clock.monotonic_ms() + _RESTORE_MS
        while True:
            try:
                await self._servers.ask(node, RequestCode.UPDATE_AND_CREATE_TOPIC, _header(config))
            except TurbopumpError as error:
                if not error.retriable or clock.monotonic_ms() > end_ms:
                    raise _not_restored(node, config, error) from error
            else:
                return
            await asyncio.sleep(_RESTORE_PAUSE_S)

    async def route(self, topic: str) -> TopicRouting:
        """Return where clients find a topic; raises NotThere."""
        return routing(topic, await self._servers.route(topic))

    async def status(self, topic: str) -> TopicStatus:
        """Return what each queue of a topic holds; raises NotThere."""
        found = (await self.route(topic)).on_brokers
        tables = await gathered(self._limits(each, topic) for each in found)
        every = (each for table in tables for each in table)
        return TopicStatus(topic, tuple(sorted(every, key=lambda each: each.queue)))

    async def queues_to_read(self, topic: str) -> tuple[QueueLimits, ...]:
        """Return what each queue holds that consumers may read; raises NotThere."""
        routing = await self.route(topic)
        counts = {each.broker: each.read_queues for each in routing.on_brokers}
        found = (await self.status(topic)).queues
        return tuple(
            each for each in found if each.queue.queue_id < counts.get(each.queue.broker, 0)
        )

    async def groups(self, topic: str) -> tuple[str, ...]:
        """Return the groups that consume a topic now, or did once."""
        header = headers.TopicName(topic=topic)
        found = await gathered(
            self._servers.read(GroupList, node, RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, header)
            for node in await self.nodes_of(topic)
        )
        return tuple(sorted({group for each in found for group in each.group_list}))

    async def nodes_of(self, topic: str) -> tuple[BrokerNode, ...]:
        """Return the brokers to ask about a topic: the masters, or slaves where there is none."""
        return tuple(each.node for each in (await self.route(topic)).on_brokers)

    async def _chosen(self, cluster: str | None, brokers: Sequence[str]) -> tuple[BrokerNode, ...]:
        if not brokers:
            return await self._servers.masters(cluster)
        found = await gathered(self._servers.masters(cluster, broker) for broker in brokers)
        return tuple(dict.fromkeys(node for nodes in found for node in nodes))

    async def _table(self, node: BrokerNode) -> dict[str, TopicConfig]:
        found = await self._servers.read(TopicConfigTable, node, RequestCode.GET_ALL_TOPIC_CONFIG)
        return found.topic_config_table

    async def _put(self, wanted: Sequence[tuple[BrokerNode, TopicConfig]]) -> None:
        code = RequestCode.UPDATE_AND_CREATE_TOPIC
        await gathered(self._servers.ask(node, code, _header(config)) for node, config in wanted)
        ordered = {node.broker: each.write_queue_nums for node, each in wanted if each.order}
        if ordered:
            topic = wanted[0][1].topic_name
            # What other brokers have of it stays.
            queues = {**await self._order(topic), **ordered}
            value = ";".join(f"{broker}:{count}" for broker, count in sorted(queues.items()))
            entry = headers.KvEntry(namespace=ORDER_NAMESPACE, key=topic, value=value)
            await self._servers.ask_every_nameserver(RequestCode.PUT_KV_CONFIG, entry)

    async def _order(self, topic: str) -> dict[str, int]:
        """Return the fixed queues of an ordered topic by broker; none when it is not ordered."""
        text = await self._servers.key_value(ORDER_NAMESPACE, topic) or ""
        pairs = (entry.rpartition(":") for entry in text.split(";"))
        return {broker: int(count) for broker, _, count in pairs if count.isdecimal()}

    async def _forget_order(self, topic: str) -> None:
        await self._servers.ask_every_nameserver(
            RequestCode.DELETE_KV_CONFIG, headers.KvKey(namespace=ORDER_NAMESPACE, key=topic)
        )

    async def _limits(self, place: RouteOnBroker, topic: str) -> Sequence[QueueLimits]:
        header = headers.TopicName(topic=topic)
        code = RequestCode.GET_TOPIC_STATS_INFO
        asking = self._servers.read(TopicStats, place.node, code, header)
        stats = await none_on(ResponseCode.TOPIC_NOT_EXIST, asking)
        if stats is None:
            # Name servers hear of a deletion later than the broker.
            return []
        table = stats.offset_table
        written = [
            QueueLimits(
                queue,
                QueueOffset(max(0, each.min_offset)),
                QueueOffset(max(0, each.max_offset)),
                each.last_update_timestamp or None,
            )
            for queue, each in table.items()
        ]
        # Brokers report the queues to write to; a topic that shrank has others to read.
        known = {queue.queue_id for queue in table}
        others = [number for number in range(place.read_queues) if number not in known]
        return written + await gathered(
            self._limits_of(place.node, MessageQueue(topic, place.broker, number))
            for number in others
        )

    async def _limits_of(self, node: BrokerNode, queue: MessageQueue) -> QueueLimits:
        session = self._servers.session
        begin = await calls.min_offset(session, node.address, queue, ANSWER_MS)
        end = await calls.max_offset(session, node.address, queue, ANSWER_MS)
        begin, end = QueueOffset(max(0, begin)), QueueOffset(max(0, end))
        last_ms = await self._stored_ms(queue, QueueOffset(end - 1)) if end > begin else None
        return QueueLimits(queue, begin, end, last_ms)

    async def _stored_ms(self, queue: MessageQueue, offset: QueueOffset) -> int | None:
        """Return when a message was stored; None if the queue cannot be read."""
        wanted = subscription(queue.topic, EVERYTHING, 0)
        try:
            found = await none_on(
                ResponseCode.NO_PERMISSION,
                self._reader.pull(queue, offset, wanted, 1, is_held=False),
            )
        except DamagedMessage as error:
            return None if error.message is None else int(error.message.store_timestamp_ms)
        return found.messages[0].store_timestamp_ms if isinstance(found, calls.Found) else None


def kind_of(topic: str, system: Collection[str] = ()) -> TopicKind:
    """Return what a topic is for; ``system`` are the brokers' own."""
    if topic.startswith(RETRY_PREFIX):
        return TopicKind.RETRY
    if topic.startswith(DEAD_LETTER_PREFIX):
        return TopicKind.DEAD_LETTERS
    return TopicKind.SYSTEM if topic in system else TopicKind.NORMAL


def routing(topic: str, route: TopicRoute) -> TopicRouting:
    """Join what a route says of brokers and of queues."""
    queues = {data.broker_name: data for data in route.queue_datas}
    return TopicRouting(
        topic,
        tuple(
            RouteOnBroker(
                data.cluster,
                data.broker_name,
                dict(sorted(data.broker_addrs.items())),
                queues[data.broker_name].read_queue_nums,
                queues[data.broker_name].write_queue_nums,
                _permission_name(queues[data.broker_name].perm),
            )
            for data in sorted(route.broker_datas, key=lambda data: data.broker_name)
            if data.broker_name in queues and data.broker_addrs
        ),
        route.order_topic_conf,
    )


def _config(
    topic: str, write_queues: int, read_queues: int, permission: str, *, is_ordered: bool
) -> TopicConfig:
    if permission not in _PERMISSIONS:
        allowed = ", ".join(_PERMISSIONS)
        raise InvalidArgument(f"permission must be one of {allowed}, got {permission!r}")
    for name, number in (("queues", write_queues), ("read_queues", read_queues)):
        if not 1 <= number <= QUEUES_MAX:
            raise InvalidArgument(f"{name} must be 1–{QUEUES_MAX}, got {number}")
    return TopicConfig(
        topic_name=topic,
        read_queue_nums=read_queues,
        write_queue_nums=write_queues,
        perm=_PERMISSIONS[permission],
        order=is_ordered,
    )


def _not_restored(
    node: BrokerNode, config: TopicConfig, error: TurbopumpError
) -> AdministrationError:
    settings = (
        f"queues={config.write_queue_nums}, read_queues={config.read_queue_nums},"
        f" permission={_permission_name(config.perm)!r}, is_ordered={config.order}"
    )
    return AdministrationError(
        f"the messages of topic {config.topic_name!r} on broker {node.broker} are deleted, but its "
        f"settings are not restored: {error}; create it there again with {settings}"
    )


def _header(config: TopicConfig) -> headers.CreateTopic:
    fields = structs.asdict(config)
    name = fields.pop("topic_name")
    return headers.CreateTopic(topic=name, default_topic=TEMPLATE_TOPIC, **fields)


def _read_queues(old: TopicConfig, queues: int | None, read_queues: int | None) -> int:
    """Return how many queues to read: never fewer than there are, unless that was asked for."""
    if read_queues is not None:
        return read_queues
    return old.read_queue_nums if queues is None else max(queues, old.read_queue_nums)


def _on_broker(node: BrokerNode, config: TopicConfig) -> TopicOnBroker:
    return TopicOnBroker(
        config.topic_name,
        node.cluster,
        node.broker,
        config.read_queue_nums,
        config.write_queue_nums,
        _permission_name(config.perm),
        config.order,
    )


def _permission_name(bits: int) -> str:
    return _PERMISSION_NAMES.get(bits & (PERM_READ | PERM_WRITE), "-")
