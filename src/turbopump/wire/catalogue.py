"""Header and body types by code. Codes without fields or body are not listed."""

from __future__ import annotations

from enum import Enum

from turbopump.wire import bodies as b
from turbopump.wire import headers as h
from turbopump.wire import mastership as m
from turbopump.wire.codes import RequestCode as Code
from turbopump.wire.schema import Body, Header


class BodyKind(Enum):
    """Bodies that are not JSON."""

    MESSAGE = "message"
    """A message's own body, compressed or not: opaque."""
    BATCH = "batch"
    RECORDS = "records"
    REGISTRATION = "registration"
    """JSON, or compressed if the header says so."""
    PROPERTIES = "properties"
    """Lines of ``key=value``."""
    SOURCE = "source"
    """Program text."""


REQUEST_HEADERS: dict[int, type[Header]] = {
    Code.SEND_MESSAGE: h.SendMessage,
    Code.PULL_MESSAGE: h.PullMessage,
    Code.QUERY_MESSAGE: h.QueryMessage,
    Code.QUERY_CONSUMER_OFFSET: h.QueryConsumerOffset,
    Code.UPDATE_CONSUMER_OFFSET: h.UpdateConsumerOffset,
    Code.UPDATE_AND_CREATE_TOPIC: h.CreateTopic,
    Code.GET_ALL_TOPIC_CONFIG: h.TableCopy,
    Code.SEARCH_OFFSET_BY_TIMESTAMP: h.SearchOffset,
    Code.GET_MAX_OFFSET: h.QueueOfTopic,
    Code.GET_MIN_OFFSET: h.QueueOfTopic,
    Code.GET_EARLIEST_MSG_STORETIME: h.QueueOfTopic,
    Code.VIEW_MESSAGE_BY_ID: h.ViewMessage,
    Code.UNREGISTER_CLIENT: h.UnregisterClient,
    Code.CONSUMER_SEND_MSG_BACK: h.SendBack,
    Code.END_TRANSACTION: h.EndTransaction,
    Code.GET_CONSUMER_LIST_BY_GROUP: h.ConsumerGroup,
    Code.CHECK_TRANSACTION_STATE: h.CheckTransactionState,
    Code.GET_ALL_CONSUMER_OFFSET: h.TableCopy,
    Code.GET_ALL_DELAY_OFFSET: h.TableCopy,
    Code.NOTIFY_CONSUMER_IDS_CHANGED: h.ConsumerGroup,
    Code.UPDATE_AND_CREATE_ACL_CONFIG: h.UpdateAcl,
    Code.DELETE_ACL_CONFIG: h.DeleteAcl,
    Code.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG: h.UpdateGlobalWhiteAddresses,
    Code.PUT_KV_CONFIG: h.KvEntry,
    Code.GET_KV_CONFIG: h.KvKey,
    Code.DELETE_KV_CONFIG: h.KvKey,
    Code.REGISTER_BROKER: h.RegisterBroker,
    Code.UNREGISTER_BROKER: h.BrokerIdentity,
    Code.GET_ROUTEINFO_BY_TOPIC: h.RouteOf,
    Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: h.TableCopy,
    Code.GET_TOPIC_STATS_INFO: h.TopicName,
    Code.GET_CONSUMER_CONNECTION_LIST: h.ConsumerGroup,
    Code.GET_PRODUCER_CONNECTION_LIST: h.ProducerGroup,
    Code.WIPE_WRITE_PERM_OF_BROKER: h.BrokerName,
    Code.DELETE_SUBSCRIPTIONGROUP: h.DeleteGroup,
    Code.GET_CONSUME_STATS: h.ConsumeStatsOf,
    Code.DELETE_TOPIC_IN_BROKER: h.TopicName,
    Code.DELETE_TOPIC_IN_NAMESRV: h.DeleteTopicInNameServer,
    Code.GET_KVLIST_BY_NAMESPACE: h.KvNamespace,
    Code.RESET_CONSUMER_CLIENT_OFFSET: h.ResetOffset,
    Code.GET_CONSUMER_STATUS_FROM_CLIENT: h.TopicAndGroup,
    Code.INVOKE_BROKER_TO_RESET_OFFSET: h.ResetOffset,
    Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: h.ConsumerStatusOf,
    Code.GET_TOPICS_BY_CLUSTER: h.ClusterName,
    Code.QUERY_TOPIC_CONSUME_BY_WHO: h.TopicName,
    Code.REGISTER_FILTER_SERVER: h.RegisterFilterServer,
    Code.REGISTER_MESSAGE_FILTER_CLASS: h.RegisterFilterClass,
    Code.QUERY_CONSUME_TIME_SPAN: h.TopicAndGroup,
    Code.GET_CONSUMER_RUNNING_INFO: h.RunningInfoOf,
    Code.QUERY_CORRECTION_OFFSET: h.CorrectionOffsetOf,
    Code.CONSUME_MESSAGE_DIRECTLY: h.ConsumeDirectly,
    Code.SEND_MESSAGE_V2: h.SendMessageV2,
    Code.CLONE_GROUP_OFFSET: h.CloneGroupOffset,
    Code.VIEW_BROKER_STATS_DATA: h.StatsItem,
    Code.GET_BROKER_CONSUME_STATS: h.BrokerConsumeStatsOf,
    Code.SEND_BATCH_MESSAGE: h.SendMessageV2,
    Code.QUERY_CONSUME_QUEUE: h.ConsumeQueuePart,
    Code.QUERY_DATA_VERSION: h.BrokerIdentity,
    Code.RESUME_CHECK_HALF_MESSAGE: h.ResumeCheck,
    Code.SEND_REPLY_MESSAGE: h.SendMessage,
    Code.SEND_REPLY_MESSAGE_V2: h.SendMessageV2,
    Code.PUSH_REPLY_MESSAGE_TO_CLIENT: h.PushReply,
    Code.ADD_WRITE_PERM_OF_BROKER: h.BrokerName,
    Code.GET_ALL_CONSUMER_FILTERS: h.TableCopy,
    Code.PROMOTE_BROKER: m.PromoteBroker,
    Code.FENCE_BROKER: m.FenceBroker,
    Code.GET_QUEUE_ENDS: h.QueueEndsOf,
    Code.GET_MESSAGE_MARKS: h.TopicName,
    Code.UPDATE_CONSUMER_OFFSETS: h.OffsetsOfGroup,
    Code.GET_CONSUMER_OFFSETS: h.OffsetsOfGroup,
}

RESPONSE_HEADERS: dict[int, type[Header]] = {
    Code.SEND_MESSAGE: h.SendMessageAnswer,
    Code.PULL_MESSAGE: h.PullMessageAnswer,
    Code.QUERY_MESSAGE: h.QueryMessageAnswer,
    Code.QUERY_CONSUMER_OFFSET: h.OffsetAnswer,
    Code.GET_BROKER_CONFIG: h.ConfigVersion,
    Code.SEARCH_OFFSET_BY_TIMESTAMP: h.OffsetAnswer,
    Code.GET_MAX_OFFSET: h.OffsetAnswer,
    Code.GET_MIN_OFFSET: h.OffsetAnswer,
    Code.GET_EARLIEST_MSG_STORETIME: h.TimestampAnswer,
    Code.GET_BROKER_CLUSTER_ACL_INFO: h.AclInfo,
    Code.GET_KV_CONFIG: h.KvValue,
    Code.REGISTER_BROKER: h.RegisterBrokerAnswer,
    Code.WIPE_WRITE_PERM_OF_BROKER: h.WipeWritePermAnswer,
    Code.REGISTER_FILTER_SERVER: h.FilterServerAnswer,
    Code.SEND_MESSAGE_V2: h.SendMessageAnswer,
    Code.SEND_BATCH_MESSAGE: h.SendMessageAnswer,
    Code.QUERY_DATA_VERSION: h.DataVersionAnswer,
    Code.SEND_REPLY_MESSAGE: h.SendMessageAnswer,
    Code.SEND_REPLY_MESSAGE_V2: h.SendMessageAnswer,
    Code.ADD_WRITE_PERM_OF_BROKER: h.AddWritePermAnswer,
    Code.PROMOTE_BROKER: m.PromoteBrokerAnswer,
    Code.FENCE_BROKER: m.FenceBrokerAnswer,
    Code.GET_QUEUE_ENDS: h.QueueEndsAnswer,
}

REQUEST_BODIES: dict[int, type[Body] | BodyKind] = {
    Code.SEND_MESSAGE: BodyKind.MESSAGE,
    Code.UPDATE_BROKER_CONFIG: BodyKind.PROPERTIES,
    Code.HEART_BEAT: b.Heartbeat,
    Code.CHECK_TRANSACTION_STATE: BodyKind.RECORDS,
    Code.LOCK_BATCH_MQ: b.LockQueues,
    Code.UNLOCK_BATCH_MQ: b.LockQueues,
    Code.CHECK_CLIENT_CONFIG: b.CheckClientConfig,
    Code.REGISTER_BROKER: BodyKind.REGISTRATION,
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: b.GroupConfig,
    Code.RESET_CONSUMER_CLIENT_OFFSET: b.QueueOffsets,
    Code.REGISTER_MESSAGE_FILTER_CLASS: BodyKind.SOURCE,
    Code.CONSUME_MESSAGE_DIRECTLY: BodyKind.RECORDS,
    Code.SEND_MESSAGE_V2: BodyKind.MESSAGE,
    Code.UPDATE_NAMESRV_CONFIG: BodyKind.PROPERTIES,
    Code.SEND_BATCH_MESSAGE: BodyKind.BATCH,
    Code.QUERY_DATA_VERSION: b.DataVersion,
    Code.SEND_REPLY_MESSAGE: BodyKind.MESSAGE,
    Code.SEND_REPLY_MESSAGE_V2: BodyKind.MESSAGE,
    Code.PUSH_REPLY_MESSAGE_TO_CLIENT: BodyKind.MESSAGE,
    Code.GET_MESSAGE_MARKS: b.QueuePositions,
    Code.UPDATE_CONSUMER_OFFSETS: b.QueuePositions,
}

RESPONSE_BODIES: dict[int, type[Body] | BodyKind] = {
    Code.PULL_MESSAGE: BodyKind.RECORDS,
    Code.QUERY_MESSAGE: BodyKind.RECORDS,
    Code.GET_ALL_TOPIC_CONFIG: b.TopicConfigTable,
    Code.GET_BROKER_CONFIG: BodyKind.PROPERTIES,
    Code.GET_BROKER_RUNTIME_INFO: b.KeyValues,
    Code.VIEW_MESSAGE_BY_ID: BodyKind.RECORDS,
    Code.GET_CONSUMER_LIST_BY_GROUP: b.ConsumerIds,
    Code.LOCK_BATCH_MQ: b.LockedQueues,
    Code.GET_ALL_CONSUMER_OFFSET: b.ConsumerOffsets,
    Code.GET_ALL_DELAY_OFFSET: b.DelayOffsets,
    Code.REGISTER_BROKER: b.KeyValues,
    Code.GET_ROUTEINFO_BY_TOPIC: b.TopicRoute,
    Code.GET_BROKER_CLUSTER_INFO: b.ClusterInfo,
    Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: b.GroupConfigTable,
    Code.GET_TOPIC_STATS_INFO: b.TopicStats,
    Code.GET_CONSUMER_CONNECTION_LIST: b.ConsumerConnections,
    Code.GET_PRODUCER_CONNECTION_LIST: b.ProducerConnections,
    Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: b.TopicList,
    Code.GET_CONSUME_STATS: b.ConsumeStats,
    Code.GET_KVLIST_BY_NAMESPACE: b.KeyValues,
    Code.GET_CONSUMER_STATUS_FROM_CLIENT: b.ConsumerStatus,
    Code.INVOKE_BROKER_TO_RESET_OFFSET: b.QueueOffsets,
    Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: b.ConsumerStatus,
    Code.GET_TOPICS_BY_CLUSTER: b.TopicList,
    Code.QUERY_TOPIC_CONSUME_BY_WHO: b.GroupList,
    Code.QUERY_CONSUME_TIME_SPAN: b.ConsumeTimeSpans,
    Code.GET_SYSTEM_TOPIC_LIST_FROM_NS: b.TopicList,
    Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: b.TopicList,
    Code.GET_CONSUMER_RUNNING_INFO: b.RunningInfo,
    Code.QUERY_CORRECTION_OFFSET: b.CorrectionOffsets,
    Code.CONSUME_MESSAGE_DIRECTLY: b.DirectConsumption,
    Code.GET_UNIT_TOPIC_LIST: b.TopicList,
    Code.GET_HAS_UNIT_SUB_TOPIC_LIST: b.TopicList,
    Code.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: b.TopicList,
    Code.VIEW_BROKER_STATS_DATA: b.BrokerStats,
    Code.GET_BROKER_CONSUME_STATS: b.BrokerConsumeStats,
    Code.GET_NAMESRV_CONFIG: BodyKind.PROPERTIES,
    Code.QUERY_CONSUME_QUEUE: b.ConsumeQueuePage,
    Code.QUERY_DATA_VERSION: b.DataVersion,
    Code.GET_ALL_PRODUCER_INFO: b.ProducerTable,
    Code.GET_QUEUE_ENDS: b.QueueEnds,
    Code.GET_MESSAGE_MARKS: b.MessageMarks,
    Code.UPDATE_CONSUMER_OFFSETS: b.RefusedOffsets,
    Code.GET_CONSUMER_OFFSETS: b.QueuePositions,
}
