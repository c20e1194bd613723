"""Encoding messages for the wire: checks, properties, compression. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from turbopump.client.names import check_topic_for_sending, with_namespace
from turbopump.durations import as_milliseconds
from turbopump.errors import InvalidArgument
from turbopump.message import Message, MessageQueue
from turbopump.net.limits import require_at_least
from turbopump.wire import properties
from turbopump.wire.batch import encode_entries
from turbopump.wire.command import Buffer
from turbopump.wire.compression import deflate
from turbopump.wire.delay_levels import DELAY_LEVELS, parse_delay_levels
from turbopump.wire.headers import SendMessage
from turbopump.wire.names import RETRY_PREFIX
from turbopump.wire.prepared_requests import SendKind, SendRequest, send_kind
from turbopump.wire.sysflag import (
    Compression,
    Transaction,
    transaction_of,
    with_compression,
    with_transaction,
)

_MIB = 1024 * 1024
BATCH_ENTRY_OVERHEAD_BYTES = 22
"""Bytes per message of a batch, besides its body and properties."""

_UNIQUE_ID_ENTRY_BYTES = 80
"""Room for what the producer adds to each message: unique id, WAIT, and separators."""


@dataclass(frozen=True, slots=True)
class MessageRules:
    """Limits of messages, and when to compress them.

    ::

        ProducerConfig(messages=MessageRules(compression=Compression.ZSTD, body_bytes_max=65536))
    """

    body_bytes_max: int = 4 * _MIB
    compress_from_bytes: int = 4096
    """Bodies of at least this size are compressed; batches never are."""

    compression: Compression = Compression.ZLIB
    """Every client reads ZLIB; only newer ones read LZ4 and ZSTD."""

    compression_level: int = 5
    new_topic_queues: int = 4
    """The number of queues of a topic that the first message creates."""

    delay_levels: str = DELAY_LEVELS
    """The brokers' ``messageDelayLevel``; delays are checked against it and rounded up to it."""

    def __post_init__(self) -> None:
        for name in ("body_bytes_max", "compress_from_bytes", "new_topic_queues"):
            require_at_least(name, getattr(self, name), 1)
        if not 0 <= self.compression_level <= 9:
            raise InvalidArgument(f"compression_level must be 0–9, got {self.compression_level!r}")
        if not _delays_ms(self.delay_levels):
            raise InvalidArgument('delay_levels must have a delay, such as "1s 5s 10s", got ""')


class Outgoing(Struct, frozen=True, gc=False):
    """A checked message or batch, complete except for its queue."""

    topic: str
    message_id: str
    """The unique id; for a batch, the ids joined by ",", or the first one if the body has them."""

    body: Buffer
    properties: str
    flag: int
    sys_flag: int
    is_batch: bool = False

    @property
    def is_half(self) -> bool:
        """Whether the broker holds it until its transaction ends."""
        return transaction_of(self.sys_flag) is Transaction.PREPARED

    def request_of(self, kind: SendKind, queue: MessageQueue, born_ms: int) -> SendRequest:
        """Return the request that stores it in a queue."""
        return SendRequest(
            kind, queue.queue_id, self.sys_flag, born_ms, self.flag, self.properties, self.body
        )

    def header(
        self, group: str, queue: MessageQueue, born_ms: int, new_topic_queues: int
    ) -> SendMessage:
        kind = send_kind(group, self.topic, queue.broker, new_topic_queues, self.is_batch)
        return self.request_of(kind, queue, born_ms).header


def outgoing(
    message: Message,
    message_id: str,
    rules: MessageRules,
    namespace: str = "",
    extra: Mapping[str, str] | None = None,
) -> Outgoing:
    """Check and encode a message; raises InvalidArgument that names the fault.

    ``extra`` are protocol properties that the caller adds.
    """
    if not _is_plain(message, rules):
        check_message(message, rules)
    if message.delay is not None:
        message = replace(message, delay_level=_level_of(message, rules), delay=None)
    topic = with_namespace(namespace, message.topic) if namespace else message.topic
    check_topic_for_sending(topic)
    text = properties_text(message, message_id, namespace, extra)
    body, sys_flag = message.body, 0
    if len(body) >= rules.compress_from_bytes:
        body, sys_flag = _compressed(body, rules)
    if extra and properties.TRANSACTION_PREPARED in extra:
        _check_half(message)
        sys_flag = with_transaction(sys_flag, Transaction.PREPARED)
    return Outgoing(topic, message_id, body, text, message.flag, sys_flag)


def encoded_message(
    topic: str,
    message_id: str,
    body: bytes,
    text: str,
    delay_level: int,
    rules: MessageRules,
    namespace: str = "",
) -> Outgoing:
    """Wrap a message that was checked, and its properties encoded, elsewhere."""
    inside = with_namespace(namespace, topic)
    check_topic_for_sending(inside)
    if delay_level:
        text += _entry(properties.DELAY, str(delay_level))
    if namespace:
        text += _entry(properties.INSTANCE_ID, namespace)
    _check_length(text)
    sys_flag = 0
    if len(body) >= rules.compress_from_bytes:
        body, sys_flag = _compressed(body, rules)
    return Outgoing(inside, message_id, body, text, 0, sys_flag)


def _compressed(body: bytes, rules: MessageRules) -> tuple[bytes, int]:
    """Return a body, which is long, as it is sent, and the system flag that says how."""
    smaller = deflate(body, rules.compression, rules.compression_level)
    if len(smaller) < len(body):
        return smaller, with_compression(0, rules.compression)
    return body, 0


def outgoing_batch(
    messages: Sequence[Message],
    message_ids: Sequence[str],
    rules: MessageRules,
    namespace: str = "",
) -> Outgoing:
    """Check and encode messages as one batch, stored all or none."""
    check_batch(messages, rules)
    topic = with_namespace(namespace, messages[0].topic)
    check_topic_for_sending(topic)
    texts = map(properties_text, messages, message_ids)
    body = encode_entries(
        [
            (message.body, text.encode(), message.flag)
            for message, text in zip(messages, texts, strict=True)
        ]
    )
    own = {properties.WAIT: "true" if messages[0].wait_stored else "false"}
    return _batch(topic, ",".join(message_ids), body, own, rules, namespace)


def encoded_batch(
    topic: str, message_id: str, body: Buffer, rules: MessageRules, namespace: str = ""
) -> Outgoing:
    """Wrap messages that were checked and encoded elsewhere as one batch with one id."""
    inside = with_namespace(namespace, topic)
    check_topic_for_sending(inside)
    return _batch(inside, message_id, body, {properties.WAIT: "true"}, rules, namespace)


def _batch(
    topic: str,
    message_id: str,
    body: Buffer,
    own: dict[str, str],
    rules: MessageRules,
    namespace: str,
) -> Outgoing:
    if len(body) > rules.body_bytes_max:
        raise InvalidArgument(
            f"a batch must have at most {rules.body_bytes_max} bytes, got {len(body)}; see "
            "split_batch"
        )
    if namespace:
        own[properties.INSTANCE_ID] = namespace
    return Outgoing(topic, message_id, body, properties.encode(own), 0, 0, is_batch=True)


def properties_text(
    message: Message, message_id: str, namespace: str = "", extra: Mapping[str, str] | None = None
) -> str:
    """Return all properties in text form; raises InvalidArgument for invalid ones."""
    text = f"{_ID_MARK}{message_id}{_WAITS if message.wait_stored else _DOES_NOT_WAIT}"
    if message.tags:
        text += _entry(properties.TAGS, message.tags)
    if message.keys:
        text += _entry(properties.KEYS, " ".join(_keys(message)))
    if message.delay_level:
        text += _entry(properties.DELAY, str(message.delay_level))
    if namespace:
        text += _entry(properties.INSTANCE_ID, namespace)
    if message.properties:
        for name, value in message.properties.items():
            properties.check_user_property(name, value)
            text += _entry(name, value)
    if extra:
        text += "".join([_entry(name, value) for name, value in extra.items()])
    if len(text) > _CHARS_TO_COUNT:
        _check_length(text)
    return text


def _check_length(text: str) -> None:
    # No character takes more than four bytes, so most texts need no counting.
    if len(text) > _CHARS_TO_COUNT and len(text.encode()) > properties.BYTES_MAX:
        raise InvalidArgument(
            f"properties must be at most {properties.BYTES_MAX} bytes, got {len(text.encode())}"
        )


_CHARS_TO_COUNT = properties.BYTES_MAX // 4
_ID_MARK = f"{properties.UNIQUE_KEY}{properties.NAME_END}"


def _entry(name: str, value: str) -> str:
    """Return a property as appended to others."""
    return f"{properties.ENTRY_END}{name}{properties.NAME_END}{value}"


_WAITS = _entry(properties.WAIT, "true")
_DOES_NOT_WAIT = _entry(properties.WAIT, "false")


def check_message(message: Message, rules: MessageRules) -> None:
    """Refuse a message that no broker accepts, whatever its topic."""
    _check_types(message)
    size = len(message.body)
    if not 0 < size <= rules.body_bytes_max:
        raise InvalidArgument(f"body must be 1–{rules.body_bytes_max} bytes, got {size}")
    if message.delay_level:
        level_max = len(_delays_ms(rules.delay_levels))
        if not 0 <= message.delay_level <= level_max:
            raise InvalidArgument(
                f"delay_level must be 0–{level_max}, got {message.delay_level}; if the brokers "
                "have other levels, pass them as MessageRules(delay_levels=...)"
            )
    if message.tags is not None:
        _check_text("tags", message.tags)


def _is_plain(message: Any, rules: MessageRules) -> bool:
    """Whether a message has only a valid body; most do and need no further checks."""
    return (
        message.__class__ is Message
        and message.body.__class__ is bytes
        and 0 < len(message.body) <= rules.body_bytes_max
        and message.tags is None
        and message.keys == ()
        and not message.properties
        and message.properties.__class__ is dict
        and message.delay_level.__class__ is int
        and not message.delay_level
        and message.flag.__class__ is int
    )


def _check_types(message: Any) -> None:
    """Refuse values of wrong types, which untyped programs may pass."""
    if not isinstance(message, Message):
        raise InvalidArgument(f"send() expects a Message, got {type(message).__name__}")
    if not isinstance(message.body, bytes):
        raise InvalidArgument(f"body must be bytes, got {type(message.body).__name__}")
    if not isinstance(message.tags, str | None):
        raise InvalidArgument(f"tags must be one string or None, got {message.tags!r}")
    if not isinstance(message.delay_level, int):
        raise InvalidArgument(f"delay_level must be an integer, got {message.delay_level!r}")
    if not isinstance(message.flag, int):
        raise InvalidArgument(f"flag must be an integer, got {message.flag!r}")
    given: Any = message.properties
    if not isinstance(given, Mapping):
        raise InvalidArgument(f"properties must map names to values, got {given!r}")
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidArgument(f"property {name!r} must be a string, got {value!r}")
    keys: Any = message.keys
    # A generator would be empty when it is sent.
    if not isinstance(keys, Collection) or not all(isinstance(key, str) for key in keys):
        raise InvalidArgument(f"keys must be strings, got {message.keys!r}")


def _level_of(message: Message, rules: MessageRules) -> int:
    """Return the shortest delay level that is not earlier than the message's delay."""
    if message.delay_level:
        raise InvalidArgument("pass delay or delay_level, not both")
    delays_ms = _delays_ms(rules.delay_levels)
    given: Any = message.delay
    # Not in full: as floats, 1.001 s are a little less than 1001 ms.
    delay_ms = round(as_milliseconds(given), 3)
    longer = [each for each in delays_ms if each >= delay_ms]
    if not longer or delay_ms < 0:
        raise InvalidArgument(
            f"delay must be 0–{max(delays_ms) / 1000:.10g} seconds (the longest of the brokers' "
            f"levels), as a number or a timedelta, got {given!r}"
        )
    return delays_ms.index(min(longer)) + 1 if delay_ms else 0


_delays_ms = lru_cache(maxsize=16)(parse_delay_levels)


def _check_half(message: Message) -> None:
    if message.delay_level or message.delay:
        given = message.delay or message.delay_level
        raise InvalidArgument(
            f"the delay of a transactional message must be 0, got {given}: brokers do not delay "
            "messages of transactions; send it after the local transaction instead"
        )


def check_batch(messages: Sequence[Message], rules: MessageRules) -> None:
    """Refuse messages that cannot form one batch."""
    if not messages:
        raise InvalidArgument("a batch must have at least one message")
    first = messages[0]
    for message in messages:
        if not _is_plain(message, rules):
            check_message(message, rules)
        if message.topic != first.topic or message.wait_stored != first.wait_stored:
            raise InvalidArgument(
                "messages of a batch must have the same topic and wait_stored: "
                f"{message.topic!r}, {message.wait_stored} differs from {first.topic!r}, "
                f"{first.wait_stored}"
            )
        if message.delay_level or message.delay:
            raise _unfit_for_batch(message)
    if first.topic.startswith(RETRY_PREFIX):
        raise _unfit_for_batch(first)


def _unfit_for_batch(message: Message) -> InvalidArgument:
    return InvalidArgument(
        "messages of a batch must have no delay and no retry topic, got topic "
        f"{message.topic!r} with delay {message.delay or message.delay_level}"
    )


def split_batch(
    messages: Iterable[Message], bytes_max: int = _MIB, count_max: int = 1000
) -> Iterator[list[Message]]:
    """Split messages of one topic into batches that brokers accept, preserving their order.

    A message larger than ``bytes_max`` becomes a batch of its own.

    ::

        for batch in split_batch(messages):
            producer.send_batch(batch)
    """
    require_at_least("bytes_max", bytes_max, 1)
    require_at_least("count_max", count_max, 1)
    batch: list[Message] = []
    batch_bytes = 0
    for message in messages:
        size = _size_in_batch(message)
        if batch and (batch_bytes + size > bytes_max or len(batch) >= count_max):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(message)
        batch_bytes += size
    if batch:
        yield batch


def _size_in_batch(message: Message) -> int:
    """Return the size of a message in a batch, rounded up rather than down."""
    keys = " ".join(_keys(message))
    texts = [message.tags or "", keys, *message.properties, *message.properties.values()]
    properties_bytes = sum(len(text.encode()) + len("KEYS") + 2 for text in texts)
    own = BATCH_ENTRY_OVERHEAD_BYTES + _UNIQUE_ID_ENTRY_BYTES
    return own + len(message.body) + properties_bytes


def _keys(message: Message) -> Sequence[str]:
    # A plain string is one key, not a sequence of letters.
    keys = (message.keys,) if isinstance(message.keys, str) else message.keys
    for key in keys:
        if key.split() != [key]:
            raise InvalidArgument(f"a key must not be empty or have blanks, got {key!r}")
        _check_text("key", key)
    return keys


def _check_text(what: str, text: str) -> None:
    if not text.strip():
        raise InvalidArgument(f"{what} must not be blank, got {text!r}")
    if properties.NAME_END in text or properties.ENTRY_END in text:
        raise InvalidArgument(f"{what} must not contain 0x01 or 0x02, got {text!r}")
