"""Parse times and queues from options; format values for people. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from turbopump.errors import InvalidArgument

if TYPE_CHECKING:
    from turbopump.message import MessageQueue

_AGO = re.compile(r"-?(\d+)\s*(ms|s|m|h|d)(?:\s+ago)?")
_DURATION = re.compile(r"(\d+)\s*(ms|s|m|h|d)")
_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_EPOCH_MS_DIGITS = 12
"""A whole number with at least this many digits is milliseconds since 1970."""


def parse_time(text: str, now: datetime) -> datetime:
    """Parse a time: ISO, local unless it has a zone; ``15m`` ago; or milliseconds since 1970."""
    try:
        found = _parse_time(text.strip(), now)
        # Some valid dates have no timestamp.
        found.timestamp()
    except (ValueError, OverflowError, OSError):
        raise InvalidArgument(
            "time must be now, 2026-03-01T12:00:00, 15m (ago; s, m, h, d) or milliseconds "
            f"since 1970, in the years 1 to 9999, got {text!r}"
        ) from None
    return found


def _parse_time(words: str, now: datetime) -> datetime:
    ago = _AGO.fullmatch(words)
    if words == "now":
        return now
    if ago is not None:
        return now - timedelta(milliseconds=int(ago[1]) * _UNITS_MS[ago[2]])
    if words.isdecimal() and len(words) >= _EPOCH_MS_DIGITS:
        return datetime.fromtimestamp(int(words) / 1000, UTC)
    return datetime.fromisoformat(words).astimezone()


def parse_duration_ms(text: str) -> int:
    """Parse a duration, such as ``90s`` or ``5m``."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise InvalidArgument(
            f"duration must be 90s, 5m or the like (ms, s, m, h, d), got {text!r}"
        )
    return int(found[1]) * _UNITS_MS[found[2]]


def parse_queues(texts: Sequence[str], known: Iterable[MessageQueue]) -> list[MessageQueue] | None:
    """Read queues, ``broker:0`` or ``0`` of every broker; None for none given, which means all."""
    if not texts:
        return None
    every = sorted(known)
    chosen: list[MessageQueue] = []
    for text in texts:
        broker, mark, number = text.rpartition(":")
        found = [
            queue
            for queue in every
            if str(queue.queue_id) == number and (not mark or queue.broker == broker)
        ]
        if not found:
            names = ", ".join(f"{queue.broker}:{queue.queue_id}" for queue in every)
            raise InvalidArgument(f"queue {text!r} does not exist; there are {names or 'none'}")
        chosen += found
    return list(dict.fromkeys(chosen))


def parse_pairs(texts: Iterable[str], what: str) -> dict[str, str]:
    """Read ``name=value`` words."""
    found = {}
    for text in texts:
        name, mark, value = text.partition("=")
        if not mark or not name.strip():
            raise InvalidArgument(f"{what} must be name=value, got {text!r}")
        found[name.strip()] = value
    return found


def format_time(epoch_ms: int | None) -> str:
    """Format a timestamp in local time, as `parse_time` reads it."""
    if epoch_ms is None:
        return "-"
    try:
        at = datetime.fromtimestamp(epoch_ms / 1000).astimezone()
    except (ValueError, OverflowError, OSError):
        # Clients may send any number; show one that is not a time as it is.
        return str(epoch_ms)
    return at.replace(tzinfo=None).isoformat(timespec="seconds")


def format_duration(duration_ms: int | None) -> str:
    """Format a duration with its two largest units."""
    if duration_ms is None:
        return "-"
    if duration_ms < _UNITS_MS["s"]:
        return f"{duration_ms}ms"
    seconds = duration_ms // 1000
    days, hours, minutes = seconds // 86_400, seconds // 3600 % 24, seconds // 60 % 60
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{seconds % 60:02}s" if minutes else f"{seconds}s"


def format_number(number: float | None) -> str:
    """Format a number, floats with one decimal."""
    if number is None:
        return "-"
    return str(number) if isinstance(number, int) else f"{number:.1f}"


def format_known(number: int | None) -> str:
    """Format a number that may be unknown, which is not the same as having none."""
    return "unknown" if number is None else format_number(number)


def format_percent(part: float | None) -> str:
    return "-" if part is None else f"{part:.0%}"


def format_value(value: object) -> str:
    """Format any other value: lists with commas, None as a dash."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(printable(str(each)) for each in value) or "-"
    return printable(str(value))


def printable(text: str) -> str:
    """Escape control characters of untrusted text, which could steer a terminal."""
    return "".join(mark if mark.isprintable() else repr(mark)[1:-1] for mark in text)


def format_body(body: bytes, chars_max: int = 0) -> str:
    """Format a body on one line, as text if it is UTF-8; 0 for no limit."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = f"<{len(body)} bytes: {body[:16].hex()}{'…' if len(body) > 16 else ''}>"
    shown = printable(text)
    if chars_max and len(shown) > chars_max:
        return shown[: chars_max - 1] + "…"
    return shown
