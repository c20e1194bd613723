"""Header types by request code, to decode recorded frames; codes without fields are not listed."""

from __future__ import annotations

from turbopump.wire import headers as h
from turbopump.wire import mastership as m
from turbopump.wire.codes import RequestCode as Code
from turbopump.wire.schema import Header

# --- access control, which brokers do not support -------------------------------------------------


class UpdateAcl(Header, frozen=True, kw_only=True):
    """An account to be created or changed (50)."""

    access_key: str
    secret_key: str | None = None
    white_remote_address: str | None = None
    admin: bool | None = None
    default_topic_perm: str | None = None
    default_group_perm: str | None = None
    topic_perms: str | None = None
    group_perms: str | None = None


class DeleteAcl(Header, frozen=True, kw_only=True):
    """An account to be removed (51)."""

    access_key: str


class AclInfo(Header, frozen=True, kw_only=True):
    """A broker's versions of its access control files (52)."""

    version: str
    all_acl_file_version: str | None = None
    broker_name: str
    broker_addr: str
    cluster_name: str


class UpdateGlobalWhiteAddresses(Header, frozen=True, kw_only=True):
    """Addresses that need no account (53)."""

    global_white_addrs: str
    acl_file_full_path: str | None = None


# --- by code --------------------------------------------------------------------------------------

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
    Code.UPDATE_AND_CREATE_ACL_CONFIG: UpdateAcl,
    Code.DELETE_ACL_CONFIG: DeleteAcl,
    Code.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG: UpdateGlobalWhiteAddresses,
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
    Code.GET_BROKER_CLUSTER_ACL_INFO: AclInfo,
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
