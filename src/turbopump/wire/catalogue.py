"""Body types by code; codes without a body are not listed."""

from __future__ import annotations

from enum import Enum

from turbopump.wire import bodies as b
from turbopump.wire.codes import RequestCode as Code
from turbopump.wire.schema import Body


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
