"""Settings of a broker, each with its key in files (see `config_keys`)."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from turbopump.errors import InvalidArgument
from turbopump.filters.server_config import MEMORY_BYTES_MIN, CodeLimits
from turbopump.net.limits import RECEIVE_BYTES_MAX, RECEIVE_BYTES_MIN
from turbopump.net.name_server_list import DEFAULT_SUBGROUP, check_source, url_of_domain
from turbopump.net.network import address_text
from turbopump.settings import (
    PORT_MAX,
    CheckedSettings,
    check_settings,
    data_directory,
    metadata,
    require,
    setting,
)
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
_TRANSFER_BYTES_MAX = 4 * 1024 * 1024 - 4096
"""Apache RocketMQ's slaves have a receive buffer of 4 MiB, which must hold a whole frame."""
_FILTER_SERVERS_MAX = 64
_BULK_COUNT_MAX = 16_384
"""This many of the smallest messages exceed the bytes that a pull usually returns."""
_NAME = re.compile(r"[%|a-zA-Z0-9_.-]{1,127}")
_NAME_ALLOWED = "1 to 127 of the characters % | a-z A-Z 0-9 _ . -, not only dots"


class Role(Enum):
    """A broker's role among those of its name."""

    ASYNC_MASTER = "ASYNC_MASTER"
    SYNC_MASTER = "SYNC_MASTER"
    SLAVE = "SLAVE"


def _require_name(key: str, name: str) -> None:
    """Refuse names that cannot be topics, and so directories."""
    ok = _NAME.fullmatch(name) is not None and name.strip(".") != ""
    require(ok, key, name, _NAME_ALLOWED)


def _require_address(
    key: str, address: str, check: Callable[[str], object] = split_address
) -> None:
    try:
        check(address)
    except InvalidArgument as error:
        raise InvalidArgument(f"{key}: {error}") from error


def _default_broker_name() -> str:
    return re.sub(r"[^%|a-zA-Z0-9_.-]", "-", socket.gethostname())[:127] or "broker"


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityConfig:
    """The broker's identity and addresses."""

    cluster: str = setting("brokerClusterName", "DefaultCluster")
    """Brokers of one cluster share their topics; also a topic of this name."""
    broker_name: str = field(default_factory=_default_broker_name, metadata=metadata("brokerName"))
    """Part of every queue's identity; by default the host's name."""
    broker_id: int = setting("brokerId", 0, 0)
    """0 for the master, other numbers for its slaves."""
    role: Role = field(default=Role.ASYNC_MASTER, metadata=metadata("brokerRole"))
    """Whether it is master or slave, and whether sends wait for a slave."""
    bind_host: str = setting("bindAddress", "127.0.0.1")
    """Where to listen: a name or an address; 0.0.0.0 for all of the machine's."""
    port: int = setting("listenPort", 10911, 0, PORT_MAX)
    """Where to listen; 0 takes any port that is free."""
    serves_vip: bool = setting("vipChannelEnable", True)
    """Whether it also listens at listenPort - 2, where Java clients before 4.5 send and commit by
    default and Apache slaves ask for topics; never with listenPort 0."""
    advertised_host: str = setting("brokerIP1", "")
    """The host that clients connect to; empty takes the one listened at, or the machine's own
    address when that is all of them."""
    region: str = setting("regionId", "DefaultRegion", 1, live=True)
    """Sent to producers in every answer, for message traces."""
    trace_on: bool = setting("traceOn", True, live=True)
    """Sent to producers in every answer: whether traces may be sent."""

    def __post_init__(self) -> None:
        check_settings(self)
        _require_name("brokerClusterName", self.cluster)
        _require_name("brokerName", self.broker_name)

    @property
    def is_slave(self) -> bool:
        return self.role is Role.SLAVE

    @property
    def vip_port(self) -> int | None:
        """The second port to listen at, if any.

        Not beside a port that the system chose: no client can know it in advance, and its neighbor
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

    name_servers: tuple[str, ...] = setting("namesrvAddr", ())
    """Addresses as host:port, or URLs that return them; the broker registers with all of them."""
    from_address_server: bool = setting("fetchNamesrvAddrByAddressServer", False)
    """Whether, without ``namesrvAddr``, the URL of ``rmqAddressServerDomain`` is used."""
    domain: str = setting("rmqAddressServerDomain", "jmenv.tbsite.net", 1)
    """The host of that URL, port 8080 unless it has one."""
    subgroup: str = setting("rmqAddressServerSubGroup", DEFAULT_SUBGROUP, 1)
    """The end of that URL's path, after /rocketmq/."""
    interval_ms: int = setting("registerNameServerPeriod", 30_000, 10_000, 60_000, live=True)
    """How often it registers when nothing changes."""
    timeout_ms: int = setting("registerBrokerTimeoutMills", 6000, 1, live=True)
    """How long to wait for each name server."""
    forced: bool = setting("forceRegister", True, live=True)
    """Whether the periodic registration sends everything without asking first whether anything
    changed."""
    compressed: bool = setting("compressedRegister", False, live=True)
    """Whether the topics are sent compressed."""

    def __post_init__(self) -> None:
        check_settings(self)
        for source in self.name_servers:
            _require_address("namesrvAddr", source, check_source)
        _require_address(
            "rmqAddressServerDomain, rmqAddressServerSubGroup",
            self.domain,
            lambda domain: check_source(url_of_domain(domain, self.subgroup)),
        )

    @property
    def sources(self) -> tuple[str, ...]:
        """Addresses of name servers, and URLs that return them; none if it does not register."""
        if self.name_servers or not self.from_address_server:
            return self.name_servers
        return (url_of_domain(self.domain, self.subgroup),)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationConfig:
    """How a master sends its log to slaves, and how a slave follows its master."""

    port: int = setting("haListenPort", 0, 0, PORT_MAX)
    """Where a master listens for slaves; 0 takes ``listenPort`` + 1, or any port that is free if
    that one is taken."""
    advertised_host: str = setting("brokerIP2", "")
    """The host that slaves connect to; empty takes that of clients."""
    master_address: str = setting("haMasterAddress", "")
    """A slave's master as host:port of its HA port; empty takes what name servers report."""
    heartbeat_ms: int = setting("haSendHeartbeatInterval", 5000, 1)
    """Time without traffic after which either side sends a heartbeat."""
    idle_max_ms: int = setting("haHousekeepingInterval", 20_000, 1)
    """Time without traffic after which either side closes the connection."""
    transfer_bytes: int = setting(
        "haTransferBatchSize", 32 * 1024, 1024, _TRANSFER_BYTES_MAX, live=True
    )
    """Most bytes of the log in one frame."""
    transfer_bytes_per_s: int = setting("maxHaTransferByteInSecond", 0, 0, live=True)
    """Most bytes of the log that a master sends each second, to all of its slaves together; 0 for
    no limit."""
    fall_behind_max_bytes: int = setting("haSlaveFallbehindMax", 256 * 1024 * 1024, 1, live=True)
    """A slave that lacks this many bytes is not in sync: a SYNC_MASTER does not wait for it."""
    timeout_ms: int = setting("slaveTimeout", 3000, 1)
    """How long a send waits for a slave with SYNC_MASTER."""
    deletes_on_its_own: bool = setting("slaveDeletesOnItsOwn", False, live=True)
    """Whether a slave deletes log files that its master still has, when they are too old or its
    disk too full for its own retention settings."""

    @property
    def master_broker_address(self) -> str:
        """Where tables are copied from until a name server reports it: the port before the log's.

        Empty if no master is configured.
        """
        if not self.master_address:
            return ""
        host, port = split_address(self.master_address)
        return address_text((host, port - 1))

    def __post_init__(self) -> None:
        check_settings(self)
        if self.master_address:
            _require_address("haMasterAddress", self.master_address)
        allowed = f"at least {self.heartbeat_ms}, the haSendHeartbeatInterval"
        ok = self.idle_max_ms >= self.heartbeat_ms
        require(ok, "haHousekeepingInterval", self.idle_max_ms, allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """What the broker permits."""

    permission: int = setting("brokerPermission", PERM_READ | PERM_WRITE, 0, 7, live=True)
    """4 reading, 2 writing, 6 both; without one, routes say so too."""
    sends_from_ms: int = setting("startAcceptSendRequestTimeStamp", 0, 0, live=True)
    """Sends are refused before this time, in ms since 1970."""
    config_blacklist: frozenset[str] = setting(
        "configBlackList", frozenset({"configBlackList", "brokerConfigPath"})
    )
    """Keys that cannot be changed from outside while the broker runs."""

    def __post_init__(self) -> None:
        check_settings(self)
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

    auto_create: bool = setting("autoCreateTopicEnable", True, live=True)
    """Whether a send to an unknown topic creates it."""
    topics_max: int = setting("topicsMax", 20_000, 1, live=True)
    """Most topics, including the broker's own and those of groups; more are refused."""
    default_queues: int = setting("defaultTopicQueueNums", 8, 1, QUEUES_MAX)
    """Most queues of a topic created by a send."""
    cluster_topic: bool = setting("clusterTopicEnable", True)
    """Whether the topic named like the cluster can be used."""
    broker_topic: bool = setting("brokerTopicEnable", True)
    """Whether the topic named like the broker can be used."""
    trace_topic: bool = setting("traceTopicEnable", False)
    """Whether there is a topic for message traces."""
    trace_topic_name: str = setting("msgTraceTopicName", "RMQ_SYS_TRACE_TOPIC")
    """Its name."""

    def __post_init__(self) -> None:
        check_settings(self)
        _require_name("msgTraceTopicName", self.trace_topic_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsConfig(CheckedSettings):
    """Consumer groups and their members."""

    auto_create: bool = setting("autoCreateSubscriptionGroup", True, live=True)
    """Whether a group is created when it is first used."""
    groups_max: int = setting("groupsMax", 10_000, 1, live=True)
    """Most consumer groups, and most groups with offsets; more are refused."""
    notify_changes: bool = setting("notifyConsumerIdsChangedEnable", True, live=True)
    """Whether members are notified when others join or leave."""
    notices_per_s: int = setting("notifyConsumerIdsChangedPerSecond", 1000, 1, live=True)
    """Most notices per second to the members of one group: one that changes more often is reported
    less often, with all changes in one notice."""
    client_expiry_ms: int = setting("channelExpiredTimeout", 120_000, 1000, live=True)
    """A client without a heartbeat for this long is disconnected."""
    lock_expiry_ms: int = setting("rebalanceLockMaxLiveTime", 60_000, 1000, live=True)
    """A queue lock that is not renewed for this long is released."""
    member_reconnect_ms: int = setting("memberReconnectTimeout", 35_000, 0)
    """How long after a start the members from before it count as members and lock owners without a
    heartbeat; 0 forgets them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FiltersConfig(CheckedSettings):
    """Which subscription filters the broker evaluates besides tags."""

    sql_enabled: bool = setting("enablePropertyFilter", True, live=True)
    """Whether subscriptions may have SQL92 expressions."""
    retried: bool = setting("filterSupportRetry", False, live=True)
    """Whether retried messages must match their group's expression again."""
    servers: int = setting("filterServerNums", 0, 0, _FILTER_SERVERS_MAX)
    """Filter servers that the broker starts; 0 for no code filters."""
    server_port: int = setting("filterServerPort", 0, 0, PORT_MAX - _FILTER_SERVERS_MAX)
    """Where the first of them listens, the others at the ports after it; 0 takes any that are
    free."""
    codes_max: int = setting("filterCodesMax", 64, 1, 10_000)
    """Filters that one filter server runs; more are refused."""
    code_memory_bytes_max: int = setting("filterCodeMemoryMax", 128 * 1024 * 1024, MEMORY_BYTES_MIN)
    """Memory of a code filter's process, its interpreter included."""
    code_cpu_ms_max: int = setting("filterCodeCpuTimePerMessage", 100, 1)
    """CPU time of a code filter for one message."""
    code_time_ms_max: int = setting("filterCodeTimePerMessage", 5000, 1)
    """Time of a code filter for one message."""

    @property
    def code_limits(self) -> CodeLimits:
        return CodeLimits(
            memory_bytes_max=self.code_memory_bytes_max,
            cpu_ms_max=self.code_cpu_ms_max,
            time_ms_max=self.code_time_ms_max,
            filters_max=self.codes_max,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionsConfig(CheckedSettings):
    """Handling of transactional messages."""

    rejected: bool = setting("rejectTransactionMessage", False, live=True)
    """Whether half messages are refused."""
    timeout_ms: int = setting("transactionTimeOut", 6000, 0, live=True)
    """Age at which a half message is first checked, unless the message says otherwise."""
    check_interval_ms: int = setting("transactionCheckInterval", 60_000, 1, live=True)
    """How often producers are asked about half messages that are old enough."""
    checks_max: int = setting("transactionCheckMax", 15, 1, live=True)
    """After this many checks without a decision, a half message goes to
    TRANS_CHECK_MAX_TIME_TOPIC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongPollingConfig(CheckedSettings):
    """How pulls wait for messages."""

    enabled: bool = setting("longPollingEnable", True, live=True)
    """Whether a pull that finds nothing waits for as long as it requests."""
    hold_ms_max: int = setting("longPollingTimeMax", 60_000, 1, live=True)
    """Longest wait; pulls that request a longer one are answered after this."""
    short_hold_ms: int = setting("shortPollingTimeMills", 1000, 1, live=True)
    """How long it waits when long polling is off."""
    sweep_interval_ms: int = setting("longPollingSweepInterval", 5000, 1, live=True)
    """How often all waiting pulls are checked, in case an arrival was missed."""
    held_max: int = setting("pullThreadPoolQueueCapacity", 100_000, 1)
    """Most waiting pulls; more are refused as busy."""
    connection_held_max: int = setting("longPollsPerConnectionMax", 20_000, 1, live=True)
    """Most waiting pulls of one connection; more are refused as busy."""
    group_held_max: int = setting("longPollsPerGroupMax", 50_000, 1, live=True)
    """Most waiting pulls of one consumer group; more are refused as busy."""
    host_held_max: int = setting("longPollsPerHostMax", 50_000, 1, live=True)
    """Most waiting pulls from one IP address; more are refused as busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlaveReadsConfig(CheckedSettings):
    """When consumers pull from a slave instead of the master."""

    enabled: bool = setting("slaveReadEnable", False, live=True)
    """Whether answers to pulls suggest a slave, by the group's `whichBrokerWhenConsumeSlowly` and
    `brokerId`; otherwise always the master."""
    corrects_offsets: bool = setting("offsetCheckInSlave", False, live=True)
    """Whether a slave corrects offsets outside its queues; otherwise it sends such consumers back
    to the master."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadConfig(CheckedSettings):
    """When the broker refuses requests as busy, instead of letting all of them wait."""

    fast_failure: bool = setting("brokerFastFailureEnable", True, live=True)
    """Whether sends that waited too long are refused."""
    send_wait_max_ms: int = setting("waitTimeMillsInSendQueue", 200, 1, live=True)
    """How much work on other requests a send may wait behind, in ms."""
    sends_waiting_max: int = setting("sendThreadPoolQueueCapacity", 10_000, 1)
    """How many sends may wait for the disk in synchronous mode, with ``WAIT=false`` too; more are
    refused immediately."""
    unflushed_bytes_max: int = setting("unflushedBytesMax", 256 * 1024 * 1024, 1)
    """Bytes that may wait for the disk in synchronous mode; further sends are refused."""
    sync_flush_timeout_ms: int = setting("syncFlushTimeout", 5000, 1)
    """How long a send waits for the disk in synchronous mode."""
    connections_max: int = setting("connectionsMax", 10_000, 1)
    """Open connections; more are closed when accepted."""
    receive_bytes_max: int = setting("receiveBytesMax", RECEIVE_BYTES_MAX, RECEIVE_BYTES_MIN)
    """Bytes received on all connections and not served, such as unfinished frames; above it, the
    connection is closed whose unfinished frame began first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig(CheckedSettings):
    """How the broker waits for requests."""

    poll_us: int = setting("busyPollMicros", 100, 0, POLL_US_MAX)
    """How long to poll for the next request before sleeping, while requests arrive in quick
    succession; 0 to disable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig(CheckedSettings):
    """Size limits."""

    message_bytes_max: int = setting("maxMessageSize", 4 * 1024 * 1024, 1, _ANSWER_BYTES_MAX)
    """Largest body of a message or a batch."""
    query_count_max: int = setting("defaultQueryMaxNum", 32, 1, live=True)
    """Most messages that a query by unique key returns; queries by other keys set their own."""
    query_entries_max: int = setting("maxQueryIndexEntries", 2_000_000, 1, live=True)
    """Most entries of the key index that one query examines, from the newest on."""
    bulk_count_max: int = setting("maxTransferCountOnBulkPull", 1024, 1, _BULK_COUNT_MAX, live=True)
    """Most messages returned by a pull that accepts large answers."""
    bulk_bytes_max: int = setting(
        "maxTransferBytesOnBulkPull", 1024 * 1024, 1, _ANSWER_BYTES_MAX, live=True
    )
    """Most bytes returned by such a pull."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalsConfig(CheckedSettings):
    """How often state is saved."""

    offsets_ms: int = setting("flushConsumerOffsetInterval", 5000, 1, live=True)
    """Committed offsets of consumer groups."""
    delays_ms: int = setting("flushDelayOffsetInterval", 10_000, 1, live=True)
    """Progress of the delay service."""


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
    directory: Path = field(
        default_factory=lambda: data_directory() / "store", metadata=metadata("storePathRootDir")
    )
    """The root directory of all files."""
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
    """Return the address that this machine uses toward others; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            address: str = probe.getsockname()[0]
        except OSError:
            # No network: only this machine can be a client.
            return "127.0.0.1"
        return address
