"""The topics of a broker: which exist, who may create them, and where they are saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from turbopump.broker.config import (
    PERM_INHERIT,
    PERM_READ,
    PERM_WRITE,
    IdentityConfig,
    TopicsConfig,
)
from turbopump.broker.versioned_table import VersionedTable
from turbopump.errors import InvalidArgument, RemoteError
from turbopump.message import MessageQueue
from turbopump.tables import TableFile
from turbopump.wire.bodies import QUEUES_MAX, TopicConfig, TopicConfigTable
from turbopump.wire.codes import ResponseCode
from turbopump.wire.names import (
    BENCHMARK_TOPIC,
    OFFSET_MOVED_TOPIC,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    SELF_TEST_TOPIC,
    SYSTEM_PREFIX,
    SYSTEM_TOPICS,
    TEMPLATE_TOPIC,
    TRANSACTION_TOPICS,
    check_name,
    retry_topic,
)

_READ_WRITE = PERM_READ | PERM_WRITE
_ALL_PERMS = _READ_WRITE | PERM_INHERIT
_SCHEDULE_QUEUES_MIN = 18
_FILTER_TYPES = frozenset({"SINGLE_TAG", "MULTI_TAG"})

OnTopicChange = Callable[[TopicConfig], None]
"""Called with a created or changed topic; after it was saved, if an operator did it."""


class Topics(VersionedTable[TopicConfig]):
    """All topics by name, the broker's own included.

    An operator's change is on disk when it is acknowledged, and undone if it cannot be written. A
    topic created by its use counts immediately and is saved soon after, by a thread: a slow disk
    must not block all others. After a crash in between it is recovered from its messages.
    """

    def __init__(
        self,
        config: TopicsConfig,
        identity: IdentityConfig,
        file: TableFile,
        *,
        delay_levels: int = _SCHEDULE_QUEUES_MIN,
    ) -> None:
        self.config = config
        self._broker_name = identity.broker_name
        self._listeners: list[OnTopicChange] = []
        self._boot = {topic.topic_name: topic for topic in _boot_topics(config, identity)}
        self._boot[SCHEDULE_TOPIC] = _topic(SCHEDULE_TOPIC, max(delay_levels, _SCHEDULE_QUEUES_MIN))
        self._deleting: set[str] = set()
        super().__init__("topics", file, "topicConfigTable", dict(self._boot))

    def load(self) -> bool:
        """Load the saved topics, if any; the broker's own topics are as configured."""
        saved = self._file.load(TopicConfigTable)
        if saved is not None:
            self._table = dict(saved.topic_config_table) | self._boot
            if not self.config.auto_create and TEMPLATE_TOPIC in self._table:
                self._table[TEMPLATE_TOPIC] = replace(self._table[TEMPLATE_TOPIC], perm=_READ_WRITE)
        return saved is not None

    @property
    def snapshot(self) -> TopicConfigTable:
        """All topics and their version, as they are now; never changed afterwards."""
        return TopicConfigTable(
            data_version=self.data_version, topic_config_table=dict(self._table)
        )

    @property
    def system_names(self) -> frozenset[str]:
        """The broker's own topics, including those created later."""
        return SYSTEM_TOPICS | self._boot.keys()

    def listen(self, listener: OnTopicChange) -> None:
        """Call a function after a topic is created or changed.

        Not after deletions: name servers drop a topic only when the client that deletes it tells
        them.
        """
        self._listeners.append(listener)

    def find(self, name: str) -> TopicConfig | None:
        return self._table.get(name)

    def required(self, name: str) -> TopicConfig:
        """Return a topic; raises RemoteError if it does not exist."""
        found = self._table.get(name)
        if found is None:
            raise RemoteError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{name}] not exist")
        return found

    def has_queue(self, queue: MessageQueue) -> bool:
        """Whether a queue is one of this broker's."""
        topic = self._table.get(queue.topic)
        if topic is None or queue.broker != self._broker_name:
            return False
        return 0 <= queue.queue_id < queues_of(topic)

    def is_system(self, name: str) -> bool:
        """Whether a topic is the broker's own, not to be changed from outside."""
        return name in SYSTEM_TOPICS or name in self._boot or name.startswith(SYSTEM_PREFIX)

    def create_by_send(
        self,
        name: str,
        template: str,
        queues_wanted: int,
        sys_flag: int = 0,
        client: str = "",
    ) -> TopicConfig | None:
        """Return the topic of a send, created if that is enabled, or None.

        Raises RemoteError when there are too many topics, or when the host of the client, given by
        its address, has created its share.
        """
        known = self._table.get(name)
        if known is not None or check_name(name) is not None:
            return known
        created = self._from_template(name, template, queues_wanted, sys_flag)
        if created is None and name.startswith(RETRY_PREFIX):
            created = _topic(name, 1, sys_flag=sys_flag)
        if created is not None:
            wrong = self._quota.refusal(client, self.config.topics_max - len(self._table))
            if wrong is not None:
                text = f"topic[{name}] is not created: {wrong} (topicsMax)"
                raise RemoteError(ResponseCode.TOPIC_NOT_EXIST, text)
            self._create([created])
            self._quota.note(name, client)
        return created

    def create_internal(
        self, name: str, queues: int, perm: int = _READ_WRITE, sys_flag: int = 0
    ) -> TopicConfig:
        """Return a topic that the broker itself needs, created if missing.

        Raises InvalidArgument when the name, which contains a client's group, is not a valid topic
        name, and RemoteError when there are too many topics.
        """
        known = self._table.get(name)
        if known is not None:
            return known
        created = _topic(name, queues, perm, sys_flag)
        self._create([created])
        return created

    def create_retries(self, queues: Mapping[str, int], sys_flag: int = 0) -> None:
        """Create missing retry topics of groups, given by their numbers of queues.

        All with one write; raises as `create_internal` does, and then creates none of them.
        """
        wanted = ((retry_topic(group), count) for group, count in queues.items())
        missing = [(name, count) for name, count in wanted if name not in self._table]
        if missing:
            self._create([_topic(name, count, sys_flag=sys_flag) for name, count in missing])

    async def update(self, topic: TopicConfig) -> None:
        """Create or change a topic; the order flag stays as the name servers have it.

        On InvalidArgument or WriteFailed nothing has changed.
        """
        known = self._table.get(topic.topic_name)
        if known is None:
            wrong = self._check_room([topic])
            if wrong is not None:
                raise InvalidArgument(wrong)
        topic = replace(topic, order=known.order if known is not None else False)
        _require_names([topic])
        await self._change(topic.topic_name, topic)
        self._notify([topic])

    async def delete(self, name: str) -> bool:
        """Delete a topic; return whether it was known. On WriteFailed nothing has changed."""
        self._deleting.add(name)
        try:
            return await super().delete(name)
        finally:
            self._deleting.discard(name)

    def recover(self, queues: Mapping[str, int]) -> dict[str, TopicConfig]:
        """Add missing topics, given by their numbers of queues; return those added.

        Not one whose deletion is being saved: a message that is stored in it meanwhile must
        neither restore it nor replace its settings.
        """
        added = {
            name: _topic(name, count)
            for name, count in queues.items()
            if name not in self._table and name not in self._deleting and check_name(name) is None
            if name in TRANSACTION_TOPICS or not self.is_system(name)
        }
        if added:
            self._put(added)
            self._notify(list(added.values()))
        return added

    def adopt_copy(self, copied: TopicConfigTable) -> list[str]:
        """Replace the table and its version by a master's; return the topics that it lacks."""
        before = self._table
        valid = {
            name: topic
            for name, topic in copied.topic_config_table.items()
            if check_name(name) is None
        }
        self._adopt(self._boot | valid, copied.data_version)
        self._notify([topic for name, topic in valid.items() if before.get(name) != topic])
        return [name for name in before if name not in self._table]

    def renew_version(self) -> None:
        """Count a change of how topics are announced: name servers skip an equal version."""
        self._put({})

    def mark_ordered(self, names: frozenset[str]) -> None:
        """Mark as ordered the topics that name servers list, and no others."""
        others = {
            name: replace(topic, order=name in names)
            for name, topic in self._table.items()
            if topic.order != (name in names)
        }
        if others:
            self._put(others)

    def _from_template(
        self, name: str, template: str, queues_wanted: int, sys_flag: int
    ) -> TopicConfig | None:
        if template == TEMPLATE_TOPIC and not self.config.auto_create:
            return None
        model = self._table.get(template)
        if model is None or not model.perm & PERM_INHERIT:
            return None
        queues = min(queues_wanted, model.write_queue_nums)
        if queues < 1:
            return None
        return TopicConfig(
            topic_name=name,
            read_queue_nums=queues,
            write_queue_nums=queues,
            perm=model.perm & ~PERM_INHERIT,
            topic_filter_type=model.topic_filter_type,
            topic_sys_flag=sys_flag,
        )

    def _create(self, topics: list[TopicConfig]) -> None:
        wrong = self._check_room(topics)
        if wrong is not None:
            raise RemoteError(ResponseCode.TOPIC_NOT_EXIST, wrong)
        _require_names(topics)
        self._put({topic.topic_name: topic for topic in topics})
        self._notify(topics)

    def _check_room(self, topics: list[TopicConfig]) -> str | None:
        """Return why new topics cannot be added, or None; the broker's own always can be."""
        wanted = [topic.topic_name for topic in topics if topic.topic_name not in SYSTEM_TOPICS]
        count, most = len(self._table), self.config.topics_max
        if not wanted or count + len(wanted) <= most:
            return None
        name = wanted[0][:200]
        return f"cannot create topic[{name}]: {count} topics exist and topicsMax is {most}"

    def _notify(self, topics: list[TopicConfig]) -> None:
        for topic in topics:
            for listener in self._listeners:
                listener(topic)


def _require_names(topics: list[TopicConfig]) -> None:
    for topic in topics:
        wrong = check_name(topic.topic_name)
        if wrong is not None:
            raise InvalidArgument(f"topic {topic.topic_name[:200]!r}: {wrong}")


def queues_of(topic: TopicConfig) -> int:
    """Return how many queues a topic has, including read-only and write-only ones."""
    return max(topic.read_queue_nums, topic.write_queue_nums)


def is_readable(topic: TopicConfig) -> bool:
    return bool(topic.perm & PERM_READ)


def is_writable(topic: TopicConfig) -> bool:
    return bool(topic.perm & PERM_WRITE)


def check_shape(topic: TopicConfig) -> str | None:
    """Return what is wrong with a new topic's settings, or None."""
    for name, queues in (
        ("readQueueNums", topic.read_queue_nums),
        ("writeQueueNums", topic.write_queue_nums),
    ):
        if not 0 <= queues <= QUEUES_MAX:
            return f"{name} must be 0 to {QUEUES_MAX}, got {queues}"
    if not 0 <= topic.perm <= _ALL_PERMS:
        return f"perm must be 0 to {_ALL_PERMS}, got {topic.perm}"
    if topic.topic_filter_type not in _FILTER_TYPES:
        return f"topicFilterType = [{topic.topic_filter_type}] value invalid"
    return None


def _topic(name: str, queues: int, perm: int = _READ_WRITE, sys_flag: int = 0) -> TopicConfig:
    return TopicConfig(
        topic_name=name,
        read_queue_nums=queues,
        write_queue_nums=queues,
        perm=perm,
        topic_sys_flag=sys_flag,
    )


def _boot_topics(config: TopicsConfig, identity: IdentityConfig) -> list[TopicConfig]:
    topics = [
        _topic(SELF_TEST_TOPIC, 1),
        _topic(BENCHMARK_TOPIC, 1024),
        _topic(identity.cluster, 16, _ALL_PERMS if config.cluster_topic else PERM_INHERIT),
        _topic(identity.broker_name, 1, _ALL_PERMS if config.broker_topic else PERM_INHERIT),
        _topic(OFFSET_MOVED_TOPIC, 1),
        _topic(f"{identity.cluster}_REPLY_TOPIC", 1),
    ]
    if config.auto_create:
        topics.append(_topic(TEMPLATE_TOPIC, config.default_queues, _ALL_PERMS))
    if config.trace_topic:
        topics.append(_topic(config.trace_topic_name, 1))
    return topics
