"""Message properties: the text form on the wire and on disk, and the reserved names."""

from __future__ import annotations

from collections.abc import Mapping

from turbopump.errors import InvalidArgument

NAME_END = "\x01"
ENTRY_END = "\x02"
BYTES_MAX = 32767

KEYS = "KEYS"
TAGS = "TAGS"
WAIT = "WAIT"
DELAY = "DELAY"
RETRY_TOPIC = "RETRY_TOPIC"
REAL_TOPIC = "REAL_TOPIC"
REAL_QUEUE_ID = "REAL_QID"
TRANSACTION_PREPARED = "TRAN_MSG"
PRODUCER_GROUP = "PGROUP"
MIN_OFFSET = "MIN_OFFSET"
MAX_OFFSET = "MAX_OFFSET"
BUYER_ID = "BUYER_ID"
ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
TRANSFER_FLAG = "TRANSFER_FLAG"
CORRECTION_FLAG = "CORRECTION_FLAG"
MQ2_FLAG = "MQ2_FLAG"
RECONSUME_TIME = "RECONSUME_TIME"
MAX_RECONSUME_TIMES = "MAX_RECONSUME_TIMES"
REGION = "MSG_REGION"
TRACE_ON = "TRACE_ON"
UNIQUE_KEY = "UNIQ_KEY"
CONSUME_START_TIME = "CONSUME_START_TIME"
TRANSACTION_PREPARED_QUEUE_OFFSET = "TRAN_PREPARED_QUEUE_OFFSET"
TRANSACTION_CHECK_TIMES = "TRANSACTION_CHECK_TIMES"
CHECK_IMMUNITY_TIME_S = "CHECK_IMMUNITY_TIME_IN_SECONDS"
INSTANCE_ID = "INSTANCE_ID"
CORRELATION_ID = "CORRELATION_ID"
REPLY_TO_CLIENT = "REPLY_TO_CLIENT"
TTL = "TTL"
ARRIVE_TIME = "ARRIVE_TIME"
PUSH_REPLY_TIME = "PUSH_REPLY_TIME"
CLUSTER = "CLUSTER"
MESSAGE_TYPE = "MSG_TYPE"
INNER_MULTI_QUEUE_OFFSET = "INNER_MULTI_QUEUE_OFFSET"
DAMAGED_BODY_CRC = "DAMAGED_BODY_CRC"
"""On a dead letter whose body was damaged on disk: the expected checksum."""

RESERVED = frozenset(
    {
        KEYS, TAGS, WAIT, DELAY, RETRY_TOPIC, REAL_TOPIC, REAL_QUEUE_ID, TRANSACTION_PREPARED,
        PRODUCER_GROUP, MIN_OFFSET, MAX_OFFSET, BUYER_ID, ORIGIN_MESSAGE_ID, TRANSFER_FLAG,
        CORRECTION_FLAG, MQ2_FLAG, RECONSUME_TIME, MAX_RECONSUME_TIMES, REGION, TRACE_ON,
        UNIQUE_KEY, CONSUME_START_TIME, INSTANCE_ID, CORRELATION_ID, REPLY_TO_CLIENT, TTL,
        ARRIVE_TIME, PUSH_REPLY_TIME, CLUSTER, MESSAGE_TYPE, INNER_MULTI_QUEUE_OFFSET,
    }
)  # fmt: skip
"""Property names that user code must not set."""


def encode(properties: Mapping[str, str | None]) -> str:
    """Return the text form without None values; the last entry has no end mark, as in 4.9.8."""
    return ENTRY_END.join(
        [f"{name}{NAME_END}{value}" for name, value in properties.items() if value is not None]
    )


def decode(text: str) -> dict[str, str]:
    """Parse the text form; malformed entries are skipped, as every peer does."""
    found: dict[str, str] = {}
    for entry in text.split(ENTRY_END):
        name, separator, value = entry.partition(NAME_END)
        if separator and name and value:
            found[name] = value
    return found


def check_user_property(name: str, value: str) -> None:
    """Refuse a property that user code must not set or that could not be read back."""
    if not name.strip() or not value.strip():
        raise InvalidArgument(f"property name and value must not be blank, got {name!r}={value!r}")
    if name in RESERVED:
        raise InvalidArgument(f"property name {name!r} is reserved: choose another one")
    both = name + value
    if NAME_END in both or ENTRY_END in both:
        raise InvalidArgument(
            f"property {name!r}={value!r} must not contain the characters 0x01 and 0x02"
        )
