"""Messages as commands show them."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from turbopump.cli.formats import format_body, format_time, printable
from turbopump.cli.output import columns

if TYPE_CHECKING:
    from turbopump.wire.record import MessageView

_BODY_CHARS_MAX = 60

COLUMNS = columns(
    "stored_ms=STORED:time queue_id=QUEUE:number offset:number tags message_id:id short_body=BODY"
)

FIELDS = columns(
    "topic message_id offset_id queue_id=queue offset tags keys born_ms=born:time born_host"
    " stored_ms=stored:time store_host reconsume_times=retries property_texts=properties body_bytes"
    " body_shown=body",
    str,
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
