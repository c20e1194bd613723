"""Settings of a broker. In brackets: the key in files (see `config_keys`)."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from turbopump.broker.replication.config import ReplicationConfig
from turbopump.broker.setting_checks import (
    PORT_MAX,
    require,
    require_bool,
    require_int,
    require_text,
)
from turbopump.errors import InvalidArgument
from turbopump.filters.server_config import MEMORY_BYTES_MIN, CodeLimits
from turbopump.net.limits import RECEIVE_BYTES_MAX, RECEIVE_BYTES_MIN
from turbopump.settings import data_directory
from turbopump.store.config import StoreConfig
from turbopump.wire.bodies import QUEUES_MAX
from turbopump.wire.hosts import ANY_HOST, split_address

PERM_READ = 4
PERM_WRITE = 2
PERM_INHERIT = 1

RECORD_EXTRA_BYTES = 64 * 1024
"""Bytes of a stored message beyond its body: properties, topic and the fixed fields."""

POLL_US_MAX = 1000
"""Requests further apart gain nothing from polling: the cost of a wake-up goes unnoticed."""

_VIP_DISTANCE = 2
"""How far below a broker's port Java clients expect its VIP port."""
_ANSWER_BYTES_MAX = 15 * 1024 * 1024
"""Clients accept frames of 16 MiB, of which the rest of the answer needs some."""
_FILTER_SERVERS_MAX = 64
_BULK_COUNT_MAX = 16_384
"""This many of the smallest messages exceed the bytes that a pull usually returns."""
_NAME = re.compile(r"[%|a-zA-Z0-9_.-]{1,127}")
_NAME_ALLOWED = "1 to 127 of the characters % | a-z A-Z 0-9 _ . -, not only dots,"


class Role(Enum):
    """A broker's role among those of its name."""

    ASYNC_MASTER = "ASYNC_MASTER"
    SYNC_MASTER = "SYNC_MASTER"
    SLAVE = "SLAVE"


def _default_broker_name() -> str:
    return re.sub(r"[^%|a-zA-Z0-9_.-]", "-", socket.gethostname())[:127] or "broker"


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityConfig:
    """The broker's identity and addresses."""

    cluster: str = "DefaultCluster"
    """Brokers of one cluster share their topics; also a topic of this name [brokerClusterName]."""
    broker_name: str = field(default_factory=_default_broker_name)
    """Part of every queue's identity; by default the host's name [brokerName]."""
    broker_id: int = 0
    """0 for the master, other numbers for its slaves [brokerId]."""
    role: Role = Role.ASYNC_MASTER
    """Whether it is master or slave, and whether sends wait for a slave [brokerRole]."""
    bind_host: str = "127.0.0.1"
    """Where to listen: a name or an address; 0.0.0.0 for all of the machine's [bindAddress]."""
    port: int = 10911
    """Where to listen; 0 takes any port that is free [listenPort]."""
    serves_vip: bool = True
    """Whether it also listens at listenPort - 2, where Java clients before 4.5 send and commit by
    default and Apache slaves ask for topics; never with listenPort 0 [vipChannelEnable]."""
    advertised_host: str = ""
    """The host that clients connect to; empty takes the one listened at, or the machine's own
    address when that is all of them [brokerIP1]."""
    region: str = "DefaultRegion"
    """Sent to producers in every answer, for message traces [regionId]."""
    trace_on: bool = True
    """Sent to producers in every answer: whether traces may be sent [traceOn]."""

    def __post_init__(self) -> None:
        for key, name in (("brokerClusterName", self.cluster), ("brokerName", self.broker_name)):
            # Both are topics too, so they must be valid directory names.
            ok = _NAME.fullmatch(name) is not None and name.strip(".") != ""
            require(ok, key, name, _NAME_ALLOWED)
        require_int("brokerId", self.broker_id, 0)
        require_text("bindAddress", self.bind_host, empty=True)
        require_int("listenPort", self.port, 0, PORT_MAX)
        require_bool("vipChannelEnable", self.serves_vip)
        require_text("brokerIP1", self.advertised_host, empty=True)
        require_text("regionId", self.region)
        require_bool("traceOn", self.trace_on)

    @property
    def is_slave(self) -> bool:
        return self.role is Role.SLAVE

    @property
    def vip_port(self) -> int | None:
        """The second port to listen at, if any.

        Not beside a port that the system chose: no client can know it in advance, and its neighbour
        may be about to be assigned to another process.
        """
        return self.port - _VIP_DISTANCE if self.serves_vip and self.port > _VIP_DISTANCE else None

    @property
    def reachable_host(self) -> str:
        """The host for clients to connect to, looked up only when none is configured."""
        if self.advertised_host:
            return self.advertised_host
        return local_address() if self.bind_host in ANY_HOST else self.bind_host


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationConfig:
    """How the broker registers with name servers."""

    name_servers: tuple[str, ...] = ()
    """Addresses as host:port; the broker registers with all of them [namesrvAddr]."""
    interval_ms: int = 30_000
    """How often it registers when nothing changes [registerNameServerPeriod]."""
    timeout_ms: int = 6000
    """How long to wait for each name server [registerBrokerTimeoutMills]."""
    forced: bool = True
    """Whether the periodic registration sends everything without asking first whether anything
    changed [forceRegister]."""
    compressed: bool = False
    """Whether the topics are sent compressed [compressedRegister]."""

    def __post_init__(self) -> None:
        for address in self.name_servers:
            try:
                split_address(address)
            except InvalidArgument as error:
                raise InvalidArgument(f"namesrvAddr: {error}") from error
        require_int("registerNameServerPeriod", self.interval_ms, 10_000, 60_000)
        require_int("registerBrokerTimeoutMills", self.timeout_ms, 1)
        require_bool("forceRegister", self.forced)
        require_bool("compressedRegister", self.compressed)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """What the broker permits."""

    permission: int = PERM_READ | PERM_WRITE
    """4 reading, 2 writing, 6 both; without one, routes say so too [brokerPermission]."""
    sends_from_ms: int = 0
    """Sends are refused before this time, in ms since 1970 [startAcceptSendRequestTimeStamp]."""
    config_blacklist: frozenset[str] = frozenset({"configBlackList", "brokerConfigPath"})
    """Keys that cannot be changed from outside while the broker runs [configBlackList]."""

    def __post_init__(self) -> None:
        require_int("brokerPermission", self.permission, 0, 7)
        require_int("startAcceptSendRequestTimeStamp", self.sends_from_ms, 0)
        require(
            all(self.config_blacklist), "configBlackList", self.config_blacklist, "a set of keys"
        )

    @property
    def can_read(self) -> bool:
        return bool(self.permission & PERM_READ)

    @property
    def can_write(self) -> bool:
        return bool(self.permission & PERM_WRITE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsConfig:
    """Which topics exist, and which are created automatically."""

    auto_create: bool = True
    """Whether a send to an unknown topic creates it [autoCreateTopicEnable]."""
    topics_max: int = 20_000
    """Most topics, including the broker's own and those of groups; more are refused [topicsMax]."""
    default_queues: int = 8
    """Most queues of a topic created by a send [defaultTopicQueueNums]."""
    cluster_topic: bool = True
    """Whether the topic named like the cluster can be used [clusterTopicEnable]."""
    broker_topic: bool = True
    """Whether the topic named like the broker can be used [brokerTopicEnable]."""
    trace_topic: bool = False
    """Whether there is a topic for message traces [traceTopicEnable]."""
    trace_topic_name: str = "RMQ_SYS_TRACE_TOPIC"
    """Its name [msgTraceTopicName]."""

    def __post_init__(self) -> None:
        require_bool("autoCreateTopicEnable", self.auto_create)
        require_int("topicsMax", self.topics_max, 1)
        require_int("defaultTopicQueueNums", self.default_queues, 1, QUEUES_MAX)
        require_bool("clusterTopicEnable", self.cluster_topic)
        require_bool("brokerTopicEnable", self.broker_topic)
        require_bool("traceTopicEnable", self.trace_topic)
        name = self.trace_topic_name
        ok = _NAME.fullmatch(name) is not None and name.strip(".") != ""
        require(ok, "msgTraceTopicName", name, _NAME_ALLOWED)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsConfig:
    """Consumer groups and their members."""

    auto_create: bool = True
    """Whether a group is created when it is first used [autoCreateSubscriptionGroup]."""
    groups_max: int = 10_000
    """Most consumer groups; more are refused [groupsMax]."""
    notify_changes: bool = True
    """Whether members are notified when others join or leave [notifyConsumerIdsChangedEnable]."""
    client_expiry_ms: int = 120_000
    """A client without a heartbeat for this long is disconnected [channelExpiredTimeout]."""
    lock_expiry_ms: int = 60_000
    """A queue lock that is not renewed for this long is released [rebalanceLockMaxLiveTime]."""
    member_reconnect_ms: int = 35_000
    """How long after a start the members from before it count as members and lock owners without a
    heartbeat; 0 forgets them [memberReconnectTimeout]."""

    def __post_init__(self) -> None:
        require_bool("autoCreateSubscriptionGroup", self.auto_create)
        require_int("groupsMax", self.groups_max, 1)
        require_bool("notifyConsumerIdsChangedEnable", self.notify_changes)
        require_int("channelExpiredTimeout", self.client_expiry_ms, 1000)
        require_int("rebalanceLockMaxLiveTime", self.lock_expiry_ms, 1000)
        require_int("memberReconnectTimeout", self.member_reconnect_ms, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FiltersConfig:
    """Which subscription filters the broker evaluates besides tags."""

    sql_enabled: bool = True
    """Whether subscriptions may have SQL92 expressions [enablePropertyFilter]."""
    retried: bool = False
    """Whether retried messages must match their group's expression again [filterSupportRetry]."""
    servers: int = 0
    """Filter servers that the broker starts; 0 for no code filters [filterServerNums]."""
    server_port: int = 0
    """Where the first of them listens, the others at the ports after it; 0 takes any that are
    free [filterServerPort]."""
    codes_max: int = 64
    """Filters that one filter server runs; more are refused [filterCodesMax]."""
    code_memory_bytes_max: int = 128 * 1024 * 1024
    """Memory of a code filter's process, its interpreter included [filterCodeMemoryMax]."""
    code_cpu_ms_max: int = 100
    """CPU time of a code filter for one message [filterCodeCpuTimePerMessage]."""
    code_time_ms_max: int = 5000
    """Time of a code filter for one message [filterCodeTimePerMessage]."""

    def __post_init__(self) -> None:
        require_bool("enablePropertyFilter", self.sql_enabled)
        require_bool("filterSupportRetry", self.retried)
        require_int("filterServerNums", self.servers, 0, _FILTER_SERVERS_MAX)
        require_int("filterServerPort", self.server_port, 0, PORT_MAX - _FILTER_SERVERS_MAX)
        require_int("filterCodesMax", self.codes_max, 1, 10_000)
        require_int("filterCodeMemoryMax", self.code_memory_bytes_max, MEMORY_BYTES_MIN)
        require_int("filterCodeCpuTimePerMessage", self.code_cpu_ms_max, 1)
        require_int("filterCodeTimePerMessage", self.code_time_ms_max, 1)

    @property
    def code_limits(self) -> CodeLimits:
        return CodeLimits(
            memory_bytes_max=self.code_memory_bytes_max,
            cpu_ms_max=self.code_cpu_ms_max,
            time_ms_max=self.code_time_ms_max,
            filters_max=self.codes_max,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionsConfig:
    """Handling of transactional messages."""

    rejected: bool = False
    """Whether half messages are refused [rejectTransactionMessage]."""
    timeout_ms: int = 6000
    """Age at which a half message is checked for the first time, unless the message says otherwise
    [transactionTimeOut]."""
    check_interval_ms: int = 60_000
    """How often producers are asked about half messages that are old enough
    [transactionCheckInterval]."""
    checks_max: int = 15
    """After this many checks without a decision, a half message goes to
    TRANS_CHECK_MAX_TIME_TOPIC [transactionCheckMax]."""

    def __post_init__(self) -> None:
        require_bool("rejectTransactionMessage", self.rejected)
        require_int("transactionTimeOut", self.timeout_ms, 0)
        require_int("transactionCheckInterval", self.check_interval_ms, 1)
        require_int("transactionCheckMax", self.checks_max, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongPollingConfig:
    """How pulls wait for messages."""

    enabled: bool = True
    """Whether a pull that finds nothing waits for as long as it requests [longPollingEnable]."""
    short_hold_ms: int = 1000
    """How long it waits when long polling is off [shortPollingTimeMills]."""
    sweep_interval_ms: int = 5000
    """How often all waiting pulls are checked, in case an arrival was missed
    [longPollingSweepInterval]."""
    held_max: int = 100_000
    """Most waiting pulls; more are answered immediately [pullThreadPoolQueueCapacity]."""

    def __post_init__(self) -> None:
        require_bool("longPollingEnable", self.enabled)
        require_int("shortPollingTimeMills", self.short_hold_ms, 1)
        require_int("longPollingSweepInterval", self.sweep_interval_ms, 1)
        require_int("pullThreadPoolQueueCapacity", self.held_max, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlaveReadsConfig:
    """When consumers pull from a slave instead of the master."""

    enabled: bool = False
    """Whether answers to pulls suggest a slave, by the group's `whichBrokerWhenConsumeSlowly` and
    `brokerId`; otherwise always the master [slaveReadEnable]."""
    corrects_offsets: bool = False
    """Whether a slave corrects offsets outside its queues; otherwise it sends such consumers back
    to the master [offsetCheckInSlave]."""

    def __post_init__(self) -> None:
        require_bool("slaveReadEnable", self.enabled)
        require_bool("offsetCheckInSlave", self.corrects_offsets)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadConfig:
    """When the broker refuses requests as busy, instead of letting all of them wait."""

    fast_failure: bool = True
    """Whether sends that waited too long are refused [brokerFastFailureEnable]."""
    send_wait_max_ms: int = 200
    """How much work on other requests a send may wait behind, in ms [waitTimeMillsInSendQueue]."""
    sends_waiting_max: int = 10_000
    """How many sends may wait for the disk in synchronous mode, with ``WAIT=false`` too; more are
    refused immediately [sendThreadPoolQueueCapacity]."""
    unflushed_bytes_max: int = 256 * 1024 * 1024
    """Bytes that may wait for the disk in synchronous mode; further sends are refused
    [unflushedBytesMax]."""
    sync_flush_timeout_ms: int = 5000
    """How long a send waits for the disk in synchronous mode [syncFlushTimeout]."""
    connections_max: int = 10_000
    """Open connections; more are closed when accepted [connectionsMax]."""
    receive_bytes_max: int = RECEIVE_BYTES_MAX
    """Bytes received on all connections and not served, such as unfinished frames; above it, the
    connection is closed whose unfinished frame began first [receiveBytesMax]."""

    def __post_init__(self) -> None:
        require_bool("brokerFastFailureEnable", self.fast_failure)
        require_int("waitTimeMillsInSendQueue", self.send_wait_max_ms, 1)
        require_int("sendThreadPoolQueueCapacity", self.sends_waiting_max, 1)
        require_int("unflushedBytesMax", self.unflushed_bytes_max, 1)
        require_int("syncFlushTimeout", self.sync_flush_timeout_ms, 1)
        require_int("connectionsMax", self.connections_max, 1)
        require_int("receiveBytesMax", self.receive_bytes_max, RECEIVE_BYTES_MIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """How the broker waits for requests."""

    poll_us: int = 100
    """How long to poll for the next request before sleeping, while requests arrive in quick
    succession; 0 to disable [busyPollMicros]."""

    def __post_init__(self) -> None:
        require_int("busyPollMicros", self.poll_us, 0, POLL_US_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Size limits."""

    message_bytes_max: int = 4 * 1024 * 1024
    """Largest body of a message or a batch [maxMessageSize]."""
    query_count_max: int = 32
    """Most messages that a query by unique key returns; a query by another key sets its own limit
    [defaultQueryMaxNum]."""
    bulk_count_max: int = 1024
    """Most messages returned by a pull that accepts large answers [maxTransferCountOnBulkPull]."""
    bulk_bytes_max: int = 1024 * 1024
    """Most bytes returned by such a pull [maxTransferBytesOnBulkPull]."""

    def __post_init__(self) -> None:
        require_int("maxMessageSize", self.message_bytes_max, 1, _ANSWER_BYTES_MAX)
        require_int("defaultQueryMaxNum", self.query_count_max, 1)
        require_int("maxTransferCountOnBulkPull", self.bulk_count_max, 1, _BULK_COUNT_MAX)
        require_int("maxTransferBytesOnBulkPull", self.bulk_bytes_max, 1, _ANSWER_BYTES_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalsConfig:
    """How often state is saved."""

    offsets_ms: int = 5000
    """Committed offsets of consumer groups [flushConsumerOffsetInterval]."""
    delays_ms: int = 10_000
    """Progress of the delay service [flushDelayOffsetInterval]."""

    def __post_init__(self) -> None:
        require_int("flushConsumerOffsetInterval", self.offsets_ms, 1)
        require_int("flushDelayOffsetInterval", self.delays_ms, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    """All settings, grouped by the part that reads them."""

    identity: IdentityConfig = field(default_factory=IdentityConfig)
    registration: RegistrationConfig = RegistrationConfig()
    replication: ReplicationConfig = field(default_factory=ReplicationConfig)
    access: AccessConfig = AccessConfig()
    topics: TopicsConfig = TopicsConfig()
    groups: GroupsConfig = GroupsConfig()
    filters: FiltersConfig = FiltersConfig()
    transactions: TransactionsConfig = TransactionsConfig()
    long_polling: LongPollingConfig = LongPollingConfig()
    slave_reads: SlaveReadsConfig = SlaveReadsConfig()
    overload: OverloadConfig = OverloadConfig()
    network: NetworkConfig = NetworkConfig()
    limits: LimitsConfig = LimitsConfig()
    intervals: IntervalsConfig = IntervalsConfig()
    directory: Path = field(default_factory=lambda: data_directory() / "store")
    """The root directory of all files [storePathRootDir]."""
    store: StoreConfig = field(default_factory=StoreConfig)

    def __post_init__(self) -> None:
        role, broker_id = self.identity.role, self.identity.broker_id
        allowed = (
            "above 0 with brokerRole SLAVE" if self.identity.is_slave else f"0 with {role.value}"
        )
        require(self.identity.is_slave == (broker_id > 0), "brokerId", broker_id, allowed)
        largest = self.store.record_bytes_max - RECORD_EXTRA_BYTES
        given_bytes = self.limits.message_bytes_max
        require(given_bytes <= largest, "maxMessageSize", given_bytes, f"at most {largest}")
        segment_min = self.store.segment_bytes_min
        allowed = f"at least {segment_min} with maxMessageSize {given_bytes}"
        segment = self.store.segment_bytes
        require(segment >= segment_min, "mappedFileSizeCommitLog", segment, allowed)
        # Retries are delayed, so at least one level must exist.
        require(bool(self.store.delay_levels), "messageDelayLevel", "", "at least one delay")


def local_address() -> str:
    """Return the address that this machine uses towards others; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            address: str = probe.getsockname()[0]
        except OSError:
            # No network: only this machine can be a client.
            return "127.0.0.1"
        return address
