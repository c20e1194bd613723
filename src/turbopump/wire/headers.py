"""The fields of every request and answer, each declared once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar, cast

from msgspec import Meta, defstruct, field
from msgspec.structs import fields as struct_fields

from turbopump.wire.mastership import Epoch
from turbopump.wire.schema import I32, I64, ExtFields, Header


class Routed(Header, frozen=True, kw_only=True):
    """Requests that may name the broker they are meant for; brokers ignore it."""

    broker_name: str | None = field(name="bname", default=None)


# --- sending --------------------------------------------------------------------------------------


class _MessageFields(Header, frozen=True, kw_only=True):
    """What a message and a reply on its way have in common."""

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: I32
    queue_id: I32
    sys_flag: I32
    born_timestamp: I64
    flag: I32
    properties: str | None = None
    reconsume_times: I32 | None = None
    unit_mode: bool | None = None


class SendMessage(_MessageFields, frozen=True, kw_only=True):
    """A message, a batch or a reply, with long names (codes 10 and 324)."""

    max_reconsume_times: I32 | None = None
    batch: bool | None = None
    broker_name: str | None = field(name="bname", default=None)


_H = TypeVar("_H", bound=Header)


def _lettered(header: type[_H], name: str) -> type[_H]:
    """Return the same header with its fields named a, b, c … on the wire."""
    fields = [
        (f.name, f.type, field(name=chr(ord("a") + place), default=f.default))
        for place, f in enumerate(struct_fields(header))
    ]
    short = defstruct(name, fields, bases=(header,), module=__name__, frozen=True, kw_only=True)
    return cast("type[_H]", short)


SendMessageV2 = _lettered(SendMessage, "SendMessageV2")
"""The same fields with one-letter names (codes 310, 320 and 325)."""


class BrokerTraits(Header, frozen=True, kw_only=True):
    """What every answer to a send reports about the broker, failures included."""

    region: str | None = field(name="MSG_REGION", default=None)
    trace_on: bool | None = field(name="TRACE_ON", default=None)


class SendMessageAnswer(BrokerTraits, frozen=True, kw_only=True):
    """Where the message was stored."""

    msg_id: str
    queue_id: I32
    queue_offset: I64
    transaction_id: str | None = None

    @staticmethod
    def fields_of(
        traits: Mapping[str, str], msg_id: str, queue_id: int, queue_offset: int
    ) -> ExtFields:
        """Return the fields of the most frequent answer of brokers, without creating it first."""
        return {
            **traits,
            "msgId": msg_id,
            "queueId": str(queue_id),
            "queueOffset": str(queue_offset),
        }


class SendBack(Routed, frozen=True, kw_only=True):
    """A message that a consumer could not handle, by its position in the log (36)."""

    offset: I64
    group: str
    delay_level: I32
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool | None = None
    max_reconsume_times: I32 | None = None


class EndTransaction(Routed, frozen=True, kw_only=True):
    """A producer's decision about a half message (37)."""

    producer_group: str
    tran_state_table_offset: I64
    commit_log_offset: I64
    commit_or_rollback: I32
    from_transaction_check: bool | None = None
    msg_id: str
    transaction_id: str | None = None


class CheckTransactionState(Routed, frozen=True, kw_only=True):
    """A broker's query for the state of a half message (39)."""

    tran_state_table_offset: I64
    commit_log_offset: I64
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None


class PushReply(_MessageFields, frozen=True, kw_only=True):
    """A reply on its way to the client that asked (326)."""

    born_host: str
    store_host: str
    store_timestamp: I64


# --- reading --------------------------------------------------------------------------------------


class PullMessage(Routed, frozen=True, kw_only=True):
    """Messages of one queue from an offset on (11)."""

    consumer_group: str
    topic: str
    queue_id: I32
    queue_offset: I64
    max_msg_nums: I32
    sys_flag: I32
    commit_offset: I64
    suspend_timeout_millis: I64
    subscription: str | None = None
    sub_version: I64
    expression_type: str | None = None
    bulk_pull: bool | None = None
    """Whether large answers are welcome; Turbopump's own, other brokers ignore it."""


class PullMessageAnswer(Header, frozen=True, kw_only=True):
    """The next offset, and the queue's minimum and maximum offset."""

    suggest_which_broker_id: I64
    next_begin_offset: I64
    min_offset: I64
    max_offset: I64


class QueryMessage(Header, frozen=True, kw_only=True):
    """Messages by key in a range of store timestamps (12)."""

    topic: str
    key: str
    max_num: I32
    begin_timestamp: I64
    end_timestamp: I64
    unique_key_query: bool | None = field(name="_UNIQUE_KEY_QUERY", default=None)


class QueryMessageAnswer(Header, frozen=True, kw_only=True):
    """How far the key index has come."""

    index_last_update_timestamp: I64
    index_last_update_phyoffset: I64


class ViewMessage(Header, frozen=True, kw_only=True):
    """One message by its position in the log (33)."""

    offset: I64


# --- offsets --------------------------------------------------------------------------------------


class QueueOfTopic(Routed, frozen=True, kw_only=True):
    """One queue (30, 31, 32)."""

    topic: str
    queue_id: I32


class QueueEndsOf(Header, frozen=True, kw_only=True):
    """All queues of a topic (91004).

    With ``wait_ms``, the answer waits until a group can read a message after ``since``.
    """

    topic: str
    consumer_group: str = ""
    since: I64 = -1
    wait_ms: I32 = 0


class QueueEndsAnswer(Header, frozen=True, kw_only=True):
    """The position in the log after the topic's last message, and the readable queues."""

    position: I64
    read_queue_nums: I32


class OffsetsOfGroup(Header, frozen=True, kw_only=True):
    """A group's offsets in several queues of a topic (91006, 91007)."""

    consumer_group: str
    topic: str


class QueryConsumerOffset(QueueOfTopic, frozen=True, kw_only=True):
    """A group's committed offset in one queue (14)."""

    consumer_group: str


class UpdateConsumerOffset(QueryConsumerOffset, frozen=True, kw_only=True):
    """A group's progress in one queue (15)."""

    commit_offset: I64


class SearchOffset(QueueOfTopic, frozen=True, kw_only=True):
    """The queue offset at a store timestamp (29)."""

    timestamp: I64


class OffsetAnswer(Header, frozen=True, kw_only=True):
    """A queue offset."""

    offset: I64


class TimestampAnswer(Header, frozen=True, kw_only=True):
    """A store timestamp, -1 if there is none."""

    timestamp: I64


class NoFields(Header, frozen=True, kw_only=True):
    """A header class without fields: its answer carries ``{}`` where others carry nothing."""


# --- tables that slaves copy ----------------------------------------------------------------------


class TableCopy(Header, frozen=True, kw_only=True):
    """A Turbopump slave's version of a table (21, 43, 45, 201, 91001); Apache brokers ignore it."""

    known_version: str | None = None
    """The version from the last answer; empty before the first."""
    wait_millis: I32 | None = None
    """How long to hold the request while the table has that version."""
    slave_id: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    """The ``brokerId`` of the slave."""


class TableCopyAnswer(Header, frozen=True, kw_only=True):
    """The table's version; the body is empty if that is the known one."""

    table_version: str
    log_end: I64
    """Where the master's log ended at that time."""
    broker_epoch: Epoch
    """The master's epoch (`turbopump.wire.mastership`)."""
    slave_ids: str | None = None
    """The ids of all slaves that ask this master, separated by commas."""
    broker_role: str | None = None
    """The master's role, which a promoted slave takes over."""


# --- clients and groups ---------------------------------------------------------------------------


class UnregisterClient(Header, frozen=True, kw_only=True):
    """A client leaves a group (35)."""

    client_id: str = field(name="clientID")
    producer_group: str | None = None
    consumer_group: str | None = None


class ConsumerGroup(Header, frozen=True, kw_only=True):
    """A consumer group (38, 40, 203)."""

    consumer_group: str


class ProducerGroup(Header, frozen=True, kw_only=True):
    """A producer group (204)."""

    producer_group: str


class ConsumeStatsOf(ConsumerGroup, frozen=True, kw_only=True):
    """A group, perhaps in one topic only (208)."""

    topic: str | None = None


class RunningInfoOf(ConsumerGroup, frozen=True, kw_only=True):
    """One client of a group (307)."""

    client_id: str
    jstack_enable: bool | None = None


class ConsumeDirectly(ConsumerGroup, frozen=True, kw_only=True):
    """A message that one client is to consume now (309)."""

    client_id: str | None = None
    msg_id: str | None = None
    broker_name: str | None = None


class TopicAndGroup(Header, frozen=True, kw_only=True):
    """A group in a topic (221, 303)."""

    topic: str
    group: str


class ConsumerStatusOf(TopicAndGroup, frozen=True, kw_only=True):
    """A group in a topic, perhaps one client only (223)."""

    client_addr: str | None = None


class ResetOffset(TopicAndGroup, frozen=True, kw_only=True):
    """The timestamp to reset offsets to; -1 is the newest (220, 222)."""

    timestamp: I64
    is_force: bool


class CloneGroupOffset(Header, frozen=True, kw_only=True):
    """Offsets of one group for another (314)."""

    src_group: str
    dest_group: str
    topic: str | None = None
    offline: bool | None = None


class DeleteGroup(Header, frozen=True, kw_only=True):
    """A group to be removed (207)."""

    group_name: str
    remove_offset: bool | None = None


# --- administration of a broker -------------------------------------------------------------------


class CreateTopic(Header, frozen=True, kw_only=True):
    """A topic to be created or changed (17)."""

    topic: str
    default_topic: str
    read_queue_nums: I32
    write_queue_nums: I32
    perm: I32
    topic_filter_type: str
    topic_sys_flag: I32 | None = None
    order: bool = False


class TopicName(Header, frozen=True, kw_only=True):
    """One topic (202, 215, 300)."""

    topic: str


class StatsItem(Header, frozen=True, kw_only=True):
    """One statistic (315)."""

    stats_name: str
    stats_key: str


class BrokerConsumeStatsOf(Header, frozen=True, kw_only=True):
    """Progress of all groups (317)."""

    is_order: bool


class CorrectionOffsetOf(Header, frozen=True, kw_only=True):
    """Offsets to correct a group by (308)."""

    filter_groups: str | None = None
    compare_group: str
    topic: str


class ConsumeQueuePart(Header, frozen=True, kw_only=True):
    """Some units of a consume queue (321)."""

    topic: str
    queue_id: I32
    index: I64
    count: I32
    consumer_group: str | None = None


class ResumeCheck(Header, frozen=True, kw_only=True):
    """A half message to be checked again (323)."""

    msg_id: str


class ConfigVersion(Header, frozen=True, kw_only=True):
    """The version of a configuration, as JSON text."""

    version: str


class RegisterFilterServer(Header, frozen=True, kw_only=True):
    """A filter server announces itself (301)."""

    filter_server_addr: str


class FilterServerAnswer(Header, frozen=True, kw_only=True):
    """The broker that a filter server belongs to."""

    broker_name: str
    broker_id: I64


class RegisterFilterClass(Header, frozen=True, kw_only=True):
    """A filter's source for a group and topic (302)."""

    consumer_group: str
    topic: str
    class_name: str
    class_crc: I32 = field(name="classCRC")


# --- name server ----------------------------------------------------------------------------------


class KvNamespace(Header, frozen=True, kw_only=True):
    """A namespace of key-values (219)."""

    namespace: str


class KvKey(KvNamespace, frozen=True, kw_only=True):
    """One key (101, 102)."""

    key: str
    compare: bool | None = None
    """Turbopump's own: ask whether the name server can compare and set."""


class KvEntry(KvKey, frozen=True, kw_only=True):
    """One key and its value (100).

    With ``compare``, it is stored only in place of the ``expected`` value.
    """

    value: str
    expected: str | None = None
    """Turbopump's own: the value to replace; absent if there must be none."""


class KvValue(Header, frozen=True, kw_only=True):
    """A value; absent when there is none."""

    value: str | None = None
    compares: bool | None = None
    """Turbopump's own: whether the name server can compare and set; absent unless asked."""


class BrokerIdentity(Header, frozen=True, kw_only=True):
    """One broker of one cluster (104, 322)."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: I64


class RegisterBroker(BrokerIdentity, frozen=True, kw_only=True):
    """A broker announces itself and its topics (103)."""

    ha_server_addr: str
    compressed: bool | None = None
    body_crc32: I32 | None = None
    broker_epoch: I64 | None = None
    """Turbopump's own: of a master, the epoch of its claim (`turbopump.wire.mastership`)."""


class RegisterBrokerAnswer(Header, frozen=True, kw_only=True):
    """For a slave: where its master is."""

    ha_server_addr: str | None = None
    master_addr: str | None = None


class RouteOf(TopicName, frozen=True, kw_only=True):
    """A topic's route (105)."""

    accept_standard_json_only: bool | None = None


class BrokerName(Header, frozen=True, kw_only=True):
    """All addresses of one broker name (205, 327)."""

    broker_name: str


class WipeWritePermAnswer(Header, frozen=True, kw_only=True):
    """How many topics lost their write permission."""

    wipe_topic_count: I32


class AddWritePermAnswer(Header, frozen=True, kw_only=True):
    """How many topics got their write permission back."""

    add_topic_count: I32


class ClusterName(Header, frozen=True, kw_only=True):
    """One cluster (224)."""

    cluster: str


class DeleteTopicInNameServer(TopicName, frozen=True, kw_only=True):
    """A topic to be removed, perhaps in one cluster only (216)."""

    cluster_name: str | None = None


class DataVersionAnswer(Header, frozen=True, kw_only=True):
    """Whether the broker has to register again."""

    changed: bool
