"""Parsing Spark options: strings by name, read and checked the same way everywhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import partial
from typing import TypeVar

from turbopump.errors import InvalidArgument
from turbopump.spark.option_hints import hint
from turbopump.spark.records.bad_records import OnBadRecord

T = TypeVar("T")
D = TypeVar("D")

NO_HINTS: Mapping[str, str] = {}

_DIGITS_MAX = 30
"""Maximum digits of a number: far more than any option needs; Python refuses thousands."""

_BYTE_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_BYTES = re.compile(rf"(\d{{1,{_DIGITS_MAX}}})\s*([bkmg]?)b?", re.ASCII | re.IGNORECASE)
_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_LONGEST_MS = 2**31 - 1
"""The longest wait of one socket call: 24 days."""
_DURATION = re.compile(rf"(\d{{1,{_DIGITS_MAX}}})\s*(ms|s|m|h|d)?", re.ASCII)

_FIRST_PLAUSIBLE_MS = 100_000_000_000
_LAST_PLAUSIBLE_MS = 253_402_300_799_999
"""1973 to 9999. Other numbers mean something else: a date, seconds, an offset."""


class Given:
    """The options as given, by their documented names, case-insensitive."""

    def __init__(
        self,
        options: Mapping[str, str | None],
        names: Iterable[str],
        of_format: str,
        hints: Mapping[str, str] = NO_HINTS,
    ) -> None:
        by_key = {name.lower(): name for name in names}
        unknown = sorted(key for key in options if key.lower() not in by_key)
        if unknown:
            guesses = ", ".join(with_hint(key, by_key.values(), hints) for key in unknown)
            raise InvalidArgument(
                f"format {of_format} has no option {guesses}; options are "
                f"{', '.join(by_key.values())}"
            )
        if missing := [key for key, text in options.items() if text is None]:
            raise InvalidArgument(
                f"option {', '.join(missing)} must not be None; omit it for the default"
            )
        self._written = {by_key[key.lower()]: str(text) for key, text in options.items()}
        self._values = {name: text.strip() for name, text in self._written.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __getitem__(self, name: str) -> str:
        """Return an option's text, or an empty string if it is not given."""
        return self._values.get(name, "")

    def as_written(self, name: str) -> str:
        """Return the text with surrounding blanks."""
        return self._written.get(name, "")

    def find(self, name: str, read: Callable[[str, str], T], default: D) -> T | D:
        """Return an option's value as parsed by ``read``."""
        return read(name, self._values[name]) if name in self._values else default


def with_hint(key: str, names: Iterable[str], hints: Mapping[str, str]) -> str:
    """Return the name of an unknown option with a suggestion, such as one of the known names."""
    if (instead := hint(key, hints)) is not None:
        # Spark passes option names in lower case.
        name = {name.lower(): name for name in hints}.get(key.lower(), key)
        return f"{name!r} ({instead})"
    by_key = {name.lower(): name for name in names}
    close = get_close_matches(key.lower(), by_key, 1)
    return f"{key!r} (did you mean {by_key[close[0]]}?)" if close else repr(key)


# --- single values, each read from an option's name and text --------------------------------------


def text_of(name: str, text: str) -> str:  # noqa: ARG001 - the signature of all parsers
    return text


def not_empty(name: str, text: str) -> str:
    if not text:
        raise InvalidArgument(f"option {name} must not be empty")
    return text


def one_topic(name: str, text: str) -> str:
    if "," in text:
        raise InvalidArgument(
            f"option {name} must be one topic, got {text!r}; use option topics for several"
        )
    return not_empty(name, text)


def expression(name: str, text: str) -> str:
    """Accept a valid regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        wrong = f"option {name} must be a regular expression, got {text!r}: {error}"
        raise InvalidArgument(wrong) from None
    return not_empty(name, text)


def boolean(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise InvalidArgument(f"option {name} must be true or false, got {text!r}")
    return text.lower() == "true"


def one_of(*allowed: str) -> Callable[[str, str], str]:
    """Return a parser for one of some words, in any case."""
    words = {each.lower(): each for each in allowed}

    def read(name: str, text: str) -> str:
        word = text.lower()
        if word not in words:
            guess = with_hint(text, allowed, NO_HINTS)
            raise InvalidArgument(f"option {name} must be {' or '.join(allowed)}, got {guess}")
        return words[word]

    return read


def on_bad_record(*allowed: OnBadRecord) -> Callable[[str, str], OnBadRecord]:
    read = one_of(*allowed)
    return lambda name, text: OnBadRecord(read(name, text))


def natural(name: str, text: str, least: int = 0) -> int:
    """Parse a whole number, 0 or more."""
    if not _is_number(text) or int(text) < least:
        raise InvalidArgument(
            f"option {name} must be a whole number, {least} or more, got {text!r}"
        )
    return int(text)


positive = partial(natural, least=1)


def size_bytes(name: str, text: str) -> int:
    """Parse a size in bytes, with or without a unit; at least one."""
    match = _BYTES.fullmatch(text)
    count = int(match[1]) * _BYTE_UNITS[match[2].lower()] if match else 0
    if not count:
        raise InvalidArgument(
            f"option {name} must be a size such as 500k, 64m or 1g, got {text!r}; a bare number is "
            "bytes"
        )
    return count


def duration_ms(name: str, text: str, least_ms: int = 1) -> int:
    match = _DURATION.fullmatch(text)
    duration = int(match[1]) * _UNIT_MS[match[2] or "ms"] if match else 0
    if not 0 < duration <= _LONGEST_MS:
        raise InvalidArgument(
            f"option {name} must be a duration such as 500ms, 5s or 1m, up to 24d, got {text!r}; "
            "a bare number is milliseconds"
        )
    if duration < least_ms:
        raise InvalidArgument(
            f"option {name} must be at least {least_ms}ms, got {text!r} ({duration} ms); a bare "
            "number is milliseconds"
        )
    return duration


def duration_ms_from(least_ms: int) -> Callable[[str, str], int]:
    """Return a parser for a duration of at least ``least_ms``."""
    return partial(duration_ms, least_ms=least_ms)


def timestamp_ms(name: str, text: str, forms: str) -> int:
    """Parse a timestamp: milliseconds since 1970, or an ISO time, in UTC unless it names a zone.

    ``forms`` is the list of valid forms in errors.
    """
    if _is_number(text):
        if not _FIRST_PLAUSIBLE_MS <= int(text) <= _LAST_PLAUSIBLE_MS:
            raise InvalidArgument(
                f"option {name} must be a timestamp between 1973 and 9999, got {text!r}; write one "
                "such as 2026-01-31T08:00:00Z, or milliseconds since 1970"
            )
        return int(text)
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(f"option {name} must be {forms}, got {text!r}") from None
    zoned = parsed if parsed.tzinfo is not None else parsed.replace(tzinfo=UTC)
    return round(zoned.timestamp() * 1000)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX
