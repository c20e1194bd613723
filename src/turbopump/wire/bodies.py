"""The JSON bodies of requests and answers, and of the files that hold the same values."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from msgspec import field

from turbopump.message import MessageQueue
from turbopump.wire.schema import I32, I64, Body

QUEUES_MAX = 65_536
"""Most queues of a topic on one broker; more in a route mean damage or an attack."""

# --- topics and routes ----------------------------------------------------------------------------


class DataVersion(Body, frozen=True, kw_only=True):
    """Shows whether a table has changed: a change increments the counter and sets the timestamp."""

    counter: I64 = 0
    timestamp: I64 = 0


class TopicConfig(Body, frozen=True, kw_only=True):
    """A topic's configuration on a broker; ``perm`` has the bits 4 read, 2 write, 1 inherit."""

    topic_name: str
    read_queue_nums: I32 = 16
    write_queue_nums: I32 = 16
    perm: I32 = 6
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: I32 = 0
    order: bool = False


class TopicConfigTable(Body, frozen=True, kw_only=True):
    """All topics of a broker (21, topics.json)."""

    data_version: DataVersion = DataVersion()
    topic_config_table: dict[str, TopicConfig] = {}


class TopicTableCopy(TopicConfigTable, frozen=True, kw_only=True):
    """The same for Turbopump's slaves (21)."""

    removed_ends: dict[str, I64] = {}
    """Turbopump's addition: of topics that were deleted and created again, the position in the log
    before which their messages were deleted."""


class BrokerRegistration(Body, frozen=True, kw_only=True):
    """What a broker registers (103)."""

    filter_server_list: list[str] = []
    topic_config_serialize_wrapper: TopicConfigTable


class BrokerData(Body, frozen=True, kw_only=True):
    """The addresses of one broker name by broker id; 0 is the master."""

    broker_addrs: dict[I64, str]
    broker_name: str
    cluster: str


class QueueData(Body, frozen=True, kw_only=True):
    """A topic's queues on one broker."""

    broker_name: str
    perm: I32
    read_queue_nums: I32
    topic_sys_flag: I32 = 0
    write_queue_nums: I32


class TopicRoute(Body, frozen=True, kw_only=True):
    """Where a topic's queues are (105)."""

    broker_datas: list[BrokerData] = []
    filter_server_table: dict[str, list[str]] = {}
    order_topic_conf: str | None = None
    queue_datas: list[QueueData] = []


class ClusterInfo(Body, frozen=True, kw_only=True):
    """All brokers, and which cluster they belong to (106)."""

    broker_addr_table: dict[str, BrokerData] = {}
    cluster_addr_table: dict[str, list[str]] = {}


class TopicList(Body, frozen=True, kw_only=True):
    """Names of topics (206, 224, 304, 305, 311 to 313)."""

    broker_addr: str | None = None
    topic_list: list[str] = []


class KeyValues(Body, frozen=True, kw_only=True):
    """Strings by name (28, 219, the answer to 103)."""

    table: dict[str, str] = {}


# --- clients and groups ---------------------------------------------------------------------------


class ConsumeType(StrEnum):
    """Whether a consumer is a pull or a push consumer."""

    PULL = "CONSUME_ACTIVELY"
    PUSH = "CONSUME_PASSIVELY"


class MessageModel(StrEnum):
    """Whether every member receives every message, or each message goes to one member."""

    BROADCASTING = "BROADCASTING"
    CLUSTERING = "CLUSTERING"


class ConsumeFrom(StrEnum):
    """Where a group without an offset starts; the deprecated three mean the last offset."""

    LAST_OFFSET = "CONSUME_FROM_LAST_OFFSET"
    LAST_OR_MIN_WHEN_BOOT_FIRST = "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST"
    MIN_OFFSET = "CONSUME_FROM_MIN_OFFSET"
    MAX_OFFSET = "CONSUME_FROM_MAX_OFFSET"
    FIRST_OFFSET = "CONSUME_FROM_FIRST_OFFSET"
    TIMESTAMP = "CONSUME_FROM_TIMESTAMP"


class Subscription(Body, frozen=True, kw_only=True):
    """A group's subscription to a topic; brokers filter by ``code_set``, the tags' hashes."""

    class_filter_mode: bool = False
    code_set: list[I32] = []
    expression_type: str | None = "TAG"
    sub_string: str
    sub_version: I64 = 0
    tags_set: list[str] = []
    topic: str


class ConsumerData(Body, frozen=True, kw_only=True):
    """One consumer group of a client."""

    consume_from_where: ConsumeFrom | None = None
    consume_type: ConsumeType | None = None
    group_name: str
    message_model: MessageModel | None = None
    subscription_data_set: list[Subscription] = []
    unit_mode: bool = False


class ProducerData(Body, frozen=True, kw_only=True):
    """One producer group of a client."""

    group_name: str


class Heartbeat(Body, frozen=True, kw_only=True):
    """All groups of a client (34)."""

    client_id: str = field(name="clientID")
    consumer_data_set: list[ConsumerData] = []
    producer_data_set: list[ProducerData] = []

    @classmethod
    def from_value(cls, value: object) -> Self:
        """Convert a heartbeat, whose enumerations are names in any case or ordinals.

        C++ clients send ordinals; unknown ones become None, as for Java peers.
        """
        if isinstance(value, dict) and isinstance(value.get("consumerDataSet"), list):
            groups = [_with_names(group) for group in value["consumerDataSet"]]
            value = {**value, "consumerDataSet": groups}
        return super().from_value(value)


_ENUMERATIONS: dict[str, list[str]] = {
    "consumeFromWhere": list(ConsumeFrom),
    "consumeType": list(ConsumeType),
    "messageModel": list(MessageModel),
}


def _with_names(group: object) -> object:
    """Convert enumeration members to names, in the case that we use."""
    if not isinstance(group, dict):
        return group
    named = dict(group)
    for key, names in _ENUMERATIONS.items():
        given = named.get(key)
        if isinstance(given, int):
            named[key] = names[given] if 0 <= given < len(names) else None
        elif isinstance(given, str):
            named[key] = given.upper() if given.upper() in names else None
    return named


class CheckClientConfig(Body, frozen=True, kw_only=True):
    """A subscription for the broker to validate (46)."""

    client_id: str
    group: str
    subscription_data: Subscription


class ConsumerIds(Body, frozen=True, kw_only=True):
    """The members of a group (38)."""

    consumer_id_list: list[str] = []


class LockQueues(Body, frozen=True, kw_only=True):
    """Queues to be locked for a client, or unlocked (41, 42)."""

    client_id: str
    consumer_group: str
    queues: list[MessageQueue] = field(name="mqSet", default=[])


class LockedQueues(Body, frozen=True, kw_only=True):
    """The queues that the client has locked (41)."""

    queues: list[MessageQueue] = field(name="lockOKMQSet", default=[])


class GroupConfig(Body, frozen=True, kw_only=True):
    """A consumer group's configuration on a broker (200)."""

    broker_id: I64 = 0
    consume_broadcast_enable: bool = True
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    group_name: str
    notify_consumer_ids_changed_enable: bool = True
    retry_max_times: I32 = 16
    retry_queue_nums: I32 = 1
    which_broker_when_consume_slowly: I64 = 1


class GroupConfigTable(Body, frozen=True, kw_only=True):
    """All groups of a broker (201, subscriptionGroup.json)."""

    data_version: DataVersion = DataVersion()
    subscription_group_table: dict[str, GroupConfig] = {}


class GroupList(Body, frozen=True, kw_only=True):
    """Names of groups (300)."""

    group_list: list[str] = []


class ClientConnection(Body, frozen=True, kw_only=True):
    """One client as its broker sees it."""

    client_addr: str
    client_id: str
    language: str | None = None
    version: I32 = 0


class InconsistentSubscription(Body, frozen=True, kw_only=True):
    """What only some members of a group want of a topic; None: not subscribed."""

    topic: str
    expression_type: str | None = None
    sub_string: str | None = None
    client_ids: list[str] = []


class ConsumerConnections(Body, frozen=True, kw_only=True):
    """The members of a group and their subscriptions (203)."""

    connection_set: list[ClientConnection] = []
    consume_from_where: ConsumeFrom | None = None
    consume_type: ConsumeType | None = None
    inconsistent_subscriptions: list[InconsistentSubscription] | None = None
    """Only present if members differ; unknown to Apache RocketMQ."""
    message_model: MessageModel | None = None
    subscription_table: dict[str, Subscription] = {}

    @classmethod
    def from_value(cls, value: object) -> Self:
        """Convert members; newer brokers may send consume types unknown here."""
        return super().from_value(_with_names(value))


class ProducerConnections(Body, frozen=True, kw_only=True):
    """The members of a producer group (204)."""

    connection_set: list[ClientConnection] = []


class ProducerInfo(Body, frozen=True, kw_only=True):
    """One producer; its address begins with a slash."""

    client_id: str
    language: str | None = None
    last_update_timestamp: I64
    remote_ip: str = field(name="remoteIP")
    version: I32 = 0


class ProducerTable(Body, frozen=True, kw_only=True):
    """All producers of a broker by group (328)."""

    data: dict[str, list[ProducerInfo]] = {}


# --- offsets --------------------------------------------------------------------------------------


class ConsumerOffsets(Body, frozen=True, kw_only=True):
    """Committed offsets by ``topic@group`` and queue (43, consumerOffset.json)."""

    offset_table: dict[str, dict[I32, I64]] = {}


class DelayOffsets(Body, frozen=True, kw_only=True):
    """Progress of the delay service by level (45, delayOffset.json)."""

    offset_table: dict[I32, I64] = {}


class QueueOffsets(Body, frozen=True, kw_only=True):
    """Offsets by queue (222, 220, a broadcasting consumer's file)."""

    offset_table: dict[MessageQueue, I64] = {}


class QueueAndOffset(Body, frozen=True, kw_only=True):
    """One row of the reset that C++ clients understand."""

    broker_name: str
    offset: I64
    queue_id: I32
    topic: str


class QueueOffsetRows(Body, frozen=True, kw_only=True):
    """The same offsets as a list, for C++ clients (220)."""

    offset_table: list[QueueAndOffset] = []


class TopicQueueStats(Body, frozen=True, kw_only=True):
    """The minimum and maximum offset of one queue."""

    last_update_timestamp: I64 = 0
    max_offset: I64
    min_offset: I64


class TopicStats(Body, frozen=True, kw_only=True):
    """The minimum and maximum offsets of a topic's queues (202)."""

    offset_table: dict[MessageQueue, TopicQueueStats] = {}


class ConsumeQueueStats(Body, frozen=True, kw_only=True):
    """A group's progress in one queue."""

    broker_offset: I64
    consumer_offset: I64
    last_timestamp: I64 = 0


class ConsumeStats(Body, frozen=True, kw_only=True):
    """A group's progress (208)."""

    consume_tps: float = 0.0
    offset_table: dict[MessageQueue, ConsumeQueueStats] = {}


class BrokerConsumeStats(Body, frozen=True, kw_only=True):
    """Progress of all groups of a broker (317)."""

    broker_addr: str
    consume_stats_list: list[dict[str, list[ConsumeStats]]] = []
    total_diff: I64 = 0


class ConsumerStatus(Body, frozen=True, kw_only=True):
    """Progress in the memory of one client (221), or of all by client id (223)."""

    consumer_table: dict[str, dict[MessageQueue, I64]] = {}
    message_queue_table: dict[MessageQueue, I64] = {}


class QueueTimeSpan(Body, frozen=True, kw_only=True):
    """Store timestamps of one queue: oldest, newest, and where the group is."""

    consume_time_stamp: I64
    consume_time_stamp_str: str | None = None
    delay_time: I64
    max_time_stamp: I64
    max_time_stamp_str: str | None = None
    message_queue: MessageQueue
    min_time_stamp: I64
    min_time_stamp_str: str | None = None


class ConsumeTimeSpans(Body, frozen=True, kw_only=True):
    """Store timestamps of all queues of a topic (303)."""

    consume_time_span_set: list[QueueTimeSpan] = []


class CorrectionOffsets(Body, frozen=True, kw_only=True):
    """Offsets by queue id (308)."""

    correction_offsets: dict[I32, I64] = {}


# --- looking inside -------------------------------------------------------------------------------


class ProcessQueueInfo(Body, frozen=True, kw_only=True):
    """What a client holds of one queue; the protocol spells "droped"."""

    cached_msg_count: I32 = 0
    cached_msg_max_offset: I64 = 0
    cached_msg_min_offset: I64 = 0
    cached_msg_size_in_mib: I32 = field(name="cachedMsgSizeInMiB", default=0)
    commit_offset: I64 = 0
    dropped: bool = field(name="droped", default=False)
    last_consume_timestamp: I64 = 0
    last_lock_timestamp: I64 = 0
    last_pull_timestamp: I64 = 0
    locked: bool = False
    transaction_msg_count: I32 = 0
    transaction_msg_max_offset: I64 = 0
    transaction_msg_min_offset: I64 = 0
    try_unlock_times: I64 = 0


class ConsumeRates(Body, frozen=True, kw_only=True):
    """Consumption rates of a client in one topic."""

    consume_failed_msgs: I64 = 0
    consume_failed_tps: float = field(name="consumeFailedTPS", default=0.0)
    consume_ok_tps: float = field(name="consumeOKTPS", default=0.0)
    consume_rt: float = field(name="consumeRT", default=0.0)
    pull_rt: float = field(name="pullRT", default=0.0)
    pull_tps: float = field(name="pullTPS", default=0.0)


class RunningInfo(Body, frozen=True, kw_only=True):
    """State and statistics of a running consumer (307)."""

    jstack: str | None = None
    mq_table: dict[MessageQueue, ProcessQueueInfo] = {}
    properties: dict[str, str] = {}
    status_table: dict[str, ConsumeRates] = {}
    subscription_set: list[Subscription] = []


class DirectConsumption(Body, frozen=True, kw_only=True):
    """A listener's result for a message it was given directly (309)."""

    auto_commit: bool = True
    consume_result: str | None = None
    order: bool = False
    remark: str | None = None
    spent_time_millis: I64 = field(name="spentTimeMills", default=0)

    @classmethod
    def from_value(cls, value: object) -> Self:
        """Convert a result, which Go clients send as its ordinal."""
        if isinstance(value, dict):
            place = str(value.get("consumeResult"))
            if place in _DIRECT_RESULTS:
                value = {**value, "consumeResult": _DIRECT_RESULTS[place]}
        return super().from_value(value)


_DIRECT_RESULTS = {
    "0": "CR_SUCCESS",
    "1": "CR_LATER",
    "2": "CR_ROLLBACK",
    "3": "CR_COMMIT",
    "4": "CR_THROW_EXCEPTION",
    "5": "CR_RETURN_NULL",
}


class StatsWindow(Body, frozen=True, kw_only=True):
    """A statistic over a minute, an hour or a day."""

    avgpt: float = 0.0
    sum: I64 = 0
    tps: float = 0.0


class BrokerStats(Body, frozen=True, kw_only=True):
    """One statistic (315)."""

    stats_day: StatsWindow
    stats_hour: StatsWindow
    stats_minute: StatsWindow


class QueueUnit(Body, frozen=True, kw_only=True):
    """One unit of a consume queue."""

    bit_map: str | None = None
    eval: bool = False
    extend_data_json: str | None = None
    msg: str | None = None
    physic_offset: I64
    physic_size: I32
    tags_code: I64


class ConsumeQueuePage(Body, frozen=True, kw_only=True):
    """Some units of a consume queue (321)."""

    filter_data: str | None = None
    max_queue_index: I64
    min_queue_index: I64
    queue_data: list[QueueUnit] = []
    subscription_data: Subscription | None = None


class QueueEnds(Body, frozen=True, kw_only=True):
    """The ends of a topic's queues, by queue id (91004)."""

    min_offsets: list[I64] = []
    max_offsets: list[I64] = []


class QueuePositions(Body, frozen=True, kw_only=True):
    """An offset in each of several queues (91005, 91006, 91007)."""

    queue_ids: list[I32] = []
    offsets: list[I64] = []


class MessageMarks(Body, frozen=True, kw_only=True):
    """When messages were stored, and where in the log; -1 for those that do not exist (91005)."""

    store_timestamps: list[I64] = []
    positions: list[I64] = []


class RefusedOffsets(Body, frozen=True, kw_only=True):
    """The queues whose offsets were not committed (91006)."""

    queue_ids: list[I32] = []
