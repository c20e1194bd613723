"""Turbopump: a RocketMQ-compatible messaging system in Python, with a data pipeline on Spark.

The clients here block, as most programs want it; `turbopump.aio` has the same names for programs
with an event loop.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from turbopump.errors import TurbopumpError
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
    from turbopump.client.calls import (
        Found,
        NothingMatched,
        NothingNew,
        OffsetIllegal,
        SendStatus,
    )
    from turbopump.client.config import ClientConfig
    from turbopump.client.delivery.results import ConsumeContext, ConsumeResult
    from turbopump.client.handlers import consumer
    from turbopump.client.outgoing import MessageRules, split_batch
    from turbopump.client.producer_config import ProducerConfig
    from turbopump.client.pull_config import FetchLimits, LitePullConfig, PullConfig, PullTimes
    from turbopump.client.push_config import FlowLimits, Listening, Pulling, Retries
    from turbopump.client.replies import Reply
    from turbopump.client.selectors import by_chance, by_hash
    from turbopump.client.send_hooks import SendReceipt
    from turbopump.client.transaction_ends import TransactionState
    from turbopump.filters.code import CodeFilter
    from turbopump.filters.sql92 import Sql
    from turbopump.wire.record import MessageView
else:
    # Not before it is used: servers and tools start faster without the clients.
    _HOMES = {
        "ClientConfig": "turbopump.client.config",
        "CodeFilter": "turbopump.filters.code",
        "ConsistentHash": "turbopump.client.allocation",
        "ConsumeContext": "turbopump.client.delivery.results",
        "ConsumeResult": "turbopump.client.delivery.results",
        "FetchLimits": "turbopump.client.pull_config",
        "FixedQueues": "turbopump.client.allocation",
        "FlowLimits": "turbopump.client.push_config",
        "Found": "turbopump.client.calls",
        "Listening": "turbopump.client.push_config",
        "LitePullConfig": "turbopump.client.pull_config",
        "LitePullConsumer": "turbopump.client.blocking",
        "MachineRoom": "turbopump.client.allocation",
        "MessageRules": "turbopump.client.outgoing",
        "NearbyRoom": "turbopump.client.allocation",
        "MessageView": "turbopump.wire.record",
        "NothingMatched": "turbopump.client.calls",
        "NothingNew": "turbopump.client.calls",
        "OffsetIllegal": "turbopump.client.calls",
        "Producer": "turbopump.client.blocking",
        "ProducerConfig": "turbopump.client.producer_config",
        "PullConfig": "turbopump.client.pull_config",
        "PullConsumer": "turbopump.client.blocking",
        "PullTimes": "turbopump.client.pull_config",
        "Reply": "turbopump.client.replies",
        "Pulling": "turbopump.client.push_config",
        "PushConsumer": "turbopump.client.blocking",
        "Retries": "turbopump.client.push_config",
        "SendReceipt": "turbopump.client.send_hooks",
        "SendStatus": "turbopump.client.calls",
        "Sql": "turbopump.filters.sql92",
        "Transaction": "turbopump.client.blocking_transactions",
        "TransactionProducer": "turbopump.client.blocking_transactions",
        "TransactionState": "turbopump.client.transaction_ends",
        "Worker": "turbopump.client.blocking",
        "average": "turbopump.client.allocation",
        "average_by_circle": "turbopump.client.allocation",
        "by_chance": "turbopump.client.selectors",
        "by_hash": "turbopump.client.selectors",
        "consumer": "turbopump.client.handlers",
        "run": "turbopump.client.blocking",
        "split_batch": "turbopump.client.outgoing",
    }

    def __getattr__(name):
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(home), name)

    def __dir__():
        return sorted(__all__)


__all__ = [
    "ClientConfig",
    "CodeFilter",
    "ConsistentHash",
    "ConsumeContext",
    "ConsumeResult",
    "FetchLimits",
    "FixedQueues",
    "FlowLimits",
    "Found",
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
    "Retries",
    "SendReceipt",
    "SendStatus",
    "Sql",
    "Transaction",
    "TransactionProducer",
    "TransactionState",
    "TurbopumpError",
    "Worker",
    "__version__",
    "average",
    "average_by_circle",
    "by_chance",
    "by_hash",
    "consumer",
    "run",
    "split_batch",
]
