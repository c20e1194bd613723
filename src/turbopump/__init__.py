"""Turbopump: a RocketMQ-compatible messaging system in Python, with a data pipeline on Spark.

The clients here block, as most programs want it; `turbopump.aio` has the same names for programs
with an event loop.
"""

from typing import TYPE_CHECKING

from turbopump.errors import (
    AdministrationError,
    AlreadyThere,
    BodyError,
    ClientError,
    ConnectFailed,
    ConnectionLost,
    DamagedMessage,
    DataLost,
    DiskFailed,
    DiskFull,
    ForkedClient,
    FrameError,
    GroupInUse,
    HeaderError,
    InvalidArgument,
    InvalidBody,
    InvalidExpression,
    JavaNotFound,
    ListenFailed,
    MissingPackage,
    NetworkError,
    NoBroker,
    NoNameServer,
    NoRoute,
    NotRunning,
    NotThere,
    Overloaded,
    RecordError,
    RemoteError,
    RequestTimeout,
    ServerFailed,
    SparkError,
    StillInUse,
    StoreClosed,
    StoreDamaged,
    StoreError,
    StoreInUse,
    TransactionNotStarted,
    TurbopumpError,
    WireError,
    WriteFailed,
    WriteRefused,
)
from turbopump.lazy_names import lazy_names
from turbopump.message import Message, MessageQueue
from turbopump.version import __version__

if TYPE_CHECKING:
    from turbopump.client.allocation import (
        ConsistentHash,
        FixedQueues,
        MachineRoom,
        NearbyRoom,
        average,
        average_by_circle,
    )
    from turbopump.client.blocking import (
        LitePullConsumer,
        Producer,
        PullConsumer,
        PushConsumer,
        Worker,
        run,
    )
    from turbopump.client.blocking_transactions import Transaction, TransactionProducer
    from turbopump.client.calls import Found, NothingMatched, NothingNew, OffsetIllegal, SendStatus
    from turbopump.client.config import ClientConfig
    from turbopump.client.delivery.listener import ConsumeHook
    from turbopump.client.delivery.results import (
        ConsumeContext,
        ConsumeOutcome,
        ConsumeResult,
        GiveUp,
        RetryLater,
    )
    from turbopump.client.filter_hooks import FilterHook
    from turbopump.client.handlers import consumer
    from turbopump.client.offset_store import OffsetStore
    from turbopump.client.outgoing import MessageRules, split_batch
    from turbopump.client.producer_config import ProducerConfig
    from turbopump.client.pull_config import FetchLimits, LitePullConfig, PullConfig, PullTimes
    from turbopump.client.push_config import FlowLimits, Listening, Pulling
    from turbopump.client.replies import Reply
    from turbopump.client.selectors import by_chance, by_hash
    from turbopump.client.send_hooks import SendHook, SendReceipt
    from turbopump.client.tracing import ConsumeTracing, SendTracing
    from turbopump.client.transaction_ends import TransactionState
    from turbopump.filters.code import CodeFilter
    from turbopump.filters.sql92 import Sql
    from turbopump.net.request_protocol import RequestHook
    from turbopump.net.tls import ClientTls
    from turbopump.wire.record import MessageView
    from turbopump.wire.sysflag import Compression
else:
    # Not before it is used: servers and tools start faster without the clients.
    _HOMES = {
        "client.allocation": "ConsistentHash FixedQueues MachineRoom NearbyRoom average "
        "average_by_circle",
        "client.blocking": "LitePullConsumer Producer PullConsumer PushConsumer Worker run",
        "client.blocking_transactions": "Transaction TransactionProducer",
        "client.calls": "Found NothingMatched NothingNew OffsetIllegal SendStatus",
        "client.config": "ClientConfig",
        "client.delivery.listener": "ConsumeHook",
        "client.delivery.results": "ConsumeContext ConsumeOutcome ConsumeResult GiveUp RetryLater",
        "client.filter_hooks": "FilterHook",
        "client.handlers": "consumer",
        "client.offset_store": "OffsetStore",
        "client.outgoing": "MessageRules split_batch",
        "client.producer_config": "ProducerConfig",
        "client.pull_config": "FetchLimits LitePullConfig PullConfig PullTimes",
        "client.push_config": "FlowLimits Listening Pulling",
        "client.replies": "Reply",
        "client.selectors": "by_chance by_hash",
        "client.send_hooks": "SendHook SendReceipt",
        "client.tracing": "ConsumeTracing SendTracing",
        "client.transaction_ends": "TransactionState",
        "filters.code": "CodeFilter",
        "filters.sql92": "Sql",
        "net.request_protocol": "RequestHook",
        "net.tls": "ClientTls",
        "wire.record": "MessageView",
        "wire.sysflag": "Compression",
    }
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)


__all__ = [
    "AdministrationError",
    "AlreadyThere",
    "BodyError",
    "ClientConfig",
    "ClientError",
    "ClientTls",
    "CodeFilter",
    "Compression",
    "ConnectFailed",
    "ConnectionLost",
    "ConsistentHash",
    "ConsumeContext",
    "ConsumeHook",
    "ConsumeOutcome",
    "ConsumeResult",
    "ConsumeTracing",
    "DamagedMessage",
    "DataLost",
    "DiskFailed",
    "DiskFull",
    "FetchLimits",
    "FilterHook",
    "FixedQueues",
    "FlowLimits",
    "ForkedClient",
    "Found",
    "FrameError",
    "GiveUp",
    "GroupInUse",
    "HeaderError",
    "InvalidArgument",
    "InvalidBody",
    "InvalidExpression",
    "JavaNotFound",
    "ListenFailed",
    "Listening",
    "LitePullConfig",
    "LitePullConsumer",
    "MachineRoom",
    "Message",
    "MessageQueue",
    "MessageRules",
    "MessageView",
    "MissingPackage",
    "NearbyRoom",
    "NetworkError",
    "NoBroker",
    "NoNameServer",
    "NoRoute",
    "NotRunning",
    "NotThere",
    "NothingMatched",
    "NothingNew",
    "OffsetIllegal",
    "OffsetStore",
    "Overloaded",
    "Producer",
    "ProducerConfig",
    "PullConfig",
    "PullConsumer",
    "PullTimes",
    "Pulling",
    "PushConsumer",
    "RecordError",
    "RemoteError",
    "Reply",
    "RequestHook",
    "RequestTimeout",
    "RetryLater",
    "SendHook",
    "SendReceipt",
    "SendStatus",
    "SendTracing",
    "ServerFailed",
    "SparkError",
    "Sql",
    "StillInUse",
    "StoreClosed",
    "StoreDamaged",
    "StoreError",
    "StoreInUse",
    "Transaction",
    "TransactionNotStarted",
    "TransactionProducer",
    "TransactionState",
    "TurbopumpError",
    "WireError",
    "Worker",
    "WriteFailed",
    "WriteRefused",
    "__version__",
    "average",
    "average_by_circle",
    "by_chance",
    "by_hash",
    "consumer",
    "run",
    "split_batch",
]
