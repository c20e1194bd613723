"""The clients for programs with an event loop; the same names as in `turbopump`, to be awaited.

::

    from turbopump.aio import Message, Producer

    async with Producer("orders-producer", nameserver="127.0.0.1:9876") as producer:
        await producer.send(Message("orders", b"hello"))
"""

from turbopump.client.allocation import (
    ConsistentHash,
    FixedQueues,
    MachineRoom,
    NearbyRoom,
    average,
    average_by_circle,
)
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
from turbopump.client.lite_pull_consumer import LitePullConsumer
from turbopump.client.outgoing import MessageRules, split_batch
from turbopump.client.producer import Producer
from turbopump.client.producer_config import ProducerConfig
from turbopump.client.pull_config import FetchLimits, LitePullConfig, PullConfig, PullTimes
from turbopump.client.pull_consumer import PullConsumer
from turbopump.client.push_config import FlowLimits, Listening, Pulling
from turbopump.client.push_consumer import PushConsumer
from turbopump.client.replies import Reply
from turbopump.client.selectors import by_chance, by_hash
from turbopump.client.send_hooks import SendHook, SendReceipt
from turbopump.client.session import Session
from turbopump.client.transaction_ends import TransactionState
from turbopump.client.transactions import Transaction, TransactionProducer
from turbopump.client.worker import Worker
from turbopump.errors import TurbopumpError
from turbopump.filters.code import CodeFilter
from turbopump.filters.sql92 import Sql
from turbopump.message import Message, MessageQueue
from turbopump.net.request_protocol import RequestHook
from turbopump.wire.record import MessageView

__all__ = [
    "ClientConfig",
    "CodeFilter",
    "ConsistentHash",
    "ConsumeContext",
    "ConsumeHook",
    "ConsumeOutcome",
    "ConsumeResult",
    "FetchLimits",
    "FilterHook",
    "FixedQueues",
    "FlowLimits",
    "Found",
    "GiveUp",
    "Listening",
    "LitePullConfig",
    "LitePullConsumer",
    "MachineRoom",
    "Message",
    "MessageQueue",
    "MessageRules",
    "MessageView",
    "NearbyRoom",
    "NothingMatched",
    "NothingNew",
    "OffsetIllegal",
    "Producer",
    "ProducerConfig",
    "PullConfig",
    "PullConsumer",
    "PullTimes",
    "Pulling",
    "PushConsumer",
    "Reply",
    "RequestHook",
    "RetryLater",
    "SendHook",
    "SendReceipt",
    "SendStatus",
    "Session",
    "Sql",
    "Transaction",
    "TransactionProducer",
    "TransactionState",
    "TurbopumpError",
    "Worker",
    "average",
    "average_by_circle",
    "by_chance",
    "by_hash",
    "consumer",
    "split_batch",
]
