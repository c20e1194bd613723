"""Messages as commands show them."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from turbopump.cli.formats import format_body, format_time, printable
from turbopump.cli.output import Column

if TYPE_CHECKING:
    from turbopump.wire.record import MessageView

_BODY_CHARS_MAX = 60

COLUMNS = (
    Column("stored_ms", "STORED", "time"),
    Column("queue_id", "QUEUE", "number"),
    Column("offset", "OFFSET", "number"),
    Column("tags", "TAGS"),
    Column("message_id", "MESSAGE ID", "id"),
    Column("short_body", "BODY"),
)

FIELDS = (
    Column("topic", "topic"),
    Column("message_id", "message id"),
    Column("offset_id", "offset id"),
    Column("queue_id", "queue"),
    Column("offset", "offset"),
    Column("tags", "tags"),
    Column("keys", "keys"),
    Column("born_ms", "born", "time"),
    Column("born_host", "born host"),
    Column("stored_ms", "stored", "time"),
    Column("store_host", "store host"),
    Column("reconsume_times", "retries"),
    Column("property_texts", "properties"),
    Column("body_bytes", "body bytes"),
    Column("body_shown", "body"),
)


def message_row(message: MessageView) -> dict[str, Any]:
    """Return what machines get; ``body`` is None when it is not text, and then in base64."""
    body = message.body
    try:
        text: str | None = body.decode()
    except UnicodeDecodeError:
        text = None
    return {
        "topic": message.topic,
        "message_id": message.message_id,
        "offset_id": message.offset_id,
        "queue_id": message.queue_id,
        "offset": message.queue_offset,
        "tags": message.tags,
        "keys": message.keys,
        "properties": dict(message.properties),
        "born_ms": message.born_timestamp_ms,
        "born_host": str(message.born_host),
        "stored_ms": message.store_timestamp_ms,
        "store_host": str(message.store_host),
        "reconsume_times": message.reconsume_times,
        "body_bytes": len(body),
        "body": text,
        "body_base64": None if text is not None else base64.b64encode(body).decode(),
    }


def shown_row(message: MessageView) -> dict[str, Any]:
    """Return what people get."""
    return {
        **message_row(message),
        "short_body": format_body(message.body, _BODY_CHARS_MAX),
        "body_shown": format_body(message.body),
        "property_texts": [f"{name}={value}" for name, value in message.properties.items()],
    }


def message_line(message: MessageView) -> str:
    """Return a message on one line, as `message tail` prints it."""
    tags = f" [{printable(message.tags)}]" if message.tags else ""
    keys = f" {printable(','.join(message.keys))}" if message.keys else ""
    place = f"{message.queue_id}:{message.queue_offset}"
    stored_at = format_time(message.store_timestamp_ms)
    return f"{stored_at}  {place}{tags}{keys}  {format_body(message.body)}"
