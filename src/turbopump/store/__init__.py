"""The durable log: commit log, consume queues and key index. Synchronous, one writer.

One thread owns a `Store` and makes every call; a second one, the store's own, only flushes.
"""

from turbopump.machine.files import Files
from turbopump.store.append import add_record
from turbopump.store.config import (
    DEFAULT_DELAY_LEVELS,
    FlushConfig,
    FlushMode,
    ReadLimits,
    RetentionConfig,
    StoreConfig,
)
from turbopump.store.outcomes import (
    Appended,
    Arrival,
    Filter,
    Found,
    MessagesRemoved,
    NoMatch,
    OffsetTooLarge,
    OffsetTooSmall,
    QueueEmpty,
    QueueUnknown,
    ReadOutcome,
    UnitsMissing,
    UpToDate,
)
from turbopump.store.store import Store
from turbopump.wire.delay_levels import parse_delay_levels

__all__ = [
    "DEFAULT_DELAY_LEVELS",
    "Appended",
    "Arrival",
    "Files",
    "Filter",
    "FlushConfig",
    "FlushMode",
    "Found",
    "MessagesRemoved",
    "NoMatch",
    "OffsetTooLarge",
    "OffsetTooSmall",
    "QueueEmpty",
    "QueueUnknown",
    "ReadLimits",
    "ReadOutcome",
    "RetentionConfig",
    "Store",
    "StoreConfig",
    "UnitsMissing",
    "UpToDate",
    "add_record",
    "parse_delay_levels",
]
